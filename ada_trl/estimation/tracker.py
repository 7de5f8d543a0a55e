"""What the trainer knows about its prompts' pass rates, and what follows from it."""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from trl import GRPOConfig

from ..core import EMAPassRate, Pool, Prior, allocate, brier_metrics, prompt_key, prompt_text, samples_by_estimate
from ..core.counts import PAPER_PRIOR, PromptCounts
from ..core.priors import PriorStrength, RewardLevels
from ..notices import get_logger
from .head import PassRateHead
from .model import ValueModel
from .network import ValueNetwork
from .record import PASS_RATES_FILE, load_pass_rates, save_pass_rates


logger = get_logger(__name__)


BASES = (4.0, 1.0, 2.0, 8.0, 16.0, 32.0)  # candidates of what a guess is worth in rollouts; the first one at the start
CAPS = (8.0, 2.0, 4.0, 16.0, 32.0)  # candidates of what an expectation is worth at most


class Visit(NamedTuple):
    """
    What was expected of the prompts of one step, before it was sampled; one entry per prompt of all processes.

    Args:
        keys (`list[str]`):
            Identities.
        inputs (`Any`):
            What the value network saw; `None` without one.
        counts (`list[PromptCounts]`):
            What the prompts had shown, copied.
        from_counts, from_network, joint (`list[float]`):
            p̂ by estimator; the last two are those of the counts without a network.
        guess_strength (`float`):
            What the network's prediction, or the prior of the counts, is worth in rollouts.
    """

    keys: list[str]
    inputs: Any
    counts: list[PromptCounts]
    from_counts: list[float]
    from_network: list[float]
    joint: list[float]
    guess_strength: float


