"""The trainer's vLLM engine: weights are pushed before a generation and verified after it, and everything is cleaned up at the end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from trl.extras.profiling import profiling_context

from ..utils.logging import get_logger
from .trl_private import latest_metric, mark_weights_loaded, weights_are_loaded


if TYPE_CHECKING:
    from .ada_grpo_config import AdaGRPOConfig
    from .ada_grpo_trainer import AdaGRPOTrainer


logger = get_logger(__name__)

SUSPICIOUS_LOGP_DIFFERENCE = 0.1  # nats per token
UNRESTRICTED = {"top_p": (1.0,), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0,)}
# Names in `generation_kwargs` that do not change the distribution from which vLLM samples the next token.
NEUTRAL_KWARGS = {
    *("n", "max_tokens", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logprobs"),
    *(
        "prompt_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
    ),
}
MAX_LOG_RATIO = 20.0  # of a rollout, so that squares of the ratios stay finite


class VLLMSession:
    """
    Manages the vLLM engine of a trainer; does nothing without one.

    A server receives this step's weights before a generation, and its log-probabilities of a fixed prompt are compared with the
    trainer's before and after it: otherwise rollouts from other weights would not be detected. A colocated engine stays awake over the rounds of a step; its
    weights are verified by the log-probabilities of the rollouts.
    """

    def __init__(self, trainer: "AdaGRPOTrainer"):
        self.trainer = trainer
        self._is_running = False
        self._is_generating = False
        # Whether the weights of the last rollouts could be verified after the generation.
        self._weights_verified = True
        self._prefetch_verified: bool | None = None  # the same for prefetched rollouts; None while they are generated
        self._warned_of_other_weights = False
        if trainer.use_vllm:
            self._warn_of_restricted_sampling()

    def _warn_of_restricted_sampling(self) -> None:
        """Warn where the ratio of a token is the kept probability mass, below 1, whose product over a completion vanishes."""
        restrictions, args = sampling_restrictions(self.trainer.args), self.trainer.args
        mode = args.vllm_importance_sampling_mode
        if restrictions and args.vllm_importance_sampling_correction and mode.startswith("sequence"):
            logger.warning(
                f"With {', '.join(restrictions)} vLLM samples from another distribution than the model's (often a part of it) and "
                "returns its log-probabilities, so that the importance sampling ratio of every token is off, by the mass that "
                f"is kept if tokens are excluded. vllm_importance_sampling_mode={mode!r} multiplies the ratios of a completion: long completions "
                "receive almost no gradient. Set vllm_importance_sampling_mode='token_truncate', or sample without the "
                "restriction."
            )

    @property
    def uses_server(self) -> bool:
        return self.trainer.use_vllm and self.trainer.vllm_mode == "server"

    @property
    def samples_async(self) -> bool:
        """Whether every rank samples its own prompts independently. Some features need all ranks in each round."""
        trainer = self.trainer
        multi_turn = trainer.tools or trainer.environment_factories is not None  # a rollout is more than one request
        sharded = trainer.accelerator.num_processes > 1 and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
        collective_rewards = sharded and any(isinstance(reward, torch.nn.Module) for reward in trainer.reward_funcs)
        return self.uses_server and not multi_turn and not collective_rewards

    # From the start of training or evaluation to its end

    @contextmanager
    def running(self) -> Iterator[None]:
        """Clean up adapters on the server and files on exit. Nested uses (evaluation during training) do nothing."""
        if not self.trainer.use_vllm or self._is_running:
            yield
            return
        self._is_running = True
        with sigterm_as_exit() if self.uses_server else nullcontext():
            try:
                yield
            finally:
                self._is_running = False
                if self.uses_server:
                    self.trainer.cancel_prefetch()
                    self.trainer.vllm_generation.close()
                # Another training may begin at the step of the last push, with other weights.
                self.forget_weights()

    # One generation

    @contextmanager
    def generation(self, prefetched: bool = False) -> Iterator[None]:
        """
        One generation, or all rounds of a step: the server has this step's weights before it, and is checked after it. Nested
        uses do nothing.

        Args:
            prefetched (`bool`, *optional*, defaults to `False`):
                Whether the rollouts are those of [`prefetch`], which come from earlier weights.
        """
        trainer = self.trainer
        if not trainer.use_vllm or self._is_generating:
            yield
            return
        self._is_generating = True
        try:
            if not self.uses_server:
                with trainer.vllm_generation.keep_awake(self.push_weights):
                    yield
            elif prefetched:
                self.sync_weights_if_needed()
                with trainer.vllm_generation.returning_prefetched():
                    yield
                # These rollouts were verified before the newer weights were pushed.
                self._weights_verified = bool(self._prefetch_verified)
            else:
                self.sync_weights_if_needed()
                yield
                self._weights_verified = trainer.vllm_generation.verify_weights_after()
        finally:
            self._is_generating = False

    def sync_weights_if_needed(self) -> None:
        """Push new weights to a server, and the same again to one that was restarted. Collective."""
        self._finish_prefetch()
        if not weights_are_loaded(self.trainer) or not self.trainer.vllm_generation.has_weights():
            self.push_weights()

    def _finish_prefetch(self) -> None:
        """Wait for prefetched rollouts: nothing may be in flight while the weights change. Collective."""
        generation = self.trainer.vllm_generation
        if generation.has_prefetched and self._prefetch_verified is None:
            generation.wait_for_prefetch()
            # The main process checks the weights for all: not before the rollouts of every process have arrived.
            self.trainer.accelerator.wait_for_everyone()
            self._prefetch_verified = generation.verify_weights_after()

    def prefetch(self, prompt_ids: list[list[int]], images: list[list | None] | None) -> None:
        """Request the rollouts of the next step's rows now, from the newest weights. Collective."""
        self.sync_weights_if_needed()
        self.trainer.vllm_generation.prefetch(prompt_ids, images)
        self._prefetch_verified = None

    def push_weights(self) -> None:
        trainer = self.trainer
        with profiling_context(trainer, "sync_weights"):
            trainer.vllm_generation.sync_weights()
            if self.uses_server:
                trainer.vllm_generation.verify_weights(trainer.model)
        mark_weights_loaded(trainer)

    def forget_weights(self) -> None:
        """Push weights again before the next generation, although it belongs to the same optimizer step."""
        mark_weights_loaded(self.trainer, False)

    def collect_metrics(self) -> dict[str, float]:
        """Retries and timeouts of all ranks since the last call, and the result of the last weight check. Collective."""
        if not self.uses_server:
            return {}
        generation = self.trainer.vllm_generation
        counts = generation.vllm_client.transport.take_counts()
        of_ranks = gather_object([(*counts, generation.weight_difference)])
        names = ("vllm/retries", "vllm/timeouts", "vllm/weight_check_logprob_diff")
        # The main process alone checks the weights; the others have a difference of 0.
        return {name: float(sum(values)) for name, values in zip(names, zip(*of_ranks, strict=True), strict=True)}

    # After TRL's forward pass over the completions

    def check_logprobs(self, output: dict[str, torch.Tensor], *, same_weights: bool) -> None:
        """
        Compare the engine's log-probabilities of a batch with the trainer's. Collective.

        Args:
            output (`dict[str, torch.Tensor]`):
                The batch, as returned by [`~trl.GRPOTrainer`].
            same_weights (`bool`):
                Whether it was sampled from the weights that recomputed its log-probabilities.

        Raises:
            `VLLMServerError`: if a server's weights could not be verified after the generation and the log-probabilities do not
                match, or if those of a colocated engine do not match.
        """
        if not self.trainer.use_vllm:
            return
        if not self.uses_server:
            self._verify_colocated(output)
            return
        if not self._weights_verified:
            differences = mean_logprob_diff(output) if same_weights else None
            self.trainer.vllm_generation.verify_logprobs(differences, sampling_restrictions(self.trainer.args))
        if same_weights:
            self._warn_of_other_weights()

    def _verify_colocated(self, output: dict[str, torch.Tensor]) -> None:
        """Verify the weights of a colocated engine, where its log-probabilities can be compared with the trainer's. Collective."""
        trainer = self.trainer
        # Restricted sampling returns those of another distribution, and a rollout function may return any.
        if not _has_logprobs(output) or sampling_restrictions(trainer.args) or trainer.rollout_func is not None:
            return
        differences, mask = logprob_diff(output)
        of_tokens = differences[mask.bool()]  # none if all rows are masked
        # vLLM may fail to score single tokens; if it has scored none of them, the mean is NaN and not accepted.
        trainer.vllm_generation.verify_colocated(of_tokens.nanmean().item() if len(of_tokens) else 0.0)

    def _warn_of_other_weights(self) -> None:
        """Warn of a server that was started from another model, or without processed log-probabilities."""
        mode = "train" if self.trainer.model.training else "eval"
        difference = latest_metric(self.trainer, "sampling/sampling_logp_difference/mean", mode) or 0.0
        # With restricted sampling, log-probabilities differ even for the right weights.
        expected = difference <= SUSPICIOUS_LOGP_DIFFERENCE or sampling_restrictions(self.trainer.args)
        if expected or self._warned_of_other_weights:
            return
        self._warned_of_other_weights = True
        logger.warning(
            f"The vLLM server's log-probabilities differ from the trainer's by {difference:.2f} per token on "
            f"average (step {self.trainer.state.global_step + 1}); rounding explains a few hundredths. Its weights are "
            "probably not those that are trained: check that it was started from the same model (with "
            "vllm_weight_sync='lora' it must not have served a run with 'disk' or 'nccl' since), with the same "
            "dtype, and with --logprobs-mode processed_logprobs."
        )


