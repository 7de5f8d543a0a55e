"""The trainer's vLLM engine: the right weights in time, awake over a step, closed at the end."""

import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from trl.extras.profiling import profiling_context

from ..pass_rates.predictions import PassRatePredictions
from ..sampling.batch_slots import BatchSlot
from ..sampling.prompt_sources import DataLoaderPrompts
from ..sampling.rollout_sampler import RolloutSampler
from ..utils.logging import get_logger
from .loss_masking import mean_logprob_diff
from .phases import InjectedBatch, Preparing, Sampling
from .trl_hooks import GRPOHooks


logger = get_logger(__name__)

SUSPICIOUS_LOGP_DIFFERENCE = 0.1  # nats per token


@dataclass
class SamplingJob:
    """
    What a step asks.

    Args:
        prompts ([`~sampling.prompt_sources.DataLoaderPrompts`]):
            Where its prompts come from.
        source ([`~sampling.rollout_sampler.RolloutSampler`]):
            Of its rollouts.
        sizes (`int` or `list[int]`):
            Rollouts per round, of every prompt or by prompt of this process.
        step (`int`):
            Optimizer steps that the weights have seen from which it is generated.
        lanes (`list[BatchSlot]`, *optional*):
            Of all processes.
        visit ([`~pass_rates.tracker.PassRatePredictions`], *optional*):
            What was known of its prompts.
        sent (`bool`):
            Whether a server has got the requests already.
        confirmed (`bool`, *optional*):
            Whether the answers came from the right weights, see [`~vllm.generation.AdaVLLMGeneration.verify_weights_after`]; `None`
            before that was looked at.
    """

    prompts: DataLoaderPrompts
    source: RolloutSampler
    sizes: int | list[int]
    step: int
    lanes: list[BatchSlot] | None = None
    visit: PassRatePredictions | None = None
    sent: bool = False
    confirmed: bool | None = None


