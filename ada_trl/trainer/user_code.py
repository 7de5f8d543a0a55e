"""Protection of the training state from code of the user that runs within a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class TrainingState:
    """
    What a training step relies on and what reward functions, tools, environments and transforms may change: the training mode of
    the modules, PyTorch's default device and dtype, and whether gradients are recorded.

    A policy that judges its own answers, for example, calls `model.eval()`, after which TRL would take the step for an evaluation.
    Random state is not restored, as in TRL: a reward function that seeds makes the generations repeat their draws.

    Args:
        model (`torch.nn.Module`):
            The policy.
    """

    def __init__(self, model: torch.nn.Module):
        self._modes = [(module, module.training) for module in model.modules()]
        self._device, self._dtype = torch.get_default_device(), torch.get_default_dtype()
        self._gradients, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def restore(self) -> None:
        """Restore everything but inference mode, which only [`preserved`] can end."""
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        if torch.get_default_device() != self._device:
            # "cpu" set explicitly would leave a device context behind, which slows down every call.
            torch.set_default_device(None if self._device.type == "cpu" else self._device)
        if torch.is_grad_enabled() != self._gradients:
            torch.set_grad_enabled(self._gradients)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Run a block of the user's code, and restore the state after it."""
        try:
            with torch.inference_mode(
                self._inference
            ):  # its end restores the mode that a block entered and never left
                torch.set_grad_enabled(self._gradients)  # which the line above has switched
                yield
        finally:
            self.restore()
