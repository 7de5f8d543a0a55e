"""The update batch as the parent has made it: what it says of the weights that sampled it, and rows that shall not count."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator


MAX_LOG_RATIO = 20.0  # of a rollout, so that squares of the ratios stay finite
MEAN_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")  # losses that divide by the number of rows, masked or not


def mask_rows(output: dict, masked: Sequence[bool], loss_type: str, accelerator: Accelerator) -> None:
    """
    Make the loss what it would be without the `masked` rows, those of prompts without contrast. Collective.

    Args:
        output (`dict`):
            The batch of this process.
        masked (`Sequence[bool]`):
            By row of all processes.
        loss_type (`str`):
            As in [`~trl.GRPOConfig`].
        accelerator (`Accelerator`):
            This process and the others.
    """
    rows = len(output["advantages"])
    local = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)
    keep = ~torch.tensor(masked[local], device=output["completion_mask"].device)
    output["completion_mask"] = output["completion_mask"] * keep.unsqueeze(1)  # (B, T)
    loss_mask = output["completion_mask"] * output.get("tool_mask", 1)
    output["num_items_in_batch"] = accelerator.gather(loss_mask.sum()).sum()
    if loss_type in MEAN_OVER_ROWS:
        output["advantages"] = output["advantages"] * len(masked) / max(sum(not m for m in masked), 1)


def ess_ratio(output: dict, accelerator: Accelerator) -> float:
    """Of how many rollouts of their own the new weights' worth is, as a share of the batch of all processes. Collective."""
    differences = output["old_per_token_logps"] - output["sampling_per_token_logps"]  # (B, T)
    ratios = (differences * output["completion_mask"]).sum(dim=1).clamp(max=MAX_LOG_RATIO).exp()
    ratios = accelerator.gather(ratios)
    return (ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)).item()


def mean_logprob_diff(output: dict[str, torch.Tensor]) -> list[float] | None:
    """
    By row, the mean absolute difference of the sampled tokens' log-probabilities, as the engine said and as the trainer
    has recomputed them, in nats per token; `None` where it does not recompute them.
    """
    if not {"old_per_token_logps", "sampling_per_token_logps"} <= output.keys():
        return None
    mask = output["completion_mask"] * output.get("tool_mask", 1)  # (B, T)
    differences = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs() * mask
    return (differences.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()
