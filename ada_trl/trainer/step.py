"""One generation batch: what is planned before it is sampled, what is trained on, and the rows that are left out."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator

from ..core import Rollouts, SampledPrompt
from ..core.advantages import MAX_ADVANTAGE
from ..sampling.prompts import PromptBatch
from .option_rules import MEAN_OVER_ROWS


if TYPE_CHECKING:
    from ..pass_rates.tracker import PromptEstimates


POOL_COLUMNS = ("pool_size", "pool_positives")  # of the table of completions


@dataclass
class StepPlan:
    """
    Prompts of one generation batch, before they are sampled.

    Args:
        prompts ([`~sampling.prompts.PromptBatch`]):
            The prompts.
        sizes (`list[int]`):
            Number of rollouts of each prompt, of all ranks; with several rounds, in one of them.
        estimates ([`~pass_rates.tracker.PromptEstimates`], *optional*):
            Estimated pass rates of the prompts.
        global_step (`int`):
            Number of optimizer steps of the weights that generate the rollouts.
        rows (`list[dict]`):
            With one round per step: dataset rows of this rank, one per rollout.
    """

    prompts: PromptBatch
    sizes: list[int]
    estimates: "PromptEstimates | None"
    global_step: int
    rows: list[dict]


@dataclass
class StepBatch:
    """
    Rollouts of one generation batch of all ranks.

    Args:
        prompts (`list[SampledPrompt]`):
            The P sampled prompts.
        rollouts ([`~core.Rollouts`]):
            All rollouts.
        selected (`np.ndarray`):
            Indices of the rollouts that are trained on, prompt by prompt. Every rank trains on an equal part of them.
        is_on_distribution_P (`np.ndarray`):
            Which prompts are an unbiased sample of the dataset.
        metrics (`dict[str, float]`):
            Logged under `ada/`.
        advantage_N (`np.ndarray`):
            Advantages of all rollouts, once they are computed.
        is_truncated_N (`np.ndarray`):
            With one round per step: whether each rollout reached the maximum length.
    """

    prompts: list[SampledPrompt]
    rollouts: Rollouts
    selected: np.ndarray
    is_on_distribution_P: np.ndarray
    metrics: dict[str, float]
    advantage_N: np.ndarray = field(init=False)
    is_truncated_N: np.ndarray = field(init=False)

    @property
    def prompt_of_row(self) -> np.ndarray:
        """Prompt of each row of all ranks."""
        return self.rollouts.prompt_N[self.selected]

    @property
    def advantage_of_row(self) -> np.ndarray:
        return self.advantage_N[self.selected]

    @property
    def pool_columns(self) -> dict[str, list[int]]:
        """Columns of the table of completions: size of each row's pool, and positives in it."""
        of_prompts = (self.rollouts.size_P, self.rollouts.positives_P)
        return {
            name: values[self.prompt_of_row].tolist() for name, values in zip(POOL_COLUMNS, of_prompts, strict=True)
        }

    def in_zero_advantage_group(self) -> np.ndarray:
        """Whether all rows of each row's prompt have the advantage 0, by row."""
        has_gradient_P = np.zeros(self.rollouts.num_prompts, dtype=bool)
        has_gradient_P[self.prompt_of_row[self.advantage_of_row != 0]] = True
        return ~has_gradient_P[self.prompt_of_row]


def mask_rows(output: dict, masked: Sequence[bool], loss_type: str, accelerator: Accelerator) -> None:
    """
    Mask rows of zero-variance groups, so that the loss is that of a batch without them. Collective.

    Args:
        output (`dict`):
            Batch of this rank, as [`~trl.GRPOTrainer`] trains on it.
        masked (`Sequence[bool]`):
            Whether each row of all ranks is masked.
        loss_type (`str`):
            As in [`~trl.GRPOConfig`].
        accelerator (`Accelerator`):
            The run's accelerator.
    """
    rows = len(output["advantages"])
    local = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)
    is_trained = ~torch.tensor(masked[local], device=output["completion_mask"].device)
    output["completion_mask"] = output["completion_mask"] * is_trained.unsqueeze(1)  # (B, T)
    loss_mask = output["completion_mask"] * output.get("tool_mask", 1)
    output["num_items_in_batch"] = accelerator.gather(loss_mask.sum()).sum()
    if loss_type in MEAN_OVER_ROWS:  # masked rows still count in these losses' divisor
        output["advantages"] = output["advantages"] * len(masked) / max(sum(not m for m in masked), 1)


