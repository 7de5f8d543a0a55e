"""The trainer's vLLM engine: its weights before and after a generation, and its end."""

from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context


MAX_LOG_RATIO = 20.0  # of a rollout, so that squares of the ratios stay finite


class VLLMSession:
    """
    Manages the vLLM engine of a trainer; does nothing without one.

    A server receives this step's weights before a generation, and its log-probabilities of a fixed prompt are compared
    with the trainer's before and after it: otherwise rollouts from other weights would not be detected. A colocated
    engine stays awake over the rounds of a step; its weights are verified by the log-probabilities of the rollouts
    ([`~vllm.weight_check.WeightCheck`]).
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self._is_running = False

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
        """
        Clean up requests, adapters on the server and files on exit. Nested uses (evaluation during training) do
        nothing.
        """
        if not self.trainer.use_vllm or self._is_running:
            yield
            return
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            if self.uses_server:
                self.trainer.vllm_generation.close()
            # Another training may begin at the step of the last push, with other weights.
            self.forget_weights()

    # One generation

    @contextmanager
    def generation(self) -> Iterator[None]:
        """
        One generation, or all rounds of a step: the engine has this step's weights before it, and a server is checked
        after it. Nested uses do nothing.

        In a training step, rollouts of [`prefetch`] are returned if there are any; they come from earlier weights, and
        were verified before newer ones were pushed. An evaluation needs the newest weights.
        """
        if not self.trainer.use_vllm or self.trainer.vllm_generation.weights.use != "idle":
            yield
            return
        engine = self.trainer.vllm_generation
        if engine.enable_sleep_mode and not self.uses_server:
            with engine.awake(self.push_weights), engine.weights.used_for("generating"):
                yield
            return
        self.sync_weights_if_needed()
        is_ahead = engine.prefetched is not None and self.trainer.model.training
        with engine.weights.used_for("returning" if is_ahead else "generating"):
            yield
        if self.uses_server and not is_ahead:
            engine.weight_check.verify_generation()

    def sync_weights_if_needed(self) -> None:
        """Push weights that the engine does not have yet. Collective."""
        self._finish_prefetch()
        if self.trainer.vllm_generation.weights.step != self.trainer.state.global_step:
            self.push_weights()

    def push_weights(self) -> None:
        engine = self.trainer.vllm_generation
        with profiling_context(self.trainer, "sync_weights"), engine.weights.used_for("receiving"):
            engine.sync_weights()
            if self.uses_server:
                engine.weight_check.verify_synchronization(self.trainer.model)
        engine.weights.step = self.trainer.state.global_step

    def forget_weights(self) -> None:
        """Push weights again before the next generation, although it belongs to the same optimizer step."""
        if self.trainer.use_vllm:
            self.trainer.vllm_generation.weights.step = None

    def prefetch(self, prompt_ids: list[list[int]], images: list[list | None] | None) -> None:
        """Request the rollouts of the next step's rows now, from the newest weights. Collective."""
        self.sync_weights_if_needed()
        self.trainer.vllm_generation.prefetch(prompt_ids, images)

    def _finish_prefetch(self) -> None:
        """Wait for prefetched rollouts: nothing may be in flight while the weights change. Collective."""
        engine = self.trainer.vllm_generation
        batch = engine.prefetched
        if batch is not None and not batch.is_verified:
            wait(batch.futures)  # failures are raised where the completions are needed
            # The main process checks the weights for all: not before the rollouts of every process have arrived.
            self.trainer.accelerator.wait_for_everyone()
            engine.weight_check.verify_generation()
            engine.prefetched = batch._replace(is_verified=True)

    def collect_metrics(self) -> dict[str, float]:
        """
        Retries and timeouts of all ranks since the last call, and the result of the last weight check. Collective.
        """
        if not self.uses_server:
            return {}
        engine = self.trainer.vllm_generation
        counts = engine.vllm_client.transport.take_counts()
        of_ranks = gather_object([(*counts, engine.weight_check.difference)])
        names = ("vllm/retries", "vllm/timeouts", "vllm/weight_check_logprob_diff")
        # The main process alone checks the weights; the others have a difference of 0.
        return {name: float(sum(values)) for name, values in zip(names, zip(*of_ranks, strict=True), strict=True)}

    # After TRL's forward pass over the completions

    def check_logprobs(self, output: dict[str, torch.Tensor]) -> None:
        """
        Verify the weights of a colocated engine by the rollouts of a batch, where the engine's log-probabilities can
        be compared with those that the trainer has recomputed. Collective.

        Raises:
            `VLLMServerError`: if they do not match.
        """
        trainer = self.trainer
        if not trainer.use_vllm or self.uses_server or trainer.rollout_func is not None:  # which may return any
            return
        from ..vllm.weight_check import has_comparable_logprobs

        is_recomputed = {"old_per_token_logps", "sampling_per_token_logps"} <= output.keys()
        if is_recomputed and has_comparable_logprobs(trainer.args):
            trainer.vllm_generation.weight_check.verify_rollouts(output)


def ess_ratio(output: dict, accelerator: Accelerator) -> float:
    """
    Effective sample size ratio of the batch of all ranks, (Σw)²/(N Σw²) with sequence ratios w of the N rows that are
    trained on. NaN if all are masked. Collective.
    """
    mask = output["completion_mask"]  # (B, T)
    differences = output["old_per_token_logps"] - output["sampling_per_token_logps"]
    differences = differences.nan_to_num()  # of tokens for which vLLM has returned no log-probability
    ratios = (differences * mask).sum(dim=1).clamp(max=MAX_LOG_RATIO).exp()
    is_trained, ratios = accelerator.gather(mask.any(dim=1)), accelerator.gather(ratios)
    ratios = ratios[is_trained]  # `mask_truncated_completions` leaves the others out of the loss
    return (ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)).item()
