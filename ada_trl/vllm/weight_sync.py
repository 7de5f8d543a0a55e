"""Weight synchronization with a vLLM server: hot-loaded adapters and directories, besides TRL's NCCL."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from trl.generation.vllm_generation import VLLMGeneration

from ..utils.logging import get_logger
from .errors import VLLMServerError
from .response_validation import quote


logger = get_logger(__name__)

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank
LORA_OPTIONS = (  # of PEFT, that vLLM cannot serve
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
)
LORA_INITS = ("gaussian", "eva", "orthogonal", "mica")  # others change the weights of the base model
CLOSE_SECONDS = 10  # timeout of unloading an adapter, which may fail without harm
IN_USE = "in_use.lock"  # held by the run that wrote the directory, for as long as it lives


class WeightSync:
    """
    Sends the trainer's weights to a vLLM server.

    `"lora"` writes the adapter to a new directory, hot-loads it under a new name, generates with that name and unloads
    the one before. `"disk"` writes all weights (adapters merged) to a new directory, has every worker reload them and
    resets the prefix cache. A directory is removed once its successor is in use, never while it may be read. Leftovers of
    killed runs are removed at the next start: no process holds their locks any more.

    `directory` has the same path for trainer and server. `run_name` is the prefix of directories and adapter names, the same on
    every rank.
    """

    def __init__(self, method: str, directory: str, vllm: VLLMGeneration, run_name: str):
        self.method = method
        self.directory = os.path.abspath(directory)
        self.vllm = vllm
        self.run_name = run_name
        self.version = 0
        self._locks: dict[str, FileLock] = {}  # by directory
        self._loaded: list[str] = []  # adapters that may be on the server

    @property
    def name(self) -> str:
        return f"{self.run_name}-{self.version}"

    @property
    def _is_main_process(self) -> bool:
        return self.vllm.accelerator.is_main_process

    def check_model(self) -> None:
        """Raise a `ValueError` if device or adapter do not support the method."""
        config = self.vllm.model.active_peft_config if is_peft_model(self.vllm.model) else None
        if indices := getattr(config, "trainable_token_indices", None):
            raise ValueError(
                f"trainable_token_indices={indices} is not supported with a vLLM server, because these weights "
                "have no name that the server knows. Use modules_to_save with vllm_weight_sync='disk' or 'nccl' instead."
            )
        device = self.vllm.accelerator.device.type
        if self.method == "nccl" and device != "cuda":
            raise ValueError(
                f"vllm_weight_sync='nccl' requires a CUDA device, but this trainer runs on {device!r}. Set "
                "vllm_weight_sync='lora' (with a peft_config) or vllm_weight_sync='disk'."
            )
        if self.method != "lora":
            return
        if config is None:
            raise ValueError(
                "vllm_weight_sync='lora' hot-loads a LoRA adapter, but the model has none. Pass a peft_config, or set "
                "vllm_weight_sync='disk' or 'nccl'."
            )
        unsupported = {name: value for name in LORA_OPTIONS if (value := getattr(config, name, None))}
        if config.peft_type.value != "LORA":
            unsupported = {"peft_type": config.peft_type.value}
        elif config.bias != "none":
            unsupported["bias"] = config.bias
        elif isinstance(config.init_lora_weights, str) and config.init_lora_weights.lower() not in LORA_INITS:
            unsupported["init_lora_weights"] = config.init_lora_weights
        if unsupported:
            options = ", ".join(f"{name}={value!r}" for name, value in unsupported.items())
            raise ValueError(
                f"vllm_weight_sync='lora' does not support adapters with {options}, because vLLM cannot serve them. "
                "Set vllm_weight_sync='disk' or 'nccl', which merge the adapter."
            )

    def check_server(self, info: dict) -> None:
        """Raise a [`VLLMServerError`] if the server (its `/server_info`) was started without a flag that the method needs."""
        config, missing = info["vllm_config"], []
        max_length, completion = config["model_config"]["max_model_len"], self.vllm.max_completion_length
        if max_length <= completion:
            missing.append(
                f"a --max-model-len that fits the longest prompt and max_completion_length ({completion}), it is "
                f"{max_length}"
            )
        if self.method == "nccl" and config["weight_transfer_config"] is None:
            missing.append("""--weight-transfer-config '{"backend": "nccl"}'""")
        if self.method == "lora":
            peft_config = self.vllm.model.active_peft_config
            rank = served_lora_rank(peft_config.r, peft_config.rank_pattern)
            if config["lora_config"] is None:
                missing.append(f"--enable-lora --max-lora-rank {rank}")
            elif config["lora_config"]["max_lora_rank"] < rank:
                missing.append(f"--max-lora-rank {rank}, it is {config['lora_config']['max_lora_rank']}")
            if info.get("vllm_env", {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") is False:
                missing.append("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment")
            if config["parallel_config"].get("_api_process_count", 1) > 1:
                missing.append("--api-server-count 1, because each API server has a separate list of adapters")
        if config["model_config"]["logprobs_mode"].endswith("_logits"):
            missing.append("--logprobs-mode processed_logprobs, because logits are not log-probabilities")
        if missing:
            raise VLLMServerError(
                f"vllm_weight_sync={self.method!r} requires flags that it was started without",
                f"Restart it with {'; and '.join(missing)}.",
            )

    def sync_disk(self) -> None:
        """Write all weights and let the server reload them. Every rank iterates over sharded parameters, which is collective."""
        state = {}
        for name, parameter in self.vllm._iter_named_params():
            if self._is_main_process:
                state[name] = parameter.detach().to("cpu", copy=True).contiguous()
        if not self._is_main_process:
            return
        client = self.vllm.vllm_client
        with self._new_version() as directory:
            with _writing(directory):
                save_file(state, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
            reload = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
            response = client._post(f"{client.base_url}/collective_rpc", json=reload)
            if not isinstance(response.get("results"), list) or not response["results"]:
                raise VLLMServerError(f"no worker has confirmed the reload, the response is {quote(response)}")
        client.reset_prefix_cache()

    def sync_lora(self) -> None:
        """Write the adapter, let the server load it, and generate with its name. Collective where parameters are sharded."""
        from peft import get_peft_model_state_dict

        model = self.vllm.accelerator.unwrap_model(self.vllm.model)
        parameters = {name: p for name, p in model.named_parameters() if model.prefix in name}
        with self.vllm._dist.gather_params(list(parameters.values())):
            state = {name: _full(parameter.detach()).to("cpu", copy=True) for name, parameter in parameters.items()}
        if self._is_main_process:
            with self._new_version() as directory:
                with _writing(directory):
                    # Without a look at the hub for every step, whether the vocabulary of the base model was changed.
                    adapter = get_peft_model_state_dict(
                        model, state_dict=state, adapter_name=model.active_adapter, save_embedding_layers=False
                    )
                    save_file(adapter, os.path.join(directory, "adapter_model.safetensors"), metadata={"format": "pt"})
                    model.active_peft_config.save_pretrained(directory)
                # Before the request: an adapter whose response is lost may be on the server, and has to be unloaded.
                self._loaded.append(self.name)
                response = self._lora("load", lora_name=self.name, lora_path=directory)
                if not response.get("text", "").startswith("Success"):
                    raise VLLMServerError(f"it has not confirmed that the adapter is loaded: {quote(response)}")
            self._unload([name for name in self._loaded if name != self.name])
        else:
            self.version += 1
        self.vllm.vllm_client.model = self.name

    def _lora(self, action: str, **request: str) -> dict:
        client = self.vllm.vllm_client
        timeout = CLOSE_SECONDS if action == "unload" else client.request_timeout
        return client._post(
            f"{client.base_url}/v1/{action}_lora_adapter", json=request, timeout=min(timeout, client.request_timeout)
        )

    def _unload(self, names: list[str]) -> None:
        """Unload adapters and remove their directories. A failure does no harm: it is retried with the next ones."""
        for name in names:
            try:
                self._lora("unload", lora_name=name)
            except VLLMServerError as error:
                if error.status != 404:  # else the adapter is not there
                    logger.warning_once(
                        f"An old adapter could not be unloaded from the vLLM server, and is retried later: {error.cause}."
                    )
                    continue
            self._loaded.remove(name)
            self._remove(os.path.join(self.directory, name))

    @contextmanager
    def _new_version(self) -> Iterator[str]:
        """A new directory to write weights to; the one before is removed once the body has succeeded."""
        previous = os.path.join(self.directory, self.name)
        self.version += 1
        directory = os.path.join(self.directory, self.name)
        with _writing(directory):
            os.makedirs(directory)
            self._locks[directory] = FileLock(os.path.join(directory, IN_USE))
            self._locks[directory].acquire(blocking=False)
        yield directory
        if self.method != "lora":  # directories of adapters are removed when these are unloaded
            self._remove(previous)

    def _remove(self, directory: str) -> None:
        if directory in self._locks:
            self._locks.pop(directory).release()
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """
        Remove adapters from the server and directories from the disk. The directory of an adapter that could not be unloaded
        stays, so that the next run knows its name.
        """
        self._unload(list(self._loaded))
        if self._loaded:
            logger.warning(
                f"The adapter {' '.join(self._loaded)} is still on the vLLM server, because unloading failed. The next run "
                f"with the same vllm_weight_sync_dir ({self.directory}) unloads it."
            )
        for directory in list(self._locks):
            if os.path.basename(directory) in self._loaded:
                self._locks.pop(directory).release()
            else:
                self._remove(directory)
        with suppress(OSError):  # it is not empty, or was never created
            os.rmdir(self.directory)

    def remove_leftovers(self) -> None:
        """Remove leftovers of killed runs from the directory, and their adapters from the server."""
        if self.method == "nccl" or not os.path.isdir(self.directory):
            return
        client = self.vllm.vllm_client
        served = {model["id"] for model in client._get(f"{client.base_url}/v1/models")["data"]}
        for name in sorted(os.listdir(self.directory)):
            directory = os.path.join(self.directory, name)
            lock = FileLock(os.path.join(directory, IN_USE))
            if not re.fullmatch(r"ada-[0-9a-f]{8}-\d+", name) or not os.path.exists(lock.lock_file):
                continue
            with suppress(Timeout):  # it is in use
                lock.acquire(blocking=False)
                self._locks[directory] = lock
                if name in served:
                    self._loaded.append(name)
                    self._unload([name])  # and removes its directory; a failure is retried with the next adapter
                else:
                    self._remove(directory)
                logger.info(f"Removed leftovers of a killed run: {directory}")


@contextmanager
def _writing(directory: str) -> Iterator[None]:
    """Explain errors of writing, such as a full disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        parent = next(path for path in Path(directory).parents if path.is_dir())
        free = shutil.disk_usage(parent).free / 2**30
        raise VLLMServerError(
            f"{directory} cannot be written, {free:.1f} GiB are free ({type(error).__name__}: {error})",
            "Free space for two copies of the weights, or set vllm_weight_sync_dir to another directory that both can access.",
        ) from error


def served_lora_rank(rank: int, rank_pattern: Mapping[str, int]) -> int:
    """The smallest --max-lora-rank of vLLM for an adapter; larger ranks than vLLM's are returned as they are."""
    largest = max([rank, *rank_pattern.values()])
    return next((served for served in LORA_RANKS if served >= largest), largest)


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter
