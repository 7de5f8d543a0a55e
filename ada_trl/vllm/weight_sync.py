"""How the weights reach a vLLM server: hot-loaded adapters and directories, besides TRL's NCCL."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from accelerate.utils import is_peft_model
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from trl.generation.vllm_generation import VLLMGeneration

from ..utils.logging import get_logger
from .client import VLLMServerError
from .response_validation import quote


logger = get_logger(__name__)

CLOSE_SECONDS = 10  # for unloading an adapter, without which nothing is wrong
IN_USE = "in_use.lock"  # held by the run that wrote the directory, for as long as it lives


class WeightSync:
    """
    Sends the trainer's weights to a vLLM server.

    `"lora"` writes the adapter to a new directory, hot-loads it under a new name, generates with that name and unloads
    the one before. `"disk"` writes all weights (adapters merged) to a new directory, has every worker reload them and
    resets the prefix cache. A directory is removed once its successor is in use, never while it may be read. What runs
    that were killed have left is removed at the next start: no living process holds its lock any more.

    Args:
        method (`str`):
            `"nccl"`, `"lora"` or `"disk"`.
        directory (`str`):
            Under the same path for trainer and server.
        vllm (`AdaVLLMGeneration`):
            The model, its processes and the client.
        run_name (`str`):
            Prefix of directories and adapter names; the same on every process.
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
        """
        Raises:
            `ValueError`: if the device or the model's adapter does not allow the method.
        """
        device = self.vllm.accelerator.device.type
        if self.method == "nccl" and device != "cuda":
            raise ValueError(
                f"vllm_weight_sync='nccl' needs a CUDA device, this trainer runs on {device!r}. Set "
                "vllm_weight_sync='lora' (with a peft_config) or vllm_weight_sync='disk'."
            )
        if self.method != "lora":
            return
        if not is_peft_model(self.vllm.model):
            raise ValueError(
                "vllm_weight_sync='lora' hot-loads a LoRA adapter, but the model has none. Pass a peft_config, or set "
                "vllm_weight_sync='disk' or 'nccl'."
            )
        config = self.vllm.model.active_peft_config
        unsupported: str | None
        if config.peft_type.value != "LORA":
            unsupported = f"peft_type={config.peft_type.value!r}"
        else:
            given = {
                "use_dora=True": config.use_dora,
                f"modules_to_save={config.modules_to_save}": config.modules_to_save,
                f"bias={config.bias!r}": config.bias != "none",
            }
            unsupported = next((name for name, is_given in given.items() if is_given), None)
        if unsupported:
            raise ValueError(
                f"vllm_weight_sync='lora' does not support adapters with {unsupported}, because vLLM cannot serve them. "
                "Set vllm_weight_sync='disk' or 'nccl', which merge the adapter."
            )

    def check_server(self, info: dict) -> None:
        """
        Args:
            info (`dict`):
                The server's `/server_info`.

        Raises:
            [`VLLMServerError`]: if the server was started without a flag that the method needs.
        """
        config, missing = info["vllm_config"], []
        max_length, completion = config["model_config"]["max_model_len"], self.vllm.max_completion_length
        if max_length <= completion:
            missing.append(
                f"a --max-model-len that holds the longest prompt and max_completion_length ({completion}), it is "
                f"{max_length}"
            )
        if self.method == "nccl" and config["weight_transfer_config"] is None:
            missing.append("""--weight-transfer-config '{"backend": "nccl"}'""")
        if self.method == "lora":
            peft_config = self.vllm.model.active_peft_config
            rank = max([peft_config.r, *peft_config.rank_pattern.values()])
            if config["lora_config"] is None:
                missing.append(f"--enable-lora --max-lora-rank {rank}")
            elif config["lora_config"]["max_lora_rank"] < rank:
                missing.append(f"--max-lora-rank {rank}, it is {config['lora_config']['max_lora_rank']}")
            if info.get("vllm_env", {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") is False:
                missing.append("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment")
            if config["parallel_config"].get("_api_process_count", 1) > 1:
                missing.append("--api-server-count 1, because each API server keeps a list of adapters of its own")
        if config["model_config"]["logprobs_mode"].endswith("_logits"):
            missing.append("--logprobs-mode processed_logprobs, because logits are no log-probabilities")
        if missing:
            raise VLLMServerError(
                f"vllm_weight_sync={self.method!r} needs what it was started without",
                f"Restart it with {'; and '.join(missing)}.",
            )

    def sync_disk(self) -> None:
        """Collective where parameters are sharded, so every process walks over all of them."""
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
            answer = client._post(f"{client.base_url}/collective_rpc", json=reload)
            if not isinstance(answer.get("results"), list) or not answer["results"]:
                raise VLLMServerError(
                    f"no worker says that it has reloaded the weights, its answer is {quote(answer)}"
                )
        client.reset_prefix_cache()

    def sync_lora(self) -> None:
        """Collective where parameters are sharded. Every process generates with the new adapter's name afterwards."""
        from peft import get_peft_model_state_dict

        model = self.vllm.accelerator.unwrap_model(self.vllm.model)
        parameters = {name: p for name, p in model.named_parameters() if model.prefix in name}
        with self.vllm._dist.gather_params(list(parameters.values())):
            state = {name: _full(parameter.detach()).to("cpu", copy=True) for name, parameter in parameters.items()}
        if self._is_main_process:
            with self._new_version() as directory:
                with _writing(directory):
                    adapter = get_peft_model_state_dict(model, state_dict=state)
                    save_file(adapter, os.path.join(directory, "adapter_model.safetensors"), metadata={"format": "pt"})
                    model.active_peft_config.save_pretrained(directory)
                self._loaded.append(self.name)  # whatever is answered
                answer = self._lora("load", lora_name=self.name, lora_path=directory)
                if not answer.get("text", "").startswith("Success"):
                    raise VLLMServerError(
                        f"it does not say that it has loaded the adapter, its answer is {quote(answer)}"
                    )
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
        """What cannot be unloaded does no harm: it is tried again with the next ones."""
        for name in names:
            try:
                self._lora("unload", lora_name=name)
            except VLLMServerError as error:
                if error.status != 404:  # it is not there
                    logger.warning_once(
                        f"An adapter that is no longer needed stays on the vLLM server for now: {error.cause}."
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
        if self.method != "lora":  # which needs its name to unload it
            self._remove(previous)

    def _remove(self, directory: str) -> None:
        if directory in self._locks:
            self._locks.pop(directory).release()
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Leave nothing on the server and on the disk, but what the next run in this directory is to take from the server."""
        self._unload(list(self._loaded))
        if self._loaded:
            logger.warning(
                f"The adapter {' '.join(self._loaded)} is still on the vLLM server, which did not unload it. The next run "
                f"with the same vllm_weight_sync_dir ({self.directory}) does."
            )
        for directory in list(self._locks):
            if os.path.basename(directory) in self._loaded:
                self._locks.pop(directory).release()
            else:
                self._remove(directory)
        with suppress(OSError):  # it is not empty, or it was never made
            os.rmdir(self.directory)

    def remove_leftovers(self) -> None:
        """Remove what dead runs have left in the directory, and their adapters from the server."""
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
                    self._unload([name])  # which removes its directory; else it is tried again
                else:
                    self._remove(directory)
                logger.info(f"Removed what a dead run has left: {directory}")


@contextmanager
def _writing(directory: str) -> Iterator[None]:
    """Say what to do when the disk is full."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(os.path.dirname(os.path.dirname(directory))).free / 2**30
        raise VLLMServerError(
            f"{directory} cannot be written, {free:.1f} GiB are free ({type(error).__name__}: {error})",
            "Make room for two copies of the weights, or set vllm_weight_sync_dir to another directory that both see.",
        ) from error


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter
