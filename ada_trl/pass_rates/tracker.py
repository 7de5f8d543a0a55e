"""Predicted pass rates and mean rewards of prompts before sampling, and their update after sampling."""

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
)
from ..core.metrics import rollouts_by_estimate
from ..core.pass_rate_ema import PAPER_PRIOR, PriorKind
from ..core.prompt_id import prompt_reference
from ..utils.distributed import gather_results
from ..utils.logging import get_logger
from .hidden_states import HiddenStateExtractor
from .joint_pass_rate import JointPassRate
from .network import ValueNetwork
from .predictions import PassRatePredictions
from .store import PASS_RATES_FILE, load_pass_rates, save_pass_rates
from .value_head import PassRateHead, RewardHead
from .value_model import ValueModel


logger = get_logger(__name__)


class PassRateTracker:
    """
    Predicts per-prompt pass rates before sampling and updates them afterwards: steps 1, 2 and 5 of Reinforce-Ada-Est
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996)). In modes that do not use the predictions it only records
    them. For `baseline="posterior"` it also predicts mean rewards ([`~core.RewardEstimator`]).

    Every rank has the same tracker: all ranks call `start_step`, `predict` and `observe` for all prompts, in the same order,
    once per generation batch. Discounted counts are kept in every mode; a value network only if the estimator needs
    one.

    Args:
        args ([`AdaGRPOConfig`]):
            Which estimator, and its options.
        reader ([`HiddenStateExtractor`]):
            Source of the policy's hidden states, which a value head needs.
        hash_entire_row (`bool`):
            Whether the whole dataset row identifies a prompt, because an environment makes the prompt from it.
    """

    def __init__(self, args: GRPOConfig, reader: HiddenStateExtractor, *, hash_entire_row: bool = False):
        self.args, self.reader, self.hash_entire_row = args, reader, hash_entire_row
        alpha, beta = args.pass_rate_prior or PAPER_PRIOR
        prior: PriorKind = "empirical" if args.pass_rate_prior is None else "fixed"
        self.ema = EMAPassRate(decay=args.ema_decay, alpha=alpha, beta=beta, prior=prior)
        self.joint = JointPassRate()
        self.network: ValueNetwork | None = None  # predicts pass rates
        self.reward_estimator: RewardEstimator | None = None
        self.reward_network: ValueNetwork | None = None  # predicts mean rewards
        if args.uses_value_network and args.depends_on_pass_rates:
            self.network = self._build_network(of_rewards=False)
        if args.baseline == "posterior":
            self.reward_estimator = RewardEstimator(
                has_value_predictions=args.uses_value_network, use_history=args.pass_rate_estimator != "value"
            )
            if args.uses_value_network and args.value_model is not None and args.depends_on_pass_rates:
                self.reward_network = RewardHead(1)  # on the pass rates that the value model predicts
            elif args.uses_value_network:
                self.reward_network = self._build_network(of_rewards=True)
        self.texts: dict[str, str] = {}  # by key, of prompts that have one
        self.predictions = PassRatePredictions([], [])  # of the current step
        self.recent_brier = [0.0, 0.0]  # discounted sums, see `is_informative`
        self._seconds = 0.0

    def _build_network(self, of_rewards: bool) -> ValueNetwork:
        args, mean = self.args, self.ema.prior_mean
        if args.value_model is not None:
            accelerator, size = self.reader.accelerator, args.per_device_train_batch_size
            return ValueModel(args.value_model, accelerator, of_rewards=of_rewards, prior_mean=mean, batch_size=size)
        return RewardHead(self.reader.size) if of_rewards else PassRateHead(self.reader.size, prior_mean=mean)

    @property
    def _networks(self) -> list[ValueNetwork]:
        return [network for network in (self.network, self.reward_network) if network is not None]

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the policy's hidden states are needed."""
        return self.args.value_model is None and bool(self._networks)

    @property
    def predict_before_sampling(self) -> bool:
        """Whether sampling depends on the predictions, so that hidden states need a separate forward pass."""
        return self.args.sampling_strategy.uses_estimated_budgets or self.args.prompt_oversampling > 1

    @property
    def captures_hidden_states(self) -> bool:
        """Whether hidden states are captured from the forward passes of generation or of the loss."""
        return self.reads_hidden_states and not self.predict_before_sampling

    # Before sampling, or at least without its rewards

    def start_step(self, local_rows: Sequence[dict]) -> None:
        """
        Register the prompts of this step, from the dataset rows of this rank's prompts, and predict them if sampling depends
        on it. Collective.
        """
        options = {"hash_entire_row": self.hash_entire_row, "keep_prompt": self.args.uses_value_network}
        by_rank = gather_results(lambda: [prompt_reference(row, **options) for row in local_rows])
        references = [reference for rank in by_rank for reference in rank]
        self.texts |= {key: text for key, text, _ in references if text is not None}
        prompts = [text if prompt is None else prompt for _, text, prompt in references]
        self.predictions = PassRatePredictions([key for key, _, _ in references], prompts)
        self._seconds = 0.0
        if self.predict_before_sampling:
            self.predict()

    def restrict_to(self, indices: Sequence[int]) -> None:
        """Remove all registered (or predicted) prompts except those at `indices`, which are sampled."""
        self.predictions = self.predictions.restrict_to(indices)

    def predict(self, states: torch.Tensor | None = None) -> None:
        """
        Predict the registered prompts. Collective.

        Args:
            states (`torch.Tensor`, *optional*):
                The policy's hidden states `(P, H)`, the same on every rank, if they were captured; otherwise they are
                computed if a value head needs them.
        """
        started = time.perf_counter()
        keys, prompts = self.predictions.keys, self.predictions.prompts
        # Copies: `observe` needs the counts from before the step, but updates those of the estimator in place.
        counts = [replace(c) for c in self.ema.get_counts(keys)]
        ema, inputs = self.ema.predict(keys), None
        value = joint = ema
        model = next((network for network in self._networks if isinstance(network, ValueModel)), None)
        if model is not None:
            inputs = model.encode(prompts)
        elif self.reads_hidden_states:
            inputs = self.reader.read(prompts) if states is None else states
        if self.network is not None:
            value = self.network.predict(inputs)
            joint = self.joint.predict(value, counts)
        self.predictions = self.predictions._replace(inputs=inputs, counts=counts, ema=ema, value=value, joint=joint)
        if self.reward_estimator is not None:
            value_predictions = None
            if self.reward_network is not None:
                value_predictions = self.reward_network.predict(self._reward_inputs(self.predictions))
            features = self.reward_estimator.features(keys, value_predictions)
            self.predictions = self.predictions._replace(features=features)
        self._seconds += time.perf_counter() - started

    def _reward_inputs(self, predictions: PassRatePredictions) -> Any:
        if isinstance(self.network, ValueModel):
            return torch.tensor(predictions.value, dtype=torch.float32)[:, None]  # (P, 1)
        return predictions.inputs

    @property
    def estimates(self) -> list[float]:
        """p̂ of the prompts that were predicted last, by the estimator of the run."""
        return self._estimates_by_name[self.args.pass_rate_estimator]

    @property
    def _estimates_by_name(self) -> dict[str, list[float]]:
        predictions = self.predictions
        return {"ema": predictions.ema, "value": predictions.value, "ema+value": predictions.joint}

    def shared_estimates(self) -> list[float]:
        """Return the main process's `estimates` on every rank. Collective."""
        return broadcast_object_list([self.estimates])[0]

    def budgets(self) -> list[int]:
        """Allocate rollouts to the prompts that were predicted last; the main process decides. Collective."""
        args, estimates = self.args, self.estimates
        budgets = allocate(
            estimates,
            args.num_generations * len(estimates),
            min_samples=args.min_samples,
            max_samples=args.max_samples,
            rule=args.allocation_rule,
        )
        return broadcast_object_list([budgets])[0]

    def baseline_estimates(self) -> list[BaselineEstimate]:
        """
        Estimate the mean rewards of the prompts that were predicted last; the main process's estimates on every rank.
        Collective.
        """
        assert self.reward_estimator is not None and self.predictions.features is not None
        estimates = self.reward_estimator.estimate(self.predictions.features, self.estimates)
        return broadcast_object_list([estimates])[0]

    @property
    def is_informative(self) -> bool:
        """
        Whether the differences between estimates have recently improved the predictions: by Brier score, the estimates
        shifted by one number are better than the batch mean, both with hindsight.
        """
        own, mean = self.recent_brier
        return own < mean * (1 - 1e-6)  # equal estimates give the batch mean, up to rounding

    # After sampling

    def observe(
        self,
        pools: Sequence[Pool],
        step: int,
        is_on_distribution: Sequence[bool],
    ) -> dict[str, float]:
        """
        Update all estimators with the pools of the prompts that were predicted last.

        Args:
            is_on_distribution (`Sequence[bool]`):
                Which of the prompts are an unbiased sample of the dataset.

        Returns:
            `dict[str, float]`: accuracy of the predictions, and the seconds spent on them.
        """
        started = time.perf_counter()
        predictions = self.predictions
        positives, num_rollouts = [pool.positives for pool in pools], [pool.scored for pool in pools]
        metrics: dict[str, float] = {}
        if self.reward_estimator is None or self.args.depends_on_pass_rates:
            metrics = self._evaluate_estimates(positives, num_rollouts)
            self._update_recent_brier(positives, num_rollouts, is_on_distribution)
            if self.args.adaptive_sampling != "uniform":
                curve = rollouts_by_estimate(self.estimates, [len(pool) for pool in pools])
                metrics |= {f"allocation/{name}": value for name, value in curve.items()}
        if self.network is not None:
            self.joint.observe(predictions.value, predictions.counts, positives, num_rollouts)
            self.network.observe(predictions.inputs, positives, num_rollouts)
        self.ema.observe(predictions.keys, positives, num_rollouts, step=step, is_on_distribution=is_on_distribution)
        if self.reward_estimator is not None and predictions.features is not None:
            metrics |= {f"baseline/{name}": value for name, value in self.reward_estimator.metrics().items()}
            self.reward_estimator.observe(predictions.features, pools)
            self._fit_reward_network(self.reward_estimator, pools)
        metrics["time/pass_rate_estimation"] = self._seconds + time.perf_counter() - started
        return metrics

    def _fit_reward_network(self, estimator: RewardEstimator, pools: Sequence[Pool]) -> None:
        """Train on rewards in standard deviations from their mean, both of the run up to now."""
        mean, std = estimator.mean_reward, estimator.reward_std.std
        if self.reward_network is None or mean is None or not std:
            return
        sums = [sum((reward - mean) / std for reward in pool.rewards) for pool in pools]
        num_rollouts = [len(pool.rewards) for pool in pools]
        self.reward_network.observe(self._reward_inputs(self.predictions), sums, num_rollouts)

    def _evaluate_estimates(self, positives: list[int], num_rollouts: list[int]) -> dict[str, float]:
        """Compute the Brier scores of the estimates in use, of the batch mean with hindsight, and of the other estimators."""
        metrics = brier_metrics(self.estimates, positives, num_rollouts)
        if self.network is not None:
            for name, estimates in self._estimates_by_name.items():
                if name != self.args.pass_rate_estimator:
                    label = f"brier_{name.replace('+', '_')}"
                    metrics[label] = brier_metrics(estimates, positives, num_rollouts)["brier"]
        metrics["prior_mean"] = self.ema.prior_mean
        return {f"estimator/{name}": value for name, value in metrics.items()}

    def _update_recent_brier(
        self, positives: list[int], num_rollouts: list[int], is_on_distribution: Sequence[bool]
    ) -> None:
        scored = [i for i, n in enumerate(num_rollouts) if n and is_on_distribution[i]]
        if len(scored) < 2:
            return
        p, k, n = (np.array([values[i] for i in scored]) for values in (self.estimates, positives, num_rollouts))
        latest = brier_metrics(p + (k.sum() - (p * n).sum()) / n.sum(), k, n)
        own, constant = self.recent_brier
        decay = self.args.ema_decay
        self.recent_brier = [decay * own + latest["brier"], decay * constant + latest["brier_constant"]]

    # Checkpoints

    def save(self, directory: str) -> None:
        """Write the pass rates of the prompts and, if there are any, the value networks. One rank at a time."""
        fitted: dict[str, Any] = {"joint": self.joint.selector.state_dict()}
        if self.args.prompt_oversampling > 1:
            fitted["brier"] = self.recent_brier
        if self.reward_estimator is not None:
            fitted["reward_estimator"] = self.reward_estimator.state_dict()
        history = None if self.reward_estimator is None else self.reward_estimator.history
        save_pass_rates(os.path.join(directory, PASS_RATES_FILE), self.ema, self.texts, fitted, history)
        for network in self._networks:
            network.save(os.path.join(directory, network.filename))

    def load(self, directory: str) -> None:
        """
        Continue from the files of `save`. If one is missing, as in a checkpoint of `GRPOTrainer`, its estimates start from the
        prior, with a warning.

        Raises:
            `ValueError`: if a file is corrupt; the message contains its path and the fix.
        """
        path = os.path.join(directory, PASS_RATES_FILE)
        try:
            state, self.texts = load_pass_rates(path)
        except FileNotFoundError:
            _warn_of_missing(path)
        else:
            fitted = state.get("fitted") or {}
            self.ema.load_state_dict(state)
            if "joint" in fitted:
                self.joint.selector.load_state_dict(fitted["joint"])
            self.recent_brier = fitted.get("brier", self.recent_brier)
            if self.reward_estimator is not None and "reward_estimator" in fitted:
                self.reward_estimator.load_state_dict(fitted["reward_estimator"])
                self.reward_estimator.history = state.get("history", {})
        for network in self._networks:
            path = os.path.join(directory, network.filename)
            try:
                network.load(path)
            except FileNotFoundError:
                _warn_of_missing(path)


def _warn_of_missing(path: str) -> None:
    logger.warning(
        f"{path} does not exist, so per-prompt estimates start from the prior. This is expected for a checkpoint of "
        "a run that did not track pass rates; otherwise restore the file."
    )
