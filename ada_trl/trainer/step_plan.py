"""The plan of a step."""

from dataclasses import dataclass

from ..pass_rates.predictions import PassRatePredictions
from ..sampling.batch_slots import BatchSlot
from ..sampling.prompt_sources import PromptBatch


@dataclass
class StepPlan:
    """
    What one generation batch will sample; one entry per prompt or slot of all ranks in each list.

    Args:
        prompts ([`~sampling.prompt_sources.PromptBatch`]):
            The prompts.
        sizes (`list[int]`):
            Rollouts per round of each prompt.
        slots (`list[BatchSlot]`, *optional*):
            Where the rollouts are collected, if prompts come from the queue.
        predictions ([`~pass_rates.predictions.PassRatePredictions`], *optional*):
            What was predicted of the prompts.
        global_step (`int`):
            Optimizer steps that the sampling weights have seen.
        rows (`list[dict]`):
            Data set rows of this rank, one per rollout, with one round per step.
        is_prefetched (`bool`):
            Whether a server was sent the requests in the step before.
    """

    prompts: PromptBatch
    sizes: list[int]
    slots: list[BatchSlot] | None
    predictions: PassRatePredictions | None
    global_step: int
    rows: list[dict]
    is_prefetched: bool = False
