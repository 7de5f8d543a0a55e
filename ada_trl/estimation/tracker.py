"""What the trainer knows about its prompts' pass rates, and what follows from it."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from ..core import EMAPassRate, Pool, allocate, brier_metrics, prompt_key, prompt_text
from .head import PassRateHead
from .model import ValueModel
from .network import ValueNetwork
from .record import PASS_RATES_FILE, load_pass_rates, save_pass_rates


if TYPE_CHECKING:
    from ..trainer.ada_grpo_config import AdaGRPOConfig


logger = get_logger(__name__)


class PassRateTracker:
    """
    Estimates the prompts' pass rates before sampling and learns from what was drawn: steps 1, 2 and 5 of
    Reinforce-Ada-Est ([Reinforce-Ada](https://huggingface.co/papers/2510.04996)), or an observer beside other modes.

    Every process holds the same tracker: all of them `predict` and `observe` all prompts, in the same order, once per
    generation. Discounted counts are kept in every mode; with `"est-value"` the predictions come from a value network
    and the counts are there for comparison and for the record.

    Args:
        args ([`AdaGRPOConfig`]):
            Which estimator, and its options.
        model (`nn.Module`):
            The policy, whose hidden size a value head needs.
        accelerator (`Accelerator`):
            Of the run, for a `value_model`.
    """

    def __init__(self, args: "AdaGRPOConfig", model: torch.nn.Module, accelerator: Accelerator):
        self.args = args
        alpha, beta = args.pass_rate_prior
        prior = "empirical" if args.learn_pass_rate_prior else "fixed"
        self.ema = EMAPassRate(decay=args.ema_decay, alpha=alpha, beta=beta, prior=prior)
        self.network: ValueNetwork | None = None
        if args.adaptive_sampling == "est-value":
            options = {
                "prior_mean": self.ema.prior_mean,
                "learning_rate": args.value_head_learning_rate,
                "gradient_steps": args.value_head_steps,
            }
            if args.value_model is None:
                # The hidden size is known even where the weights are sharded away.
                self.network = PassRateHead(model.get_output_embeddings().in_features, **options)
            else:
                batch_size = args.per_device_train_batch_size
                self.network = ValueModel(args.value_model, accelerator, batch_size=batch_size, **options)
        self.texts: dict[str, str] = {}  # by key, of prompts that are text
        self._keys: list[str] = []
        self._inputs: Any = None  # what the network saw of the prompts under way
        self._estimates: dict[str, list[float]] = {}  # of the prompts under way, by name of the metric
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
        self._keys = [prompt_key(prompt, row) for prompt, row in prompts]
        self.texts |= {key: _text(prompt) for key, (prompt, _) in zip(self._keys, prompts, strict=True)}
        self._estimates = {"brier": self.ema.predict(self._keys)}
        if self.network is not None:
            encode = self.network.encode if isinstance(self.network, ValueModel) else to_features
            self._inputs = encode([prompt for prompt, _ in prompts])
            self._estimates = {"brier": self.network.predict(self._inputs), "brier_ema": self._estimates["brier"]}
        self._seconds = time.perf_counter() - started
        return self._estimates["brier"]

    def budgets(self) -> list[int]:
        """Rollouts of each prompt that was predicted last; those of the main process, on every process. Collective."""
        args, estimates = self.args, self._estimates["brier"]
        budgets = allocate(
            estimates,
            args.mean_samples * len(estimates),
            min_samples=args.min_samples,
            max_samples=args.max_samples,
            exponent=args.allocation_exponent,
            rule=args.allocation_rule,
        )
        return broadcast_object_list([budgets])[0]

    def observe(self, pools: Sequence[Pool], step: int) -> dict[str, float]:
        """
        Learn from the pools of the prompts that were predicted last.

        Returns:
            `dict[str, float]`: how good the predictions were, and the seconds spent on them.
        """
        started = time.perf_counter()
        positives, draws = [pool.positives for pool in pools], [pool.scored for pool in pools]
        metrics = {}
        for name, estimates in reversed(self._estimates.items()):
            metrics |= brier_metrics(estimates, positives, draws, prefix=name)
        metrics.pop("brier_ema_batch_mean", None)  # the batch's own mean is the same baseline for both
        self.ema.observe(self._keys, positives, draws, step=step)
        if self.network is not None:
            self.network.observe(self._inputs, positives, draws)
        seconds = self._seconds + time.perf_counter() - started
        prior_mean = {"prior_mean": self.ema.prior_mean}
        return {f"estimator/{name}": value for name, value in (metrics | prior_mean).items()} | {
            "time/estimate": seconds
        }

    def save(self, directory: str) -> None:
        """Write the record of pass rates and, if there is one, the value network. One process at a time."""
        texts = {key: text for key, text in self.texts.items() if text is not None}
        save_pass_rates(os.path.join(directory, PASS_RATES_FILE), self.ema, texts)
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
            self.ema.load_state_dict(state)
        except FileNotFoundError:
            _warn_of_missing(path)
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
