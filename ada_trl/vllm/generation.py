"""vLLM behind the trainer: one client per process, three ways of getting the weights across, no engine left asleep."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from trl.generation.vllm_generation import VLLMGeneration

from ..utils.distributed import ErrorFactory, collectives_disabled, gather_results, synchronized_errors
from ..utils.logging import get_logger
from .client import TimeoutVLLMClient
from .transport import CONNECT_SECONDS, VLLMServerError, VLLMServerUnavailable
from .weight_check import check_model, dtypes, logprob_tolerance, probe_prompt, token_logprobs, verify_weights
from .weight_sync import CLOSE_SECONDS, WeightSync


logger = get_logger(__name__)

CHECK_IT = "Check its log, and vllm_server_base_url."
OTHER_WEIGHTS = "its rollouts may come from other weights than those that are trained"
RESUME = "Check its log, restart it, and resume from the last checkpoint, if there is one."
ROLLOUTS_PER_REQUEST = 16
LONGEST_ERROR = 250  # characters; the whole of it is in the exception that it was raised from


UNRESTRICTED = {"top_p": (1.0,), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0,)}


def sampling_restrictions(options: Any) -> list[str]:
    """
    Options with which vLLM does not sample from the model's own distribution, as `name=value`.

    vLLM returns log-probabilities of the distribution that it samples from (`--logprobs-mode processed_logprobs`): those
    of the tokens that are kept are renormalised. [`~trl.GRPOTrainer`] recomputes them without the restriction, so the
    ratio of the two is the probability mass that is kept, for every token.

    Args:
        options (`Any`):
            A config or an engine, with attributes `top_p`, `top_k`, `min_p` and `repetition_penalty`.
    """
    values = {name: getattr(options, name) for name in UNRESTRICTED}
    return [f"{name}={value:g}" for name, value in values.items() if value not in UNRESTRICTED[name]]


class AdaVLLMGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] for adaptive sampling.

    Server mode: every process has a client and requests the completions of its own rows, all of them at once; the server
    queues. A failure on one process is raised on all of them. Colocate mode: the engine stays awake over the rounds
    of a step ([`keep_awake`]).

    Args:
        weight_sync (`str`):
            How a server gets the weights: `"nccl"` as in TRL, `"lora"` hot-loads the adapter, `"disk"` reloads all
            weights from a directory that server and trainer share.
        weight_sync_dir (`str`):
            Where `"lora"` and `"disk"` write; a new directory for every sync, removed after the next one.
        request_timeout (`float`):
            Seconds without any response after which the server is taken for stalled.

    Raises:
        `ValueError`: if the model or the device does not allow the `weight_sync`.
        [`VLLMServerError`]: if the server lacks a flag that the `weight_sync` needs.
    """

    vllm_client: TimeoutVLLMClient
    # Of the parent:
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
        self._prefetched: _SentBatch | None = None
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
        with ExitStack() as on_failure:
            with synchronized_errors(self.error_factory("it cannot be used", CHECK_IT)):
                self._connect(on_failure)
            on_failure.pop_all()

    def _connect(self, on_failure: ExitStack) -> None:
        self.vllm_client = TimeoutVLLMClient(
            self.base_url,
            group_port=self.group_port,
            connection_timeout=self.server_timeout,
            request_timeout=self.request_timeout,
        )
        on_failure.callback(self.vllm_client.close)
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
        self._recheck_failure = ""  # why the last confirmation was not made
        self.weight_difference = 0.0  # nats per token; of the last proof, on the main process

    # Failures

    def error_factory(self, what: str, fix: str = RESUME) -> ErrorFactory:
        """In which all processes say that the server has failed, and what has failed with it, in one sentence."""

        def error(process: int, cause: str, its_fix: str) -> VLLMServerError:
            where = f" (process {process})" if process else ""
            start = f"vLLM server at {self.base_url}{where}: {what}: "
            cause, end = cause.replace(self.base_url, ""), its_fix or fix
            room = max(LONGEST_ERROR - len(start) - len(end) - 2, 40)
            return VLLMServerError(start + (cause if len(cause) <= room else f"{cause[: room - 1]}…"), end)

        return error

    # Whose weights

    def has_weights(self) -> bool:
        """Whether the server is still the one that was sent the weights. Collective."""

        def instance() -> str | None:
            return self._read_instance() if self.accelerator.is_main_process else None

        error_factory = self.error_factory("it was not seen whether it still has the weights")
        return gather_results(instance, error_factory)[0] == self._instance

    def verify_weights(self, model: torch.nn.Module) -> None:
        """
        See whether a weight sync has done what it should. Collective.

        Args:
            model (`torch.nn.Module`):
                That is trained, as prepared for training.
        """
        self._expected_logprobs = expected = token_logprobs(model, self._prompt_ids, self.accelerator.device)
        with synchronized_errors(self.error_factory("it does not have this step's weights")):
            if self.accelerator.is_main_process:
                self._compare(expected)

    def verify_weights_after(self) -> bool:
        """
        See whether what has been generated since the last weight sync came from those weights: from the same server, which
        still has them. Collective.

        Returns:
            `bool`: `False` if nobody knows, because the server does not answer any more: see [`verify_logprobs`].

        Raises:
            [`VLLMServerError`]: if the server has been restarted, or has got other weights.
        """
        timeout, self.vllm_client.request_timeout = self.request_timeout, min(CONNECT_SECONDS, self.request_timeout)
        try:
            self._recheck_failure = next(
                filter(None, gather_results(self._recheck_server, self.error_factory(OTHER_WEIGHTS))), ""
            )
        finally:
            self.vllm_client.request_timeout = timeout
        return not self._recheck_failure

    def _recheck_server(self) -> str:
        """Why it could not be seen whether the server is still the same, if it could not."""
        try:
            found = self._read_instance()
            if found != self._instance:
                raise VLLMServerError(f"it was restarted during the step (instance {self._instance} became {found})")
            if self.accelerator.is_main_process and self._expected_logprobs is not None:
                self._compare(self._expected_logprobs)
        except VLLMServerUnavailable as error:
            return error.cause
        return ""

    def verify_logprobs(self, differences: Sequence[float] | None) -> None:
        """
        What [`verify_weights_after`] could not see, from the rollouts themselves. Collective.

        Args:
            differences (`Sequence[float]`, *optional*):
                By row of this process, how far its tokens' log-probabilities are from the trainer's, in nats per token.
                `None` where the trainer does not compute them.

        Raises:
            [`VLLMServerError`]: if a row is not shown to come from the weights that are trained.
        """
        with synchronized_errors(self.error_factory(OTHER_WEIGHTS)):
            if self.sampling_restrictions:
                # The server's log-probabilities are those of another distribution than the model's, so that they differ
                # for the right weights too.
                raise VLLMServerError(
                    f"it does not answer any more, and with {', '.join(self.sampling_restrictions)} the rollouts' "
                    "log-probabilities cannot be compared with the trainer's"
                )
            if differences is None:
                raise VLLMServerError(f"it was asked afterwards and did not answer ({self._recheck_failure})")
            largest = max(differences, default=0.0)
            if not largest <= self._tolerance:  # nor is NaN
                raise VLLMServerError(
                    f"it does not answer any more, and a row's log-probabilities differ from the trainer's by {largest:.3f} "
                    "per token"
                )
        logger.warning(
            "The vLLM server did not answer when it was asked whose weights the last rollouts came from. Their own "
            f"log-probabilities say that they were the right ones. ({self._recheck_failure})"
        )

    def _read_instance(self) -> str | None:
        return self.vllm_client.read_server_info()["vllm_config"].get("instance_id")

    def _compare(self, expected: Sequence[float]) -> None:
        self.weight_difference = verify_weights(self.vllm_client, self._prompt_ids, expected, self._tolerance)

    # Generation

    @property
    def sampling_restrictions(self) -> list[str]:
        """Options with which completions are not sampled from the model's own distribution, with their values."""
        return sampling_restrictions(self)

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

    async def _sample_completions(self, prompts: list[list[int]], num_generations: int, images: list | None) -> tuple:
        """A request for completions, on the client's event loop. With images there is one prompt."""
        client = self.vllm_client
        try:
            features = None
            if images:
                features = self._place_features(await client.render(images), prompts[0])
            return await client.sample_completions(prompts, features, **self.sampling_params(num_generations))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise VLLMServerError(f"its answer was not understood ({type(error).__name__}: {error})") from error

    @contextmanager
    def requests(self) -> Iterator["StartRequest"]:
        """A function that starts a request in the background; requests in flight on leaving are cancelled."""
        group = self.vllm_client.group()

        def start(prompts: list[list[int]], num_generations: int, images: list | None = None) -> Future:
            return group.start(self._sample_completions(prompts, num_generations, images))

        try:
            yield start
        finally:
            group.cancel()
            self.vllm_client.resume()

    def generate(
        self, prompts: list[list[int]], images: list | None, num_generations: int, profiler: Any = None
    ) -> tuple:
        """
        Generate one completion per row of this process, as TRL's method of the same name. Collective in server mode.

        With a server every process sends its own rows; equal neighbouring rows are completions of one prompt, whatever
        `num_generations` is. Inside of [`returning_prefetched`] nothing is sent: the completions of [`prefetch`] are
        awaited and returned. Outside of it a prefetch stays as it is.

        Raises:
            [`VLLMServerError`]: on all processes, if rows of any of them received no completion.
            `RuntimeError`: on all processes, if prefetched completions are requested for other rows.
        """
        if self.mode != "server":
            return super().generate(prompts, images, num_generations, profiler)
        # An evaluation and a prefetch alike take part in `synchronized_errors`, so that a hit on one process and a miss on another
        # cannot leave either waiting.
        collective = (
            nullcontext()
            if collectives_disabled()
            else synchronized_errors(self.error_factory("rollouts are missing"))
        )
        with collective, profiler or nullcontext():
            send = self._take_prefetched if self._returns_prefetched else self._send
            with send(prompts, images) as batch:
                completion_ids, logprobs = batch.results()
        return prompts, completion_ids, logprobs, None

    # Requests that are sent before their completions are needed

    def prefetch(self, prompt_ids: list[list[int]], images: list | None = None) -> None:
        """
        Send the requests of a batch now; [`generate`] returns their completions inside of [`returning_prefetched`]. Server
        mode only; not collective.

        The completions come from the weights that the server has at this time: [`sync_weights`] waits for them.

        Args:
            prompt_ids (`list[list[int]]`), images (`list`, *optional*):
                By row, as [`generate`] will be given them.

        Raises:
            `RuntimeError`: if a batch was prefetched before that was neither returned nor cancelled.
        """
        if self._prefetched is not None:
            raise RuntimeError(
                "A batch is prefetched already. Call generate with its rows, or cancel_prefetch, first."
            )
        self._prefetched = self._send(prompt_ids, images)

    @contextmanager
    def returning_prefetched(self) -> Iterator[None]:
        """
        While the block runs, [`generate`] is given the rows of [`prefetch`] and returns their completions.

        The rows alone would not tell: an evaluation may have the same ones, and needs completions of the newest weights.
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

    def _take_prefetched(self, prompts: list[list[int]], images: list | None) -> "_SentBatch":
        batch = self._prefetched
        if batch is None or not batch.has_rows(prompts, images):
            raise RuntimeError("The rows of this step are not those whose completions were requested one step ahead.")
        self._prefetched = None
        return batch

    def _send(self, prompts: list[list[int]], images: list | None) -> "_SentBatch":
        return _SentBatch(self.requests(), prompts, images)

    @contextmanager
    def keep_awake(self, sync: Callable[[], None]) -> Iterator[None]:
        """
        Keep a colocated engine awake over several calls of [`generate`]: waking discards the weights, so that going to
        sleep between the rounds of a step would push all of them again.

        Args:
            sync (`Callable`):
                Pushes the weights; called when the engine was asleep.
        """
        if self.mode != "colocate" or not self.enable_sleep_mode:
            yield
            return
        if self._llm_weights_sleeping:
            sync()
        self.llm.wake_up(tags=["kv_cache"])
        self.enable_sleep_mode = False
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
        self.wait_for_prefetch()  # no request may be in flight while the weights change
        error_factory = self.error_factory("the weights could not be sent")
        with synchronized_errors(error_factory):
            self._reconnect()
        with synchronized_errors(error_factory):
            {
                "nccl": super().sync_weights,
                "lora": self.weight_sync.sync_lora,
                "disk": self.weight_sync.sync_disk,
            }[self.weight_sync.method]()

    def _reconnect(self) -> None:
        """A restarted server is welcome between steps if its flags are still right: it is about to get the weights."""
        info = self.vllm_client.read_server_info()
        instance = info["vllm_config"].get("instance_id")
        if instance != self._instance:
            if self.weight_sync.method == "nccl":
                raise VLLMServerError("it was restarted, which breaks the NCCL group", "Resume the run, too.")
            self.weight_sync.check_server(info)
            self._prepare_weight_check(info["vllm_config"])
            self._instance = instance
            self.vllm_client.model = self.base_model

    def close(self) -> None:
        """
        Leave nothing behind: no adapter on the server, no directory, no thread. The next use needs a weight sync.
        """
        self.cancel_prefetch()
        self.vllm_client.request_timeout = min(CLOSE_SECONDS, self.request_timeout)
        if self.accelerator.is_main_process:
            self.weight_sync.close()
        self.vllm_client.request_timeout = self.request_timeout
        self.vllm_client.model = self.base_model
        self._expected_logprobs = None
        self.vllm_client.close()


StartRequest = Callable[..., Future]
"""Takes prompts, the number of completions of each, and the images of the prompt if there is only one. The result of the
future is completion ids and log-probabilities, each of shape `(prompts × completions, length[, 1])`."""


class _SentBatch:
    """
    The requests of a batch of rows, in flight or completed.

    Args:
        requests (`AbstractContextManager[StartRequest]`):
            See [`AdaVLLMGeneration.requests`]; left by [`close`], which cancels the requests in flight.
        prompts (`list[list[int]]`), images (`list`, *optional*):
            By row.
    """

    def __init__(self, requests: AbstractContextManager, prompts: list[list[int]], images: list | None):
        self._rows = _rows(prompts, images)
        with ExitStack() as on_failure:
            start = on_failure.enter_context(requests)
            self._futures = [start(*request) for request in _requests(self._rows)]
            self._requests = on_failure.pop_all()

    def __enter__(self) -> "_SentBatch":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def has_rows(self, prompts: list[list[int]], images: list | None) -> bool:
        return self._rows == _rows(prompts, images)

    def wait(self) -> None:
        wait(self._futures)

    def results(self) -> tuple[list, list]:
        """Completion ids and log-probabilities, in the order of the rows."""
        completion_ids, logprobs = [], []
        for future in self._futures:
            ids, logps = future.result()
            completion_ids += ids
            logprobs += logps
        return completion_ids, logprobs

    def close(self) -> None:
        self._requests.close()


_Row = tuple[list[int], list | None]


def _rows(prompts: list[list[int]], images: list | None) -> list[_Row]:
    return list(zip(prompts, images or [None] * len(prompts), strict=True))


def _requests(rows: list[_Row]) -> Iterator[tuple[list[list[int]], int, list | None]]:
    """
    Prompts, completions per prompt and images of each request for `rows`.

    Equal neighbours are completions of one prompt. Prompts with as many completions share a request, up to
    `ROLLOUTS_PER_REQUEST`: sending and receiving it costs as much as a few hundred tokens of its response.
    """
    prompts: list[list[int]] = []
    number = 0
    for (ids, images), copies in groupby(rows):
        before, number = number, len(list(copies))
        is_full = number != before or (len(prompts) + 1) * number > ROLLOUTS_PER_REQUEST
        if prompts and (images or is_full):
            yield prompts, before, None
            prompts = []
        if images:  # the endpoint for images takes one prompt
            yield [ids], number, images
        else:
            prompts.append(ids)
    if prompts:
        yield prompts, number, None
