"""Estimates of prompts' pass rates before sampling, and their update after sampling."""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..core import Rollouts
from ..core.metrics import rollouts_by_estimate
from ..utils.distributed import gather_results
from ..utils.logging import get_logger
from .hidden_states import HiddenStateExtractor
from .prompt_id import prompt_reference
from .store import PASS_RATES_FILE, load_pass_rates, save_pass_rates
from .success_counts import EMAPassRate, brier_metrics
from .value_head import VALUE_HEAD_FILE, ValueHead


logger = get_logger(__name__)


class PromptEstimates(NamedTuple):
    """
    Estimates for the prompts of one step, from before they were sampled; one entry per prompt of all ranks.

    Args:
        keys (`list[str]`):
            Identities of the prompts.
        pass_rates (`list[float]`):
            p̂ of the estimator in use.
        counted (`list[float]`):
            p̂ from success counts, which a value head is compared with.
        states (`torch.Tensor` of shape `(P, H)`, *optional*):
            The policy's hidden states, if there is a value head.
        seconds (`float`):
            Time that the estimation took.
    """

    keys: list[str]
    pass_rates: list[float]
    counted: list[float]
    states: torch.Tensor | None
    seconds: float

    def take(self, indices: Sequence[int]) -> "PromptEstimates":
        """The estimates of the prompts at `indices`."""
        chosen = list(indices)
        return self._replace(
            keys=[self.keys[i] for i in chosen],
            pass_rates=[self.pass_rates[i] for i in chosen],
            counted=[self.counted[i] for i in chosen],
            states=None if self.states is None else self.states[chosen],
        )


class PassRateTracker:
    """
    Estimates per-prompt pass rates before sampling and updates the estimates afterwards: steps 1 and 5 of
    Reinforce-Ada-Est ([Reinforce-Ada](https://huggingface.co/papers/2510.04996)). In other modes it only records pass
    rates.

    Every rank has the same tracker: all ranks call `estimate` and `observe` for all prompts, in the same order, once
    per generation batch. Success counts are kept always, a value head only with a `reader`.

    Args:
        reader ([`HiddenStateExtractor`], *optional*):
            Source of the policy's hidden states for a value head.
        hash_entire_row (`bool`):
            Whether the whole dataset row identifies a prompt, because an environment makes the prompt from it.
    """

    def __init__(
        self,
        *,
        reader: HiddenStateExtractor | None,
        hash_entire_row: bool = False,
    ):
        self.counts, self.reader, self.hash_entire_row = EMAPassRate(), reader, hash_entire_row
        self.head = None if reader is None else ValueHead(reader.size)

    def estimate(self, local_rows: Sequence[dict]) -> PromptEstimates:
        """Estimate the pass rates of all ranks' prompts, from the dataset rows of this rank's. Collective."""
        options = {"hash_entire_row": self.hash_entire_row, "keep_prompt": self.head is not None}
        by_rank = gather_results(lambda: [prompt_reference(row, **options) for row in local_rows])
        started = time.perf_counter()
        keys, prompts = ([reference[i] for rank in by_rank for reference in rank] for i in (0, 1))
        counted, states = self.counts.predict(keys), None
        pass_rates = counted
        if self.head is not None:
            states = self.reader.read(prompts)  # type: ignore[union-attr] # there is a reader
            pass_rates = self.head.predict(states)
        return PromptEstimates(keys, pass_rates, counted, states, time.perf_counter() - started)

    def observe(self, estimates: PromptEstimates, rollouts: Rollouts, *, step: int) -> dict[str, float]:
        """
        Update the counts and the value head with the rollouts of the prompts of `estimates`.

        Returns:
            `dict[str, float]`: accuracy of the estimates, the allocation curve, and the seconds spent.
        """
        started = time.perf_counter()
        positives, scored = rollouts.positives_P.tolist(), rollouts.scored_P.tolist()
        metrics = {
            f"estimator/{name}": value
            for name, value in brier_metrics(estimates.pass_rates, positives, scored).items()
        }
        curve = rollouts_by_estimate(estimates.pass_rates, rollouts.size_P.tolist())
        metrics |= {f"allocation/{name}": value for name, value in curve.items()}
        if self.head is not None and estimates.states is not None:
            metrics["estimator/brier_ema"] = brier_metrics(estimates.counted, positives, scored)["brier"]
            self.head.observe(estimates.states, positives, scored)
        self.counts.observe(estimates.keys, positives, scored, step=step)
        metrics["time/pass_rate_estimation"] = estimates.seconds + time.perf_counter() - started
        return metrics

    # Checkpoints

    def save(self, directory: str) -> None:
        """Write the pass rates of the prompts and, if there is one, the value head. One rank at a time."""
        save_pass_rates(os.path.join(directory, PASS_RATES_FILE), self.counts)
        if self.head is not None:
            self.head.save(os.path.join(directory, VALUE_HEAD_FILE))

    def load(self, directory: str) -> None:
        """
        Continue from the files of `save`. If one is missing, as in a checkpoint of `GRPOTrainer`, its estimates start
        from the prior, with a warning. A corrupt file is an error of the library that reads it.
        """
        path = os.path.join(directory, PASS_RATES_FILE)
        try:
            self.counts.counts = load_pass_rates(path)
        except FileNotFoundError:
            _warn_of_missing(path)
        if self.head is not None:
            path = os.path.join(directory, VALUE_HEAD_FILE)
            try:
                self.head.load(path)
            except FileNotFoundError:
                _warn_of_missing(path)


def _warn_of_missing(path: str) -> None:
    logger.warning(
        f"{path} does not exist, so per-prompt estimates start from the prior. This is expected for a checkpoint of "
        "a run that did not track pass rates; otherwise restore the file."
    )
