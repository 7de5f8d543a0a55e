"""What the trainer knows about its prompts, and what follows from it."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from trl import GRPOConfig

from ..core import (
    BaselineEstimate,
    EMAPassRate,
    Pool,
    RewardEstimator,
    allocate,
    brier_metrics,
    prompt_key,
    prompt_text,
    rollouts_by_estimate,
)
from ..core.pass_rate_ema import PAPER_PRIOR, PriorKind
from ..core.priors import PseudoCountSelector
from ..core.prompt_id import prompt_reference
from ..utils.distributed import gather_results
from ..utils.logging import get_logger
from .hidden_states import HiddenStateExtractor
from .network import ValueNetwork
from .predictions import PassRatePredictions
from .store import PASS_RATES_FILE, load_pass_rates, save_pass_rates
from .value_head import PassRateHead, RewardHead
from .value_model import ValueModel


logger = get_logger(__name__)


class PassRateTracker:
    """
    Estimates the prompts' pass rates before sampling and learns from what was drawn: steps 1, 2 and 5 of
    Reinforce-Ada-Est ([Reinforce-Ada](https://huggingface.co/papers/2510.04996)), or an observer beside other modes; and
    what the prompts' rollouts are expected to earn, which `baseline="posterior"` compares them with ([`~core.RewardEstimator`]).

    Every process holds the same tracker: all of them `identify`, `predict` and `observe` all prompts, in the same order,
    once per generation. Discounted counts are kept in every mode; a value network only where the estimator needs one.

    Args:
        args ([`AdaGRPOConfig`]):
            Which estimator, and its options.
        reader ([`HiddenStateExtractor`]):
            Of the policy's hidden states, which a value head needs.
        hash_entire_row (`bool`):
            Whether a data set row decides what is asked, not its prompt alone.
    """

    def __init__(self, args: GRPOConfig, reader: HiddenStateExtractor, *, hash_entire_row: bool = False):
        self.args, self.reader, self.hash_entire_row = args, reader, hash_entire_row
        alpha, beta = args.pass_rate_prior or PAPER_PRIOR
        prior: PriorKind = "empirical" if args.pass_rate_prior is None else "fixed"
        self.ema = EMAPassRate(decay=args.ema_decay, alpha=alpha, beta=beta, prior=prior)
        self.strength = PseudoCountSelector()
        self.network: ValueNetwork | None = None  # of pass rates
        self.belief: RewardEstimator | None = None
        self.reward_network: ValueNetwork | None = None
        if args.uses_value_network and args.depends_on_pass_rates:
            self.network = self._build_network(of_rewards=False)
        if args.baseline == "posterior":
            self.belief = RewardEstimator(
                guesses=args.uses_value_network, remembers=args.pass_rate_estimator != "value"
            )
            if args.uses_value_network and args.value_model is not None and args.depends_on_pass_rates:
                self.reward_network = RewardHead(1)  # of what the model says about pass rates
            elif args.uses_value_network:
                self.reward_network = self._build_network(of_rewards=True)
        self.texts: dict[str, str] = {}  # by key, of prompts that are text
        self.visit = PassRatePredictions([], [])  # the step under way
        self.recent_brier = [0.0, 0.0]  # discounted sums, see `predicts`
        self._seconds = 0.0

    def _build_network(self, of_rewards: bool) -> ValueNetwork:
        args, mean = self.args, self.ema.prior_mean
        if args.value_model is not None:
            accelerator, size = self.reader.accelerator, args.per_device_train_batch_size
            return ValueModel(args.value_model, accelerator, of_rewards=of_rewards, prior_mean=mean, batch_size=size)
        return RewardHead(self.reader.size) if of_rewards else PassRateHead(self.reader.size, prior_mean=mean)

    @property
    def reads_hidden_states(self) -> bool:
        """Whether features of the policy are needed."""
        return self.args.value_model is None and bool(self._networks)

    @property
    def predict_before_sampling(self) -> bool:
        """Whether anything depends on the estimates before the draw, so that they are worth a forward pass of their own."""
        return self.args.sampling_strategy.by_estimates or self.args.prompt_oversampling > 1

    @property
    def captures_hidden_states(self) -> bool:
        """Whether hidden states are wanted of the forward passes that are made anyway."""
        return self.reads_hidden_states and not self.predict_before_sampling

    # Before sampling, or at least without looking at what was drawn

    def identify(self, own: Sequence[dict]) -> None:
        """Begin a step, with the data set rows of this process's prompts. Collective."""
        options = {"hash_entire_row": self.hash_entire_row, "keep_prompt": self.args.uses_value_network}
        known = gather_results(lambda: [prompt_reference(row, **options) for row in own])
        prompts = [prompt for process in known for prompt in process]
        keys = [prompt_key(prompt, row) for prompt, row in prompts]
        texts = ((key, _text(prompt)) for key, (prompt, _) in zip(keys, prompts, strict=True))
        self.texts |= {key: text for key, text in texts if text is not None}
        self.visit = PassRatePredictions(keys, [prompt for prompt, _ in prompts])
        self._seconds = 0.0

    def begin(self, own: Sequence[dict]) -> None:
        """[`identify`], and [`predict`] if anything depends on it before the draw. Collective."""
        self.identify(own)
        if self.predict_before_sampling:
            self.predict()

    def keep(self, indices: Sequence[int]) -> None:
        """Of the prompts that were identified, or predicted, only these are sampled."""
        self.visit = self.visit.keep(indices)

    def predict(self, states: torch.Tensor | None = None) -> None:
        """
        Estimate the prompts that were identified. Collective.

        Args:
            states (`torch.Tensor`, *optional*):
                The policy's hidden states `(P, H)`, the same on every process, if they are known; else they are read where
                they are needed.
        """
        started = time.perf_counter()
        keys, prompts = self.visit.keys, self.visit.prompts
        counts = [replace(c) for c in self.ema.known(keys)]
        from_counts, inputs = self.ema.predict(keys), None
        from_network = joint = from_counts
        model = next((network for network in self._networks if isinstance(network, ValueModel)), None)
        if model is not None:
            inputs = model.encode(prompts)
        elif self.reads_hidden_states:
            inputs = self.reader.read(prompts) if states is None else states
        if self.network is not None:
            from_network, base = self.network.predict(inputs), self.strength.best
            joint = [
                (base * h + c.discounted_positives) / (base + c.discounted_draws)
                for h, c in zip(from_network, counts, strict=True)
            ]
        visit = self.visit._replace(inputs=inputs, counts=counts, from_counts=from_counts)
        self.visit = visit = visit._replace(from_network=from_network, joint=joint)
        if self.belief is not None:
            guesses = None
            if self.reward_network is not None:
                guesses = self.reward_network.predict(self._reward_inputs(visit))
            self.visit = visit._replace(expectation=self.belief.expect(keys, guesses))
        self._seconds += time.perf_counter() - started

    def _reward_inputs(self, visit: PassRatePredictions) -> Any:
        if isinstance(self.network, ValueModel):
            return torch.tensor(visit.from_network)[:, None]  # (P, 1)
        return visit.inputs

    @property
    def estimates(self) -> list[float]:
        """p̂ of the prompts that were predicted last, by the estimator of the run."""
        by_name = {"value": self.visit.from_network, "ema+value": self.visit.joint}
        return by_name.get(self.args.pass_rate_estimator, self.visit.from_counts)

    def shared_estimates(self) -> list[float]:
        """`estimates` of the main process, on every process. Collective."""
        return broadcast_object_list([self.estimates])[0]

    def budgets(self) -> list[int]:
        """Rollouts of each prompt that was predicted last; those of the main process, on every process. Collective."""
        args, estimates = self.args, self.estimates
        budgets = allocate(
            estimates,
            args.num_generations * len(estimates),
            min_samples=args.min_samples,
            max_samples=args.max_samples,
            rule=args.allocation_rule,
        )
        return broadcast_object_list([budgets])[0]

    def priors(self) -> list[BaselineEstimate]:
        """
        What the rollouts of each prompt that was predicted last are to be compared with; those of the main process, on
        every process. Collective.
        """
        if self.belief is None or self.visit.expectation is None:
            raise RuntimeError(f"baseline ({self.args.baseline!r}) has no priors, or nothing was predicted.")
        return broadcast_object_list([self.belief.priors(self.visit.expectation, self.estimates)])[0]

    @property
    def predicts(self) -> bool:
        """
        Whether the differences between estimates have lately been worth something: by Brier score, the estimates moved
        by one number against the batch's own mean, both known in hindsight only.
        """
        own, mean = self.recent_brier
        return own < mean * (1 - 1e-6)  # equal estimates are equal to the mean but for rounding

    # After sampling

    def observe(
        self,
        pools: Sequence[Pool],
        step: int,
        is_on_distribution: Sequence[bool] | None = None,
    ) -> dict[str, float]:
        """
        Learn from the pools of the prompts that were predicted last.

        Args:
            is_on_distribution (`Sequence[bool]`, *optional*):
                Which of them stand for the data set; by default, all.

        Returns:
            `dict[str, float]`: how good the predictions were, and the seconds spent on them.
        """
        started = time.perf_counter()
        visit = self.visit
        positives, draws = [pool.positives for pool in pools], [pool.scored for pool in pools]
        metrics = self._look_at_estimates(pools, positives, draws, is_on_distribution or [True] * len(pools))
        if self.network is not None:
            self.strength.observe(visit.from_network, visit.counts, positives, draws)
            self.network.observe(visit.inputs, positives, draws)
        self.ema.observe(visit.keys, positives, draws, step=step, is_on_distribution=is_on_distribution)
        if self.belief is not None and visit.expectation is not None:
            metrics |= {f"baseline/{name}": value for name, value in self.belief.metrics().items()}
            self.belief.observe(visit.expectation, pools)
            self._fit_reward_head(self.belief, pools)
        metrics["time/pass_rate_estimation"] = self._seconds + time.perf_counter() - started
        return metrics

    def _fit_reward_head(self, belief: RewardEstimator, pools: Sequence[Pool]) -> None:
        """Rewards in deviations from their level, both of the run up to now."""
        level, deviation = belief.level, belief.scale.deviation
        if self.reward_network is None or level is None or not deviation:
            return
        sums = [sum((reward - level) / deviation for reward in pool.rewards) for pool in pools]
        self.reward_network.observe(self._reward_inputs(self.visit), sums, [len(pool.rewards) for pool in pools])

    def _look_at_estimates(
        self, pools: Sequence[Pool], positives: list[int], draws: list[int], is_on_distribution: Sequence[bool]
    ) -> dict[str, float]:
        """How good the pass rates were, unless only rewards are compared with what was expected of them."""
        if self.belief is not None and not self.args.depends_on_pass_rates:
            return {}
        metrics = self._brier(positives, draws) | {"estimator/prior_mean": self.ema.prior_mean}
        self._remember_brier(positives, draws, is_on_distribution)
        if self.args.adaptive_sampling != "uniform":
            samples = rollouts_by_estimate(self.estimates, [len(pool) for pool in pools])
            metrics |= {f"estimator/{name}": value for name, value in samples.items()}
        return metrics

    def _brier(self, positives: list[int], draws: list[int]) -> dict[str, float]:
        """Of the estimates in use, of the batch's own mean in hindsight, and of the other estimators."""
        visit = self.visit
        metrics = brier_metrics(self.estimates, positives, draws)
        others = {"counts": ("ema", visit.from_counts), "value": ("value", visit.from_network)}
        others |= {"ema+value": ("joint", visit.joint)}
        for name, (label, estimates) in others.items() if self.network is not None else ():
            if name != self.args.pass_rate_estimator:
                metrics[f"brier_{label}"] = brier_metrics(estimates, positives, draws)["brier"]
        return {f"estimator/{name}": value for name, value in metrics.items()}

    def _remember_brier(self, positives: list[int], draws: list[int], is_on_distribution: Sequence[bool]) -> None:
        scored = [i for i, n in enumerate(draws) if n and is_on_distribution[i]]
        if len(scored) < 2:
            return
        p, k, n = (np.array([values[i] for i in scored]) for values in (self.estimates, positives, draws))
        of_step = brier_metrics(p + (k.sum() - (p * n).sum()) / n.sum(), k, n)
        latest = (of_step["brier"], of_step["brier_constant"])
        decay = self.args.ema_decay
        self.recent_brier = [decay * old + new for old, new in zip(self.recent_brier, latest, strict=True)]

    # Checkpoints

    def save(self, directory: str) -> None:
        """Write the record of the prompts and, if there are some, the value networks. One process at a time."""
        fitted: dict[str, Any] = {"strength": self.strength.state_dict()}
        if self.args.prompt_oversampling > 1:
            fitted["brier"] = self.recent_brier
        if self.belief is not None:
            fitted["belief"] = self.belief.state_dict()
        history = None if self.belief is None else self.belief.history
        save_pass_rates(os.path.join(directory, PASS_RATES_FILE), self.ema, self.texts, fitted, history)
        for network in self._networks:
            network.save(os.path.join(directory, network.filename))

    @property
    def _networks(self) -> list[ValueNetwork]:
        return [network for network in (self.network, self.reward_network) if network is not None]

    def load(self, directory: str) -> None:
        """
        Continue from what `save` wrote. What is missing, as in a checkpoint of plain GRPO, starts from the prior with a
        warning.

        Raises:
            `ValueError`: if a file is there but corrupt, naming it and the remedy.
        """
        path = os.path.join(directory, PASS_RATES_FILE)
        try:
            state, self.texts = load_pass_rates(path)
        except FileNotFoundError:
            _warn_of_missing(path)
        else:
            fitted = state.get("fitted") or {}
            self.ema.load_state_dict(state)
            if "strength" in fitted:
                self.strength.load_state_dict(fitted["strength"])
            self.recent_brier = fitted.get("brier", self.recent_brier)
            if self.belief is not None and "belief" in fitted:
                self.belief.load_state_dict(fitted["belief"])
                self.belief.history = state.get("history", {})
        for network in self._networks:
            path = os.path.join(directory, network.filename)
            try:
                network.load(path)
            except FileNotFoundError:
                _warn_of_missing(path)


def _text(prompt: Any) -> str | None:
    try:
        return prompt_text(prompt)
    except ValueError:  # images, say; the key is the `id` of the row then
        return None


def _warn_of_missing(path: str) -> None:
    logger.warning(
        f"{path} does not exist, so what is expected of the prompts starts anew. That is right for a checkpoint of a run that "
        "kept no record of them; otherwise restore the file."
    )
