"""Protection of the training state from code of the user that runs within a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserved_state(model: torch.nn.Module) -> Iterator[None]:
    """
    Restore what the training step relies on after the block, in which reward functions or tools run: whether the model is in
    training mode, and whether gradients are recorded.

    A policy that judges its own answers, for example, calls `model.eval()`, after which TRL would take the step for an evaluation.
    """
    modes = [(module, module.training) for module in model.modules()] if model.training else []
    gradients = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        if modes and not all(module.training == mode for module, mode in modes):
            for module, mode in modes:
                module.training = mode
