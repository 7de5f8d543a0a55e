"""Base class of value networks: prediction, training on outcomes, and exact state on disk."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..utils.files import atomic_write


_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class ValueNetwork(ABC):
    """
    V_φ of Reinforce-Ada-Est ([Reinforce-Ada](https://huggingface.co/papers/2510.04996)): predicts the pass rate of a
    prompt, trained online by AdamW on the cross-entropy of observed counts,

    −Σ [k log p̂ + (n − k) log(1 − p̂)] / Σ n, of k positives in n rollouts,

    which does not depend on the rule that stopped the sampling; or the mean reward, trained on the squared error of observed sums.
    `inputs` has one entry per prompt, in the network's own format; every rank passes those of all prompts in the same order.

    Args:
        parameters (`Mapping[str, nn.Parameter]`):
            Trained parameters by name.
        options:
            Options of AdamW.
    """

    kind: str  # in errors
    filename: str  # in a checkpoint
    gradient_steps: int  # AdamW steps per `observe`
    _memory: Mapping[str, str] = {}  # tensors that are state but not trained: name in the file to attribute
    _growing: tuple[str, ...] = ()  # those of them with any number of rows

    def __init__(self, parameters: Mapping[str, nn.Parameter], **options: Any) -> None:
        self._trained = dict(parameters)
        self.optimizer = torch.optim.AdamW(self._trained.values(), **options)
        # AdamW would create these in its first step; a network can be saved before that.
        for parameter in self._trained.values():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @abstractmethod
    def predict(self, inputs: Any) -> list[float]:
        """Return p̂ or the predicted mean reward, one per prompt."""

    @abstractmethod
    def observe(self, inputs: Any, sums: Sequence[float], num_rollouts: Sequence[int]) -> None:
        """
        Train on one step. Call it once per step, with all prompts of all ranks in the same order everywhere.

        Args:
            inputs (`Any`):
                Inputs of the predictions.
            sums (`Sequence[float]`):
                Positive rollouts of each prompt, or the sum of its rewards.
            num_rollouts (`Sequence[int]`):
                Scored rollouts of each prompt; a prompt without any is left out.
        """

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of parameters, AdamW's moments and step, and all else that `observe` depends on, on the CPU."""
        moments = {
            f"{name}.{moment}": self.optimizer.state[parameter][moment]
            for name, parameter in self._trained.items()
            for moment in _MOMENTS
        }
        memory = {name: getattr(self, attribute) for name, attribute in self._memory.items()}
        tensors = self._trained | memory | moments
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """
        Continue from `state_dict()`. Learning rate and steps stay those of this object.

        Raises:
            `ValueError`: if tensors are missing, or are those of another network.
        """
        shapes, own_shapes = self._fixed_shapes(state), self._fixed_shapes(self.state_dict())
        different = [name for name in sorted({*shapes, *own_shapes}) if shapes.get(name) != own_shapes.get(name)]
        if different:
            raise ValueError(
                f"The state is not that of this {self.kind}: the tensors {', '.join(different[:6])} are missing or have other "
                "shapes. Resume with the model that it was trained with."
            )
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(state[name])
                for moment in _MOMENTS:
                    self.optimizer.state[parameter][moment].copy_(state[f"{name}.{moment}"])
        for name, attribute in self._memory.items():
            setattr(self, attribute, state[name].to(getattr(self, attribute), copy=True))

    def _fixed_shapes(self, state: Mapping[str, torch.Tensor]) -> dict[str, tuple]:
        """Return the shape of each tensor, without the number of rows if that may differ."""
        return {
            name: tuple(tensor.shape[1:] if name in self._growing else tensor.shape) for name, tensor in state.items()
        }

    def save(self, path: str | Path) -> None:
        """Write the state as safetensors, atomically; `filename` in a checkpoint."""
        with atomic_write(path) as temporary:
            save_file(self.state_dict(), temporary)

    def load(self, path: str | Path) -> None:
        """
        Continue from a file that `save` wrote. Nothing in it is executed or unpickled.

        Raises:
            `FileNotFoundError`: if there is no such file; a run without one starts from the prior.
            `ValueError`: if the file is truncated, not in the safetensors format, or of another network; the message names the
                file and the fix.
        """
        try:
            self.load_state_dict(load_file(path))
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"{path} is not a usable {self.kind}: {error} Restore it from another checkpoint, or delete it to start "
                "from the prior."
            ) from error


def outcome_tensor(sums: Sequence[float], num_rollouts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums and numbers of rollouts as `(P, 2)`, float32, and which prompts have scored rollouts, `(P,)`."""
    outcomes = torch.tensor([sums, num_rollouts], dtype=torch.float32).T
    return outcomes, outcomes[:, 1] > 0
