"""Rows of zero-variance groups, which are masked (`zero_variance_groups="mask"`) or not computed (`"skip"`)."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from .option_rules import MEAN_OVER_ROWS


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

    Without a KL term or an entropy bonus such a row adds nothing to the gradient, but its forward and backward pass
    cost as much as any other. Losses that divide by the number of rows or tokens of the micro-batch divide by fewer
    then; advantages are scaled accordingly. Every rank keeps as many rows as the one with the most others, and at
    least one: TRL gathers values of the rows for its metrics, and every rank has to take part in the backward pass.

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