class VLLMMixin(GRPOHooks):
    """A [`GRPOHooks`] that looks after its engine, if it has one. [`AdaGRPOTrainer`] decides what is asked of it."""

    vllm_mode: str | None = None  # until the parent sets it
    _warned_of_other_weights = False
    _uses_server = False
    _weights_confirmed = True  # those of the last generation's rollouts, by asking the server afterwards
    _staleness = 0  # optimizer steps since the weights that sampled the batch under way
    _ahead: SamplingJob | None = None  # the next step's rollouts, if they are asked for before this one is trained on

    def train(self, *args, **kwargs):
        if not self.args.is_vanilla_grpo:  # else what an earlier call has left of a batch is trained on, as in TRL
            self._step, self._buffered_inputs = 0, None
        with self.server_session():
            return super().train(*args, **kwargs)

    def _load_best_model(self):
        super()._load_best_model()
        self._last_loaded_step = -1  # an engine has other weights, of the same step

    def evaluation_loop(self, *args, **kwargs):
        with self.server_session():
            return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def server_session(self):
        """Leave nothing on a server and on the disk, however this ends: evaluation during training is no end."""
        if not self.syncs_with_server or self._uses_server:
            yield
            return
        self._uses_server = True
        with sigterm_as_exit():
            try:
                yield
            finally:
                self._uses_server = False
                self._cancel_prefetch()
                self.vllm_generation.close()
                self._last_loaded_step = -1

    @property
    def syncs_with_server(self) -> bool:
        return self.use_vllm and self.vllm_mode == "server"

    @property
    def _uses_async_vllm(self) -> bool:
        """Whether every process samples its own prompts at its own pace, which some features do not allow."""
        in_turns = self.tools or self.environment_factories is not None  # a rollout is more than one request
        sharded = self.accelerator.num_processes > 1 and (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        collective = sharded and any(isinstance(reward, torch.nn.Module) for reward in self.reward_funcs)
        return self.syncs_with_server and not in_turns and not collective

    def _generate(self, prompts: list) -> tuple:
        """As the parent's, from the weights of this step: in a step's rounds it is [`vllm_session`] that sees to them."""
        in_rounds = isinstance(self._phase, Preparing | Sampling | InjectedBatch)
        if not self.syncs_with_server or in_rounds:
            return super()._generate(prompts)
        self._sync_weights_if_needed()
        columns = super()._generate(prompts)
        self._weights_confirmed = self.vllm_generation.verify_weights_after()
        return columns

    @contextmanager
    def vllm_session(self, asking: SamplingJob | None = None):
        """A server has this step's weights before and after; a colocated engine is kept awake over the rounds."""
        if not self.use_vllm:
            yield
        elif self.syncs_with_server:
            if asking is None or not asking.sent:
                self._sync_weights_if_needed()
            yield
            settled = None if asking is None else asking.confirmed
            self._weights_confirmed = self.vllm_generation.verify_weights_after() if settled is None else settled
        else:
            with self.vllm_generation.awake(self.push_weights):
                yield

    def _await_prefetch(self) -> None:
        """Await what was asked ahead: nothing may be under way while the weights change. Collective."""
        asking = self._ahead
        if asking is not None and asking.confirmed is None:
            asking.source.settle()
            asking.confirmed = self.vllm_generation.verify_weights_after()

    def _cancel_prefetch(self) -> None:
        """Cancel what was asked ahead."""
        asking, self._ahead = self._ahead, None
        if asking is not None:
            asking.prompts.rollback()
            asking.source.drop()

    def _sync_weights_if_needed(self) -> None:
        """Push new weights to a server, and the same again to one that was restarted. Collective."""
        self._await_prefetch()
        if self.state.global_step != self._last_loaded_step or not self.vllm_generation.has_weights():
            self.push_weights()

    def push_weights(self) -> None:
        with profiling_context(self, "sync_weights"):
            self.vllm_generation.sync_weights()
            if self.syncs_with_server:
                self.vllm_generation.verify_weights(self.model)
        self._last_loaded_step = self.state.global_step

    def _check_logprob_mismatch(self, output: dict[str, torch.Tensor]) -> None:
        """What the log-probabilities of a batch of rollouts say of the weights that they were sampled from. Collective."""
        if not self.syncs_with_server:
            return
        same = not (self.model.training and self._staleness)  # the weights that sampled are those that recompute
        if not self._weights_confirmed:
            self.vllm_generation.verify_logprobs(mean_logprob_diff(output) if same else None)
        if same:
            self._warn_of_other_weights(self._metrics["train" if self.model.training else "eval"])

    def _warn_of_other_weights(self, metrics: dict[str, list[float]]) -> None:
        """A server that was started from other weights answers as readily as the right one."""
        differences = metrics.get("sampling/sampling_logp_difference/mean")
        if differences and differences[-1] > SUSPICIOUS_LOGP_DIFFERENCE and not self._warned_of_other_weights:
            self._warned_of_other_weights = True
            logger.warning(
                f"The vLLM server's log-probabilities differ from the trainer's by {differences[-1]:.2f} per token on "
                f"average (step {self.state.global_step + 1}); rounding explains a few hundredths. Its weights are "
                "probably others than those being trained: check that it was started from the same model (with "
                "vllm_weight_sync='lora' it must not have served a run with 'disk' or 'nccl' since), with the same "
                "dtype, and with --logprobs-mode processed_logprobs."
            )


@contextmanager
def sigterm_as_exit():
    """
    While the block runs, let SIGTERM, by which schedulers and launchers end a process, unwind the stack as Ctrl-C does:
    by default it ends Python at once and nothing is cleaned up. A handler of the user's stays.
    """
    in_charge = threading.current_thread() is threading.main_thread()
    if not in_charge or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number, frame) -> None:
        signal.signal(number, signal.SIG_IGN)  # what follows is not to be interrupted
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) in (leave, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
