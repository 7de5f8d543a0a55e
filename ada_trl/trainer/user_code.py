"""Protection of the training state from code of the user that runs within a step."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from trl.trainer.grpo_trainer import is_async_callable


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


def check_rewards_of(function: Any, name: str) -> Any:
    """Wrap a reward function so that [`check_rewards`] checks its return value. Reward models are returned as they are."""
    if isinstance(function, torch.nn.Module):
        return function
    wrapped: Callable
    if is_async_callable(function):

        @functools.wraps(function)
        async def wrapped(*args: Any, **kwargs: Any) -> list:
            return check_rewards(await function(*args, **kwargs), name)
    else:

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> list:
            return check_rewards(function(*args, **kwargs), name)

    return wrapped


def check_rewards(rewards: Any, name: str) -> list:
    """
    Return the rewards as a list.

    Args:
        rewards (`Any`):
            Return value of a reward function.
        name (`str`):
            Name of the function.

    Raises:
        `ValueError`: If it is not an iterable with a number or `None` for each completion.
    """
    is_scalar = not hasattr(rewards, "__iter__") or getattr(rewards, "ndim", 1) == 0
    if not is_scalar and not isinstance(rewards, str | bytes | Mapping | Set):
        values = list(rewards)
        if _is_vector(values):
            return values
    raise ValueError(
        f"The reward function {name!r} returned {_shorten(rewards)}, but it must return one number or None per completion. "
        "Return a list, such as [1.0, 0.0, None]."
    )


def _is_vector(values: list) -> bool:
    """Whether TRL's conversion to a tensor, which does not name the function in its errors, gives one number per value."""
    try:
        return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32).ndim == 1
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def _shorten(value: Any, length: int = 80) -> str:
    text = " ".join(repr(value).split())  # an array has several lines
    return text if len(text) <= length else f"{text[:length]}…"
