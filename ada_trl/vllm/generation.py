"""vLLM integration: a client per rank, weight synchronization and its verification, prefetched batches, sleep mode."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from trl.generation.vllm_generation import VLLMGeneration

from ..utils.distributed import ErrorFactory, collectives_disabled, gather_results, synchronized_errors
from ..utils.logging import get_logger
from .client import TimeoutVLLMClient
from .errors import RESUME, VLLMServerError, VLLMServerUnavailable, make_error_factory
from .requested_batch import RequestedBatch
from .transport import CONNECT_SECONDS, RequestGroup
from .weight_check import (
    check_model,
    dtypes,
    logprob_tolerance,
    probe_prompt,
    token_logprobs,
    verify_weights,
)
from .weight_sync import CLOSE_SECONDS, WeightSync


logger = get_logger(__name__)

CHECK_IT = "Check its log, and vllm_server_base_url."
OTHER_WEIGHTS = "its rollouts may come from other weights than those that are trained"
COLOCATE_FIX = "Set vllm_enable_sleep_mode=False, or try another version of vLLM."


class AdaVLLMGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] for adaptive sampling.

    Server mode: every rank has a client and requests the completions of its rows, all of them at once; the server
    queues. A failure on one rank is raised on all of them. Colocate mode: the engine stays awake over the rounds
    of a step ([`keep_awake`]).

    Args:
        weight_sync (`str`, *optional*, defaults to `"nccl"`):
            Transfer of the weights to a server: `"nccl"` as in TRL, `"lora"` hot-loads the adapter, `"disk"` reloads all
            weights from a directory that server and trainer share.
        weight_sync_dir (`str`, *optional*, defaults to `"vllm_weight_sync"`):
            Directory of `"lora"` and `"disk"`, with a subdirectory for every sync that is removed after the next one.
        request_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds without any response after which the server is considered stalled.

    Raises:
        `ValueError`: if the model or the device does not allow the `weight_sync`.
        [`VLLMServerError`]: if the server lacks a flag that the `weight_sync` needs.
    """

    vllm_client: TimeoutVLLMClient
    # Attributes of the base class
    enable_sleep_mode: bool
    _llm_weights_sleeping: bool

    def __init__(
        self,
        *args: Any,
        weight_sync: str = "nccl",
        weight_sync_dir: str = "vllm_weight_sync",
        request_timeout: float = 300.0,
        **kwargs: Any,
    ):
        self._weight_sync_options = (weight_sync, weight_sync_dir)
        self.request_timeout = request_timeout
        self._prefetched: RequestedBatch | None = None
        self._returns_prefetched = False
        super().__init__(*args, **kwargs)

    # Start-up

    def _init_vllm(self) -> None:
        if self.mode != "server":
            return super()._init_vllm()
        run_id = broadcast_object_list([uuid.uuid4().hex[:8]], from_process=0)[0]
        self.weight_sync = WeightSync(*self._weight_sync_options, self, f"ada-{run_id}")
        self.weight_sync.check_model()
        self.base_url = (self.server_base_url or f"http://{self.server_host}:{self.server_port}").rstrip("/")
        with synchronized_errors(self.error_factory("it cannot be used", CHECK_IT)):
            self._connect()

    def _connect(self) -> None:
        self.vllm_client = TimeoutVLLMClient(
            self.base_url,
            group_port=self.group_port,
            connection_timeout=self.server_timeout,
            request_timeout=self.request_timeout,
        )
        # The client's thread must not outlive a trainer whose construction fails later, or that is never used. The next request
        # starts it again.
        with closing(self.vllm_client.transport):
            self.base_model = self.vllm_client.model
            info = self.vllm_client.read_server_info()
            self.weight_sync.check_server(info)
            self._instance = info["vllm_config"].get("instance_id")
            self._prepare_weight_check(info["vllm_config"])
            if self.accelerator.is_main_process:
                self.weight_sync.remove_leftovers()
            if self.weight_sync.method == "nccl" and self.accelerator.is_main_process:
                self.vllm_client.init_communicator(device=self.accelerator.device)

    def _prepare_weight_check(self, config: dict) -> None:
        model, precision = self.accelerator.unwrap_model(self.model), self.accelerator.mixed_precision
        ours = model.config.get_text_config()
        check_model(self.vllm_client, config, ours, self.processing_class)
        self.vllm_client.vocab_size = ours.vocab_size
        served, trained = dtypes(model, config, precision)
        if served != trained:
            logger.warning(
                f"The vLLM server at {self.base_url} computes in {served}, the trainer in {trained}, so that their "
                f"log-probabilities differ by rounding. Start the server with --dtype {trained} to avoid it."
            )
        self._tolerance = logprob_tolerance(served, trained)
        self._prompt_ids = probe_prompt(self.processing_class, config["model_config"]["max_model_len"] - 1)
        self._expected_logprobs: list[float] | None = None
        self._recheck_failure = ""  # why the last check after a generation was not possible
        self.weight_difference = 0.0  # result of the last weight check, in nats per token; on the main process

    # Failures

    def error_factory(self, consequence: str, fix: str = RESUME) -> ErrorFactory:
        """Function that creates the same error on every rank, see [`~vllm.errors.make_error_factory`]."""
        if self.mode != "server":
            return make_error_factory("colocated vLLM engine", consequence, fix)
        return make_error_factory(f"vLLM server at {self.base_url}", consequence, fix, url=self.base_url)

    # Weight check

    def has_weights(self) -> bool:
        """Whether the server is still the instance that was sent the weights. Collective."""
        instances = gather_results(
            lambda: self._read_instance() if self.accelerator.is_main_process else None,
            self.error_factory("it could not be checked whether it still has the weights"),
        )
        return instances[0] == self._instance

    def verify_weights(self, model: torch.nn.Module) -> None:
        """
        Check the server's weights after a synchronization, against the model as prepared for training. Collective.

        Raises:
            [`VLLMServerError`]: if the server's log-probabilities are not those of the model.
        """
        self._expected_logprobs = expected = token_logprobs(model, self._prompt_ids, self.accelerator.device)
        with synchronized_errors(self.error_factory("it does not have this step's weights")):
            if self.accelerator.is_main_process:
                self._compare(expected)

    def verify_weights_after(self) -> bool:
        """
        Check that all completions since the last synchronization came from its weights: that the server is the same
        instance, with the same weights. Collective.

        Returns:
            `bool`: `False` if this is unknown, because the server no longer responds: see [`verify_logprobs`].

        Raises:
            [`VLLMServerError`]: if the server was restarted, or has received other weights.
        """
        # The completions have arrived: a server that has failed since then should not be waited for long.
        with self.vllm_client.limited_to(CONNECT_SECONDS):
            failures = gather_results(self._recheck_server, self.error_factory(OTHER_WEIGHTS))
        self._recheck_failure = next(filter(None, failures), "")
        return not self._recheck_failure

    def _recheck_server(self) -> str:
        """Check instance and weights; returns the reason if the server does not respond, else an empty string."""
        try:
            found = self._read_instance()
            if found != self._instance:
                raise VLLMServerError(f"it was restarted during the step (instance {self._instance} became {found})")
            if self.accelerator.is_main_process and self._expected_logprobs is not None:
                self._compare(self._expected_logprobs)
        except VLLMServerUnavailable as error:
            return error.cause
        return ""

    def verify_logprobs(self, differences: Sequence[float] | None, restrictions: Sequence[str]) -> None:
        """
        Verify the weights by the rollouts' log-probabilities, where [`verify_weights_after`] could not. Collective.

        Args:
            differences (`Sequence[float]`, *optional*):
                Difference of each row of this rank from the trainer's log-probabilities, in nats per token. `None` where the
                trainer does not recompute them.
            restrictions (`Sequence[str]`):
                Options because of which the server's log-probabilities are those of another distribution.

        Raises:
            [`VLLMServerError`]: if a row may come from other weights than those that are trained.
        """
        with synchronized_errors(self.error_factory(OTHER_WEIGHTS)):
            if restrictions:
                raise VLLMServerError(
                    f"it no longer responds, and with {', '.join(restrictions)} the rollouts' log-probabilities "
                    "cannot be compared with the trainer's"
                )
            if differences is None:
                raise VLLMServerError(
                    f"it did not respond to the weight check after generation ({self._recheck_failure})"
                )
            if not all(difference <= self._tolerance for difference in differences):  # NaN is not, either
                largest = max(differences)
                raise VLLMServerError(
                    f"it no longer responds, and a row's log-probabilities differ from the trainer's by {largest:.3f} "
                    "per token"
                )
        logger.warning(
            "The vLLM server did not respond to the weight check after generation. The log-probabilities of the rollouts that are trained on "
            f"match the current policy, so training continues. ({self._recheck_failure})"
        )

    def verify_colocated(self, difference: float) -> None:
        """
        Check the weights of a colocated engine by the rollouts: `difference` is the mean difference of this rank's sampled tokens
        from the trainer's log-probabilities, in nats per token. Collective.

        Raises:
            [`VLLMServerError`]: if the rollouts of any rank come from other weights than those that are trained.
        """
        config, model = self.llm.llm_engine.model_config, self.accelerator.unwrap_model(self.model)
        served = {"model_config": {"dtype": config.dtype, "quantization": config.quantization}}
        # Sampled tokens differ more than those of the weight check's prompt, hence at least the tolerance of bfloat16.
        tolerance = logprob_tolerance("bfloat16", *dtypes(model, served, self.accelerator.mixed_precision))
        with synchronized_errors(self.error_factory(OTHER_WEIGHTS, COLOCATE_FIX)):
            if not difference <= tolerance:  # NaN is not, either
                raise VLLMServerError(
                    f"log-probabilities differ from the trainer's by {difference:.2f} nats per token, more than rounding explains ({tolerance:g})"
                )

    def _read_instance(self) -> str | None:
        return self.vllm_client.read_server_info()["vllm_config"].get("instance_id")

    def _compare(self, expected: Sequence[float]) -> None:
        self.weight_difference = verify_weights(self.vllm_client, self._prompt_ids, expected, self._tolerance)

    # Generation

    def sampling_params(self, num_generations: int) -> dict:
        return {
            "n": num_generations,
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0 if self.min_p is None else self.min_p,
            "max_tokens": self.max_completion_length,
            "logprobs": self.logprobs,
            "structured_outputs_regex": self.structured_outputs_regex,
            "generation_kwargs": self.generation_kwargs,
        }

    def start_request(
        self, group: RequestGroup, prompts: list[list[int]], num_generations: int, images: list | None = None
    ) -> Future:
        """
        Request `num_generations` completions of each prompt in the background, in a group of the client's transport. With
        images there is one prompt.

        Returns:
            `Future`: completion ids and log-probabilities, each of shape `(prompts × num_generations, length[, 1])`.
        """
        return group.start(self._sample_completions(prompts, num_generations, images))

    async def _sample_completions(self, prompts: list[list[int]], num_generations: int, images: list | None) -> tuple:
        client = self.vllm_client
        try:
            features = None
            if images:
                features = self._place_features(await client.render(images), prompts[0])
            return await client.sample_completions(prompts, features, **self.sampling_params(num_generations))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise VLLMServerError(
                f"its response has an unexpected format ({type(error).__name__}: {error})"
            ) from error

    def generate(
        self, prompts: list[list[int]], images: list | None, num_generations: int, profiler: Any = None
    ) -> tuple:
        """
        Generate one completion per row of this rank, as TRL's method of the same name. Collective in server mode.

        With a server every rank sends its own rows; equal neighboring rows are completions of one prompt, whatever
        `num_generations` is. Inside of [`returning_prefetched`] nothing is sent: the completions of [`prefetch`] are
        awaited and returned. Outside of it, a prefetched batch is not touched.

        Raises:
            [`VLLMServerError`]: on all ranks, if rows of any of them received no completion.
            `RuntimeError`: on all ranks, if prefetched completions are requested for other rows.
        """
        if self.mode != "server":
            return super().generate(prompts, images, num_generations, profiler)
        # New and prefetched batches alike take part in `synchronized_errors`: otherwise ranks of which one finds its prefetched
        # batch and another does not would wait for each other.
        collective = (
            nullcontext()
            if collectives_disabled()
            else synchronized_errors(self.error_factory("rollouts are missing"))
        )
        with collective, profiler or nullcontext():
            if self._returns_prefetched:
                batch = self._take_prefetched(prompts, images)
            else:
                batch = RequestedBatch(self, prompts, images)
            with closing(batch):
                completion_ids, logprobs = batch.results()
        return prompts, completion_ids, logprobs, None

    # Requests that are sent before their completions are needed

    def prefetch(self, prompt_ids: list[list[int]], images: list | None = None) -> None:
        """
        Send the requests of a batch now; [`generate`] returns their completions inside of [`returning_prefetched`]. Server
        mode only; not collective.

        The completions come from the weights that the server has at this time: call [`wait_for_prefetch`] before they change.

        Raises:
            `RuntimeError`: if a batch was prefetched before that was neither returned nor cancelled.
        """
        if self._prefetched is not None:
            raise RuntimeError(
                "A batch is prefetched already. Call generate with its rows, or cancel_prefetch, first."
            )
        self._prefetched = RequestedBatch(self, prompt_ids, images)

    @property
    def has_prefetched(self) -> bool:
        """Whether a batch was prefetched that was neither returned nor cancelled."""
        return self._prefetched is not None

    @contextmanager
    def returning_prefetched(self) -> Iterator[None]:
        """
        While the block runs, [`generate`] receives the rows of [`prefetch`] and returns their completions.

        The rows do not identify the batch: an evaluation may have the same ones, and needs completions of the newest weights.
        """
        self._returns_prefetched = True
        try:
            yield
        finally:
            self._returns_prefetched = False

    def wait_for_prefetch(self) -> None:
        """Wait until no prefetched request is in flight. Failures are raised by [`generate`]. Not collective."""
        if self._prefetched is not None:
            self._prefetched.wait()

    def cancel_prefetch(self) -> None:
        """Cancel the prefetched requests that are in flight and discard the batch. Not collective."""
        batch, self._prefetched = self._prefetched, None
        if batch is not None:
            batch.close()

    def _take_prefetched(self, prompts: list[list[int]], images: list | None) -> RequestedBatch:
        batch = self._prefetched
        if batch is None or not batch.has_rows(prompts, images):
            raise RuntimeError("The rows of this step are not those whose completions were requested one step ahead.")
        self._prefetched = None
        return batch

    # Colocate mode

    @contextmanager
    def keep_awake(self, sync: Callable[[], None]) -> Iterator[None]:
        """
        Keep a colocated engine awake over several calls of [`generate`]: sleep discards the weights, so that sleeping between the
        rounds of a step would push all of them again. `sync` pushes the weights if the engine was asleep.
        """
        if not self.enable_sleep_mode:
            yield
            return
        if self._llm_weights_sleeping:
            sync()
        self.llm.wake_up(tags=["kv_cache"])
        self.enable_sleep_mode = False  # TRL's `generate` would send the engine to sleep
        try:
            yield
        finally:
            self.enable_sleep_mode = True
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True

    # Weight synchronization

    def sync_weights(self) -> None:
        if self.mode != "server":
            return super().sync_weights()
        error_factory = self.error_factory("the weights could not be sent")
        with synchronized_errors(error_factory):  # before the transfer, whose collectives a failed rank would not join
            self._reconnect()
        with synchronized_errors(error_factory):
            {
                "nccl": super().sync_weights,
                "lora": self.weight_sync.sync_lora,
                "disk": self.weight_sync.sync_disk,
            }[self.weight_sync.method]()

    def _reconnect(self) -> None:
        """Accept a server that was restarted since the last generation, if its flags are still valid: it gets the weights next."""
        info = self.vllm_client.read_server_info()
        instance = info["vllm_config"].get("instance_id")
        if instance != self._instance:
            if self.weight_sync.method == "nccl":
                raise VLLMServerError("it was restarted, which breaks the NCCL group", "Resume the run.")
            self.vllm_client.model = self.base_model  # it has no adapter
            self.weight_sync.check_server(info)
            self._prepare_weight_check(info["vllm_config"])
            self._instance = instance

    def close(self) -> None:
        """Remove adapters from the server and directories, and end the thread. The next use needs a weight sync."""
        self.cancel_prefetch()
        if self.accelerator.is_main_process:
            with self.vllm_client.limited_to(CLOSE_SECONDS):
                self.weight_sync.close()
        self.vllm_client.model = self.base_model
        self._expected_logprobs = None
        self.vllm_client.transport.close()
