"""The plan of a step."""

from dataclasses import dataclass

from ..pass_rates.predictions import PassRatePredictions
from ..sampling.batch_slots import BatchSlot
from ..sampling.prompt_sources import PromptBatch


@dataclass
class StepPlan:
    """
    Prompts and numbers of rollouts of one generation batch; one entry per prompt or slot of all ranks in each list.

    Args:
        prompts ([`~sampling.prompt_sources.PromptBatch`]):
            The prompts.
        sizes (`list[int]`):
            Rollouts per round of each prompt.
        slots (`list[BatchSlot]`, *optional*):
            Where the rollouts are collected, if prompts come from the queue.
        predictions ([`~pass_rates.predictions.PassRatePredictions`], *optional*):
            Predictions for the prompts.
        global_step (`int`):
            Number of optimizer steps of the weights that generate the rollouts.
        rows (`list[dict]`):
            Data set rows of this rank, one per rollout, with one round per step.
        is_prefetched (`bool`):
            Whether the requests were sent to a server in the step before.
    """

    prompts: PromptBatch
    sizes: list[int]
    slots: list[BatchSlot] | None
    predictions: PassRatePredictions | None
    global_step: int
    rows: list[dict]
    is_prefetched: bool = False