def skip_zero_advantage_rows(inputs: dict, loss_type: str, accelerator: Accelerator) -> dict:
    """
    Remove rows whose advantage is 0 from a micro-batch, without changing the gradient of its loss. Collective.

    Without a KL term or an entropy bonus such a row adds nothing to the gradient, but its forward and backward pass cost as much
    as any other. Losses that divide by the number of rows or tokens of the micro-batch divide by fewer then; advantages are scaled
    accordingly. Every rank keeps as many rows as the one with the most others, and at least one: TRL gathers values of the rows
    for its metrics, and every rank has to take part in the backward pass.

    Args:
        inputs (`dict`):
            A micro-batch of [`~trl.GRPOTrainer`], rows first in every tensor and list.
        loss_type (`str`):
            As in [`~trl.GRPOConfig`].
        accelerator (`Accelerator`):
            The run's accelerator.
    """
    total = len(inputs["advantages"])
    # An override may return advantages of tokens, (B, T).
    is_trained = (inputs["advantages"] != 0).view(total, -1).any(dim=1)
    if "pixel_values" in inputs:  # they are not ordered by row
        is_trained = torch.ones_like(is_trained)
    number = max(int(accelerator.gather(is_trained.sum()).max()), 1)
    if number == total:
        return inputs
    is_trained[torch.argsort((~is_trained).int(), stable=True)[:number]] = True  # the first of the other rows fill up

    def of_trained(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == total:
            return value[is_trained]
        if isinstance(value, list) and len(value) == total:  # of a user's override
            return list(itertools.compress(value, is_trained.tolist()))
        return value

    trained = {name: of_trained(value) for name, value in inputs.items()}
    if loss_type in MEAN_OVER_ROWS:
        trained["advantages"] = trained["advantages"] * len(trained["advantages"]) / total
    elif loss_type == "bnpo":
        tokens, trained_tokens = (batch["completion_mask"] * batch.get("tool_mask", 1) for batch in (inputs, trained))
        trained["advantages"] = trained["advantages"] * trained_tokens.sum() / tokens.sum().clamp(min=1)
    return trained


def check_advantages(advantages: Any, name: str, num_rollouts: int) -> np.ndarray:
    """
    Return the advantages that the user's function `name` has returned, as an array.

    Raises:
        `ValueError`: If it is not one number per rollout that the loss can represent.
    """
    if isinstance(advantages, torch.Tensor):
        if advantages.requires_grad:
            raise ValueError(
                f"{name} returned a tensor with a gradient, but advantages are constants in the loss. Return `.detach()` of it."
            )
        advantages = advantages.cpu()
    try:
        values = np.asarray(advantages, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} returned {type(advantages).__name__}, which is no array of numbers: {error}."
        ) from error
    if values.shape != (num_rollouts,):
        raise ValueError(
            f"{name} returned an array of shape {values.shape}, but it must have the shape ({num_rollouts},): one advantage for each "
            "of the rollouts that it was given."
        )
    is_valid = np.abs(values) <= MAX_ADVANTAGE  # NaN is not
    if not is_valid.all():
        raise ValueError(
            f"{name} returned {values[~is_valid][0]} for rollout {np.flatnonzero(~is_valid)[0]}, but advantages must be finite and at "
            f"most {MAX_ADVANTAGE:g}, so that the loss does not overflow. Return 0 for rollouts without a reward (NaN in "
            "rollouts.reward_N)."
        )
    return values