def sampling_restrictions(args: "AdaGRPOConfig") -> list[str]:
    """
    Options because of which vLLM does not sample from the model's distribution, as `name=value`.

    vLLM returns log-probabilities of the distribution that it samples from (`--logprobs-mode processed_logprobs`): those
    of the tokens that are kept are renormalized. [`~trl.GRPOTrainer`] recomputes them without the restriction, so the
    ratio of the two is the probability mass that is kept, for every token.
    """
    given = dict(args.generation_kwargs or {})  # these take precedence over the fields
    values = {name: given.pop(name, getattr(args, name)) for name in UNRESTRICTED}
    values = {name: value for name, value in values.items() if value not in UNRESTRICTED[name]}
    if given.get("temperature") == args.temperature:
        del given["temperature"]
    values |= {name: value for name, value in given.items() if name not in NEUTRAL_KWARGS and value is not None}
    if args.vllm_structured_outputs_regex is not None:
        values["vllm_structured_outputs_regex"] = args.vllm_structured_outputs_regex
    return [f"{name}={value!r}" for name, value in values.items()]


def ess_ratio(output: dict, accelerator: Accelerator) -> float:
    """Effective sample size ratio of the batch of all ranks, (Σw)²/(N Σw²) with sequence ratios w. Collective."""
    differences = output["old_per_token_logps"] - output["sampling_per_token_logps"]  # (B, T)
    differences = differences.nan_to_num()  # of tokens for which vLLM has returned no log-probability
    ratios = (differences * output["completion_mask"]).sum(dim=1).clamp(max=MAX_LOG_RATIO).exp()
    ratios = accelerator.gather(ratios)
    return (ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)).item()


def _has_logprobs(output: dict[str, torch.Tensor]) -> bool:
    """Whether the batch has log-probabilities of both engine and trainer, which may not recompute them."""
    return {"old_per_token_logps", "sampling_per_token_logps"} <= output.keys()


def logprob_diff(output: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute differences between engine and trainer in nats, and the mask of the sampled tokens; both `(B, T)`."""
    mask = output["completion_mask"] * output.get("tool_mask", 1)
    return (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs(), mask


def mean_logprob_diff(output: dict[str, torch.Tensor]) -> list[float] | None:
    """Mean of [`logprob_diff`] of each row; `None` where the trainer does not recompute log-probabilities."""
    if not _has_logprobs(output):
        return None
    differences, mask = logprob_diff(output)
    return ((differences * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """
    Convert SIGTERM, by which schedulers and launchers end a process, to `SystemExit`, so that cleanup code runs. A handler that
    the user has installed stays in place.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number, frame) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) in (leave, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
