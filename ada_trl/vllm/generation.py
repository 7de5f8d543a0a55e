"""vLLM integration: requests of a batch, prefetched batches, sleep mode, and the steps of a weight synchronization."""

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from typing import Any

from accelerate.utils import broadcast_object_list
from accelerate.utils.memory import clear_device_cache
from trl.generation.vllm_generation import VLLMGeneration

from ..utils.distributed import ErrorFactory, collectives_disabled, synchronized_errors
from .client import TimeoutVLLMClient
from .errors import RESUME, VLLMServerError, make_error_factory
from .requested_batch import RequestedBatch, split_rows, to_rows
from .transport import RequestGroup
from .weight_check import EngineWeights, WeightCheck
from .weight_sync import WeightSync


CHECK_IT = "Check its log, and vllm_server_base_url."


class AdaVLLMGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] for adaptive sampling.

    Server mode: every rank has a client and requests the completions of its rows, all of them at once; the server
    queues. A failure on one rank is raised on all of them. Colocate mode: the engine stays awake over the rounds
    of a step ([`awake`]).

    Args:
        weight_sync (`str`, *optional*, defaults to `"nccl"`):
            Transfer of the weights to a server: `"nccl"` as in TRL, `"lora"` hot-loads the adapter, `"disk"` reloads
            all weights from a directory that server and trainer share.
        weight_sync_dir (`str`, *optional*, defaults to `"vllm_weight_sync"`):
            Directory of `"lora"` and `"disk"`, with a subdirectory for every sync that is removed after the next one.
        request_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds without any response after which the server is considered stalled.

    Raises:
        `ValueError`: if the model has no adapter for `weight_sync="lora"`.
        [`VLLMServerError`]: if the server does not respond, or lacks a flag that is needed.
    """

    vllm_client: TimeoutVLLMClient

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
        self.weights = EngineWeights()
        self.weight_check = WeightCheck(self, self.weights, self.error_factory)
        self.prefetched: RequestedBatch | None = None  # neither returned nor cancelled
        super().__init__(*args, **kwargs)

    # Start-up and end

    def _init_vllm(self) -> None:
        if self.mode != "server":
            return super()._init_vllm()
        run_id = broadcast_object_list([uuid.uuid4().hex[:8]], from_process=0)[0]
        self.weight_sync = WeightSync(*self._weight_sync_options, self, f"ada-{run_id}")
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
        # The client's thread must not outlive a trainer whose construction fails later, or that is never used. The
        # next request starts it again.
        with closing(self.vllm_client.transport):
            self.base_model = self.vllm_client.model
            config = self.vllm_client.read_config()
            self.weight_sync.check_adapter()
            if self.accelerator.is_main_process:
                self.weights.server = config
                if self.weight_sync.method == "nccl":
                    self.vllm_client.init_communicator(device=self.accelerator.device)
                else:
                    self.weight_sync.remove_leftovers()

    def close(self) -> None:
        """Remove adapters from the server and directories, and end the thread. The next use needs a weight sync."""
        self.cancel_prefetch()
        if self.accelerator.is_main_process:
            self.weight_sync.close()
        self.vllm_client.model = self.base_model
        self.vllm_client.transport.close()

    def error_factory(self, consequence: str, fix: str = RESUME) -> ErrorFactory:
        """Function that creates the same error on every rank, see [`~vllm.errors.make_error_factory`]."""
        engine = f"vLLM server at {self.base_url}" if self.mode == "server" else "colocated vLLM engine"
        return make_error_factory(engine, consequence, fix)

    # Weight synchronization

    def sync_weights(self) -> None:
        if self.weights.use in ("generating", "returning"):
            return
        if self.mode != "server":
            return super().sync_weights()
        error_factory = self.error_factory("the weights could not be sent")
        with synchronized_errors(error_factory):  # before the transfer, whose collectives a failed rank would not join
            if self.accelerator.is_main_process:
                before, self.weights.server = self.weights.server, self.vllm_client.read_config()
                is_same = before.get("instance_id") == self.weights.server.get("instance_id")
                if self.weight_sync.method == "nccl" and not is_same:
                    raise VLLMServerError("it was restarted, which breaks the NCCL group", "Resume the run.")
        with synchronized_errors(error_factory):
            {
                "nccl": super().sync_weights,
                "lora": self.weight_sync.sync_lora,
                "disk": self.weight_sync.sync_disk,
            }[self.weight_sync.method]()

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
        Request `num_generations` completions of each prompt in the background, in a group of the client's transport.
        With images there is one prompt.

        Returns:
            `Future`: completion ids and log-probabilities, each of shape `(prompts × num_generations, length)`.
        """
        return group.start(self._sample_completions(prompts, num_generations, images))

    async def _sample_completions(self, prompts: list[list[int]], num_generations: int, images: list | None) -> tuple:
        client, features = self.vllm_client, None
        if images:
            features = self._place_features(await client.render(images), prompts[0])
        return await client.sample_completions(prompts, features, **self.sampling_params(num_generations))

    def generate(
        self, prompts: list[list[int]], images: list | None, num_generations: int, profiler: Any = None
    ) -> tuple:
        """
        Generate one completion per row of this rank, as TRL's method of the same name. Collective in server mode.

        With a server every rank sends its own rows; equal neighboring rows are completions of one prompt, whatever
        `num_generations` is. With the use `"returning"` nothing is sent: the completions of [`prefetch`] are awaited
        and returned. The rows alone do not identify that batch: an evaluation may have the same ones, and needs the
        newest weights.

        Raises:
            [`VLLMServerError`]: on all ranks, if rows of any of them received no completion.
            `RuntimeError`: on all ranks, if prefetched completions are requested for other rows.
        """
        if self.mode != "server":
            return super().generate(prompts, images, num_generations, profiler)
        # New and prefetched batches alike take part in `synchronized_errors`: otherwise ranks of which one finds its
        # prefetched batch and another does not would wait for each other.
        collective = (
            nullcontext()
            if collectives_disabled()
            else synchronized_errors(self.error_factory("rollouts are missing"))
        )
        with collective, profiler or nullcontext():
            if self.weights.use == "returning":
                batch = self._take_prefetched(prompts, images)
            else:
                batch = self._request(prompts, images)
            with closing(batch):
                completion_ids, logprobs = batch.results()
        return prompts, completion_ids, [list(zip(values)) for values in logprobs], None  # TRL: (rows, length, 1)

    def _request(self, prompts: list[list[int]], images: list | None) -> RequestedBatch:
        rows, group = to_rows(prompts, images), self.vllm_client.transport.group()
        return RequestedBatch(rows, [self.start_request(group, *request) for request in split_rows(rows)], group)

    # Requests that are sent before their completions are needed

    def prefetch(self, prompt_ids: list[list[int]], images: list | None = None) -> None:
        """
        Send the requests of a batch now; [`generate`] returns their completions with the use `"returning"`. Server
        mode only; not collective.

        The completions come from the weights that the server has at this time: wait for them before these change.
        """
        self.prefetched = self._request(prompt_ids, images)

    def cancel_prefetch(self) -> None:
        """Cancel the prefetched requests that are in flight and discard the batch. Not collective."""
        batch, self.prefetched = self.prefetched, None
        if batch is not None:
            batch.close()

    def _take_prefetched(self, prompts: list[list[int]], images: list | None) -> RequestedBatch:
        batch = self.prefetched
        if batch is None or batch.rows != to_rows(prompts, images):
            raise RuntimeError("The rows of this step are not those whose completions were requested one step ahead.")
        self.prefetched = None
        return batch

    # Colocate mode

    @property
    def enable_sleep_mode(self) -> bool:  # an attribute in TRL
        """
        Whether a colocated engine sleeps after each generation, as TRL reads it: not between the rounds of a step.
        """
        return self._sleeps and self.weights.use == "idle"

    @enable_sleep_mode.setter
    def enable_sleep_mode(self, value: bool) -> None:
        self._sleeps = value

    @contextmanager
    def awake(self, send_weights: Callable[[], None]) -> Iterator[None]:
        """
        Keep a colocated engine with sleep mode awake over several calls of [`generate`]. Sleep has discarded its
        weights, which are sent once for all rounds of a step.
        """
        try:
            clear_device_cache()
            self.llm.wake_up(tags=["weights"])
            send_weights()
            self.llm.wake_up(tags=["kv_cache"])
            yield
        finally:
            self.llm.sleep(level=2)
