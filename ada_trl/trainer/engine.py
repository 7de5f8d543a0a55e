"""The trainer's vLLM engine: the right weights in time, awake over a step, closed at the end."""

from contextlib import contextmanager

import torch
from trl.extras.profiling import profiling_context

from ..notices import get_logger
from .parent import ThroughParent


logger = get_logger(__name__)

SUSPICIOUS_LOGP_DIFFERENCE = 0.1  # nats per token


class WithEngine(ThroughParent):
    """A [`ThroughParent`] that looks after its engine, if it has one. [`AdaGRPOTrainer`] decides what is asked of it."""

    _warned_of_other_weights = False

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._syncs_with_server:
                self.vllm_generation.close()
                self._last_loaded_step = -1

    @property
    def _syncs_with_server(self) -> bool:
        return self.use_vllm and self.vllm_mode == "server"

    @property
    def _asks_server_per_prompt(self) -> bool:
        """Whether every process samples its own prompts at its own pace, which some features do not allow."""
        in_turns = self.tools or self.environment_factories is not None  # a rollout is more than one request
        sharded = self.accelerator.num_processes > 1 and (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        collective = sharded and any(isinstance(reward, torch.nn.Module) for reward in self.reward_funcs)
        return self._syncs_with_server and not in_turns and not collective

    @contextmanager
    def _engine_ready(self):
        """Push new weights to a server; keep a colocated engine awake over the rounds."""
        if not self.use_vllm:
            yield
            return
        if self._syncs_with_server and self.state.global_step != self._last_loaded_step:
            self._push_weights()
        with self.vllm_generation.awake(self._push_weights):
            yield

    def _push_weights(self) -> None:
        with profiling_context(self, "sync_weights"):
            self.vllm_generation.sync_weights()
        self._last_loaded_step = self.state.global_step

    def _warn_of_other_weights(self) -> None:
        """A server that was started from other weights answers as readily as the right one."""
        differences = self._metrics["train"].get("sampling/sampling_logp_difference/mean")
        if differences and differences[-1] > SUSPICIOUS_LOGP_DIFFERENCE and not self._warned_of_other_weights:
            self._warned_of_other_weights = True
            logger.warning(
                f"The vLLM server's log-probabilities differ from the trainer's by {differences[-1]:.2f} per token on "
                f"average (step {self.state.global_step + 1}); rounding explains a few hundredths. Its weights are "
                "probably others than those being trained: check that it was started from the same model (with "
                "vllm_weight_sync='lora' it must not have served a run with 'disk' or 'nccl' since), with the same "
                "dtype, and with --logprobs-mode processed_logprobs."
            )