class PassRateTracker:
    """
    Estimates the prompts' pass rates before sampling and learns from what was drawn: steps 1, 2 and 5 of
    Reinforce-Ada-Est ([Reinforce-Ada](https://huggingface.co/papers/2510.04996)), the priors of the posterior baseline,
    or an observer beside other modes.

    Every process holds the same tracker: all of them `predict` and `observe` all prompts, in the same order, once per
    generation. Discounted counts are kept in every mode; a value network only where the estimator needs one.

    Args:
        args ([`AdaGRPOConfig`]):
            Which estimator, and its options.
        model (`nn.Module`):
            The policy, whose hidden size a value head needs.
        accelerator (`Accelerator`):
            Of the run, for a `value_model`.
    """

    def __init__(self, args: GRPOConfig, model: torch.nn.Module, accelerator: Accelerator):
        self.args = args
        alpha, beta = args.pass_rate_prior or PAPER_PRIOR
        prior = "empirical" if args.pass_rate_prior is None else "fixed"
        self.ema = EMAPassRate(decay=args.ema_decay, alpha=alpha, beta=beta, prior=prior)
        self.levels = RewardLevels()
        self.strength = PriorStrength(BASES if args.uses_value_network else BASES[:1], CAPS)
        self.network: ValueNetwork | None = None
        if args.uses_value_network:
            options = {"prior_mean": self.ema.prior_mean, "learning_rate": args.value_head_learning_rate}
            if args.value_model is None:
                # The hidden size is known even where the weights are sharded away.
                self.network = PassRateHead(model.get_output_embeddings().in_features, **options)
            else:
                batch_size = args.per_device_train_batch_size
                self.network = ValueModel(args.value_model, accelerator, batch_size=batch_size, **options)
        self.texts: dict[str, str] = {}  # by key, of prompts that are text
        self.visit: Visit | None = None  # the step under way
        self.recent_brier = [0.0, 0.0]  # discounted sums, see `predicts`
        self._seconds = 0.0

    def predict(
        self, prompts: Sequence[tuple[Any, dict]], to_features: Callable[[list], torch.Tensor] | None = None
    ) -> list[float]:
        """
        p̂ of the prompts that are about to be sampled.

        Args:
            prompts (`Sequence[tuple[Any, dict]]`):
                Prompts of all processes with their data set rows.
            to_features (`Callable[[list], torch.Tensor]`, *optional*):
                Prompts to features `(P, H)`, the same on every process, for a value head. A value model encodes
                prompts itself.
        """
        started = time.perf_counter()
        keys = [prompt_key(prompt, row) for prompt, row in prompts]
        self.texts |= {key: _text(prompt) for key, (prompt, _) in zip(keys, prompts, strict=True)}
        counts = [replace(c) for c in self.ema.known(keys)]
        from_counts, inputs, base = self.ema.predict(keys), None, self.ema.alpha + self.ema.beta
        from_network = joint = from_counts
        if self.network is not None:
            encode = self.network.encode if isinstance(self.network, ValueModel) else to_features
            inputs = encode([prompt for prompt, _ in prompts])
            from_network, (base, _) = self.network.predict(inputs), self.strength.best
            joint = [
                (base * h + c.discounted_positives) / (base + c.discounted_draws)
                for h, c in zip(from_network, counts, strict=True)
            ]
        self.visit = Visit(keys, inputs, counts, from_counts, from_network, joint, base)
        self._seconds = time.perf_counter() - started
        return self.estimates

    def keep(self, indices: Sequence[int]) -> None:
        """Of the prompts that were predicted last, only these are sampled."""
        visit = self.visit
        chosen = {name: getattr(visit, name) for name in ("keys", "counts", "from_counts", "from_network", "joint")}
        chosen = {name: [values[i] for i in indices] for name, values in chosen.items()}
        inputs = visit.inputs
        if inputs is not None:
            inputs = inputs[list(indices)] if isinstance(inputs, torch.Tensor) else [inputs[i] for i in indices]
        self.visit = visit._replace(inputs=inputs, **chosen)

    @property
    def estimates(self) -> list[float]:
        """p̂ of the prompts that were predicted last, by the estimator of the run."""
        by_name = {"value": self.visit.from_network, "value+counts": self.visit.joint}
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
            exponent=args.allocation_exponent,
            rule=args.allocation_rule,
        )
        return broadcast_object_list([budgets])[0]

    def priors(self) -> list[Prior]:
        """
        What the rollouts of each prompt that was predicted last are to be compared with; those of the main process, on
        every process. Collective.

        The guess about a prompt (the network's, or the mean of all prompts) becomes an expected reward by
        [`~core.RewardLevels`]; the prompt's own rewards join it, unless the network is asked alone.
        """
        visit, (_, cap) = self.visit, self.strength.best
        alone = self.args.pass_rate_estimator == "value"
        guesses = [self.ema.prior_mean] * len(visit.keys) if self.network is None else visit.from_network
        priors = []
        for guess, counts, pass_rate in zip(guesses, visit.counts, self.estimates, strict=True):
            draws, rewards = (0.0, 0.0) if alone else (counts.discounted_draws, counts.discounted_rewards)
            strength = visit.guess_strength + draws
            mean = (visit.guess_strength * self.levels.mean_reward(guess) + rewards) / strength
            priors.append(Prior(mean, min(strength, cap), pass_rate))
        return broadcast_object_list([priors])[0]

    @property
    def predicts(self) -> bool:
        """
        Whether the differences between estimates have lately been worth something: by Brier score, the estimates moved
        by one number against the batch's own mean, both known in hindsight only.
        """
        own, mean = self.recent_brier
        return own < mean * (1 - 1e-6)  # equal estimates are equal to the mean but for rounding

    def observe(self, pools: Sequence[Pool], step: int, typical: Sequence[bool] | None = None) -> dict[str, float]:
        """
        Learn from the pools of the prompts that were predicted last.

        Args:
            typical (`Sequence[bool]`, *optional*):
                Which of them stand for the data set; by default, all.

        Returns:
            `dict[str, float]`: how good the predictions were, and the seconds spent on them.
        """
        started = time.perf_counter()
        positives, draws = [pool.positives for pool in pools], [pool.scored for pool in pools]
        metrics = self._brier(positives, draws)
        self._remember_brier(positives, draws, typical or [True] * len(pools))
        metrics |= {"estimator/prior_mean": self.ema.prior_mean}
        if self.args.adaptive_sampling != "uniform":
            samples = samples_by_estimate(self.estimates, [len(pool) for pool in pools])
            metrics |= {f"estimator/{name}": value for name, value in samples.items()}
        self._learn_strength(positives, draws)
        scored = [(r.reward, pool.is_positive(r)) for pool in pools for r in pool.rollouts if pool.is_scored(r)]
        self.levels.observe(
            [reward for reward, positive in scored if not positive],
            [reward for reward, positive in scored if positive],
        )
        rewards = [math.fsum(pool.scored_rewards) for pool in pools]
        self.ema.observe(self.visit.keys, positives, draws, step=step, rewards=rewards, typical=typical)
        if self.network is not None:
            self.network.observe(self.visit.inputs, positives, draws)
        metrics["time/estimate"] = self._seconds + time.perf_counter() - started
        return metrics

    def _brier(self, positives: list[int], draws: list[int]) -> dict[str, float]:
        """Of the estimates in use, of the batch's own mean in hindsight, and of the other estimators."""
        visit = self.visit
        metrics = brier_metrics(self.estimates, positives, draws)
        others = {"counts": ("ema", visit.from_counts), "value": ("value", visit.from_network)}
        others |= {"value+counts": ("joint", visit.joint)}
        for name, (label, estimates) in others.items() if self.network is not None else ():
            if name != self.args.pass_rate_estimator:
                metrics[f"brier_{label}"] = brier_metrics(estimates, positives, draws)["brier"]
        return {f"estimator/{name}": value for name, value in metrics.items()}

    def _remember_brier(self, positives: list[int], draws: list[int], typical: Sequence[bool]) -> None:
        scored = [i for i, n in enumerate(draws) if n and typical[i]]
        if len(scored) < 2:
            return
        p, k, n = (np.array([values[i] for i in scored]) for values in (self.estimates, positives, draws))
        of_step = brier_metrics(p + (k.sum() - (p * n).sum()) / n.sum(), k, n)
        latest = (of_step["brier"], of_step["brier_batch_mean"])
        decay = self.args.ema_decay
        self.recent_brier = [decay * old + new for old, new in zip(self.recent_brier, latest, strict=True)]

    def _learn_strength(self, positives: list[int], draws: list[int]) -> None:
        visit = self.visit
        network_alone = self.args.pass_rate_estimator == "value"
        self.strength.observe(
            [self.ema.prior_mean] * len(visit.keys) if self.network is None else visit.from_network,
            [0.0 if network_alone else c.discounted_positives for c in visit.counts],
            [0.0 if network_alone else c.discounted_draws for c in visit.counts],
            positives,
            draws,
            guess_strength=visit.guess_strength if self.network is None else None,
        )

    def save(self, directory: str) -> None:
        """Write the record of pass rates and, if there is one, the value network. One process at a time."""
        texts = {key: text for key, text in self.texts.items() if text is not None}
        fitted = {"levels": self.levels.state_dict(), "strength": self.strength.state_dict()}
        if self.args.prompt_candidates > 1:
            fitted["brier"] = self.recent_brier
        save_pass_rates(os.path.join(directory, PASS_RATES_FILE), self.ema, texts, fitted)
        if self.network is not None:
            self.network.save(os.path.join(directory, self.network.filename))

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
            self.ema.load_state_dict(state)
            if "fitted" in state:
                self.levels.load_state_dict(state["fitted"]["levels"])
                self.strength.load_state_dict(state["fitted"]["strength"])
                self.recent_brier = state["fitted"].get("brier", self.recent_brier)
        if self.network is None:
            return
        path = os.path.join(directory, self.network.filename)
        try:
            self.network.load(path)
        except FileNotFoundError:
            _warn_of_missing(path)


def _text(prompt: Any) -> str | None:
    try:
        return prompt_text(prompt)
    except ValueError:  # images, say; the key is the `id` of the row then
        return None


def _warn_of_missing(path: str) -> None:
    logger.warning(
        f"{path} does not exist, so the pass rates start from the prior. That is right for a checkpoint of a run that "
        "kept no record of them; otherwise restore the file."
    )
