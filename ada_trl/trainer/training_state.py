"""Protection of the training state from code of the user that runs within a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class TrainingState:
    """
    The state that a training step relies on and that reward functions, tools, environments and transforms may change: the training
    mode of the modules, PyTorch's default device and dtype, and whether gradients are recorded.

    A reward function that uses the policy as a judge, for example, calls `model.eval()`; TRL would then treat the step as an evaluation.
    Random state is not restored, as in TRL: with a reward function that sets the seed, generations repeat their random numbers.

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
            # The end of this block also restores the mode if the user's code has entered another one and not left it.
            with torch.inference_mode(self._inference):
                torch.set_grad_enabled(self._gradients)  # `inference_mode` has changed it
                yield
        finally:
            self.restore()
