"""Advantages of a user's function (`advantage_func` or `compute_advantages`), run as a reward function is."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from ..core import column_array
from ..core.advantages import MAX_ADVANTAGE
from ..sampling.prompts import StepPlan
from ..utils.distributed import synchronized_errors
from .interception import TrainingState
from .step import StepBatch


def run_own_advantages(trainer: GRPOTrainer, plan: StepPlan, batch: StepBatch) -> np.ndarray:
    """Advantages by the user's function, `(N,)`, which also sees the columns of the dataset. Collective."""
    batch.rollouts = replace(batch.rollouts, columns=_dataset_columns(trainer, plan, batch))
    with synchronized_errors(), TrainingState(trainer.model).preserved():
        advantages = trainer.compute_advantages(batch.rollouts)
        return check_advantages(advantages, trainer.own_advantages, len(batch.rollouts))


def _dataset_columns(trainer: GRPOTrainer, plan: StepPlan, batch: StepBatch) -> dict[str, np.ndarray]:
    """Columns of the dataset but for prompts and images, with the value of each rollout. Collective."""
    hidden = ("prompt", "image", "images")
    rows = gather_object([{name: row[name] for name in row if name not in hidden} for row in plan.local_rows])
    of_prompts = [rows[i] for i in plan.rows_of(batch.prompts)]
    features = getattr(trainer.train_dataset, "features", None) or {}  # of a stream, perhaps unknown
    columns = {}
    for name in dict.fromkeys(name for row in of_prompts for name in row):
        kind = str(getattr(features.get(name), "dtype", ""))
        values = [row.get(name) for row in of_prompts]
        array = column_array(values, is_numeric=kind.startswith(("int", "uint", "float")))
        columns[name] = array[batch.rollouts.prompt_N]
    return columns


def check_advantages(advantages: Any, name: str, num_rollouts: int) -> np.ndarray:
    """
    Return the advantages that the user's function `name` has returned, as an array.

    Raises:
        `ValueError`: If it is not one number per rollout that the loss can represent.
    """
    if isinstance(advantages, torch.Tensor):
        if advantages.requires_grad:
            raise ValueError(
                f"{name} returned a tensor with a gradient, but advantages are constants in the loss. Return "
                "`.detach()` of it."
            )
        advantages = advantages.cpu()
    if isinstance(advantages, np.ma.MaskedArray):
        advantages = advantages.filled(0)
    if isinstance(advantages, pd.Series) and not advantages.index.equals(pd.RangeIndex(len(advantages))):
        raise ValueError(
            f"{name} returned a pandas Series whose index is not 0, 1, …, {len(advantages) - 1}, but advantages are "
            "matched with rollouts by position. Return `.to_numpy()` of a Series in the order of the rollouts."
        )
    try:
        values = np.asarray(advantages, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} returned {type(advantages).__name__}, which is no array of numbers: {error}."
        ) from error
    if values.shape != (num_rollouts,):
        raise ValueError(
            f"{name} returned an array of shape {values.shape}, but it must have the shape ({num_rollouts},): one "
            "advantage for each of the rollouts that it was given."
        )
    is_valid = np.abs(values) <= MAX_ADVANTAGE  # NaN is not
    if not is_valid.all():
        raise ValueError(
            f"{name} returned {values[~is_valid][0]} for rollout {np.flatnonzero(~is_valid)[0]}, but advantages must "
            f"be finite and at most {MAX_ADVANTAGE:g}, so that the loss does not overflow. Return 0 for rollouts "
            "without a reward (NaN in rollouts.reward_N)."
        )
    return values
