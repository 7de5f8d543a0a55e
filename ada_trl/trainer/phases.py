"""The phases of a step: in each, what the parent calls means something else. And what it hands over in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .rollout_batch import RolloutBatch


# What the columns of `GRPOTrainer._generate` are where they have no values: prompt_ids, completion_ids, tool_mask,
# completions, logprobs, extra_fields, images, tool_images. All others have one value per row.
_NO_VALUES: tuple = ([], [], None, [], None, {}, None, [])


class ServerCompletions(NamedTuple):
    """Completions that a server has generated, to be decoded and scored by the parent as if it had generated them."""

    prompt_ids: list[list[int]]
    images: list[list | None] | None
    completion_ids: list[list[int]]
    logprobs: list[list[float]]


@dataclass
class Idle:
    """Everything is as in [`~trl.GRPOTrainer`]: evaluation, and all that happens outside of a step."""


@dataclass
class RewardCapture:
    """A step of plain GRPO, in which the rewards of all processes and this one's completions are looked at."""

    rewards: torch.Tensor | None = None
    completion_ids: list[list[int]] = field(default_factory=list)


@dataclass
class Preparing:
    """The parent turns data set rows into prompts, and is left before it generates."""


@dataclass
class Sampling:
    """Completions are generated, or those of a server decoded, and scored, on this process alone."""

    answers: ServerCompletions | None = None
    tool_calls: tuple[int, int] = (0, 0)  # and how many of them failed
    states: torch.Tensor | None = None  # (rows, H), the policy's hidden states of the prompts, where they are caught


@dataclass
class InjectedBatch:
    """The parent makes the update batch of what was selected."""

    replay: RolloutBatch
    states: torch.Tensor | None = None  # as above, of this process's rows


class Prepared(Exception):
    """Leaves the parent with the prompts that it has prepared."""

    def __init__(self, prompts: list):
        super().__init__("GRPOTrainer was left in the middle of a batch")
        self.prompts = prompts


class NoOpEnvironment:
    """Stands in for an environment whose episode is over, while the parent prepares its rollout again."""

    def reset(self, **row) -> None:
        return None


def finite(rewards: torch.Tensor) -> torch.Tensor:
    """The rewards with NaN in place of infinities, which no baseline survives."""
    return rewards.masked_fill(rewards.isinf(), torch.nan)


def rows_of(columns: tuple, number: int) -> list[tuple]:
    return list(zip(*(column or [None] * number for column in columns), strict=True))


def columns_of(rows: Sequence[tuple]) -> tuple:
    return tuple(
        empty if all(value is None for value in values) else list(values)
        for empty, values in zip(_NO_VALUES, zip(*rows, strict=True), strict=True)
    )
