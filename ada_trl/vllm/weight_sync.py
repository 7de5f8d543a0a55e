"""Weight synchronization with a vLLM server: hot-loaded adapters and directories, besides TRL's NCCL."""

import os
import re
import shutil
from contextlib import suppress

import torch
from accelerate.utils import is_peft_model
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from trl.generation.vllm_generation import VLLMGeneration

from ..utils.logging import get_logger
from .errors import VLLMServerError
from .responses import quote
from .transport import SHORT_SECONDS


logger = get_logger(__name__)

IN_USE = "in_use.lock"  # held by the run that wrote the directory, for as long as it lives


class WeightSync:
    """
    Sends the trainer's weights to a vLLM server through a directory.

    `"lora"` writes the adapter to a new directory, hot-loads it under the name of the directory, generates with that
    name and unloads the one before. `"disk"` writes all weights (adapters merged) to a new directory, has every worker
    reload them and resets the prefix cache. A directory is removed once its successor is in use, never while it may be
    read. Leftovers of killed runs are removed at the next start: no process holds their locks any more.

    `directory` has the same path for trainer and server. `run_name` is the prefix of directories and adapter names,
    the same on every rank.
    """

    def __init__(self, method: str, directory: str, vllm: VLLMGeneration, run_name: str):
        self.method = method
        self.directory = os.path.abspath(directory)
        self.vllm = vllm
        self.run_name = run_name
        self.version = 0
        # Of this run's directories, by name. With "lora", these are also the adapters that may be on the server.
        self._locks: dict[str, FileLock] = {}

    @property
    def name(self) -> str:
        return f"{self.run_name}-{self.version}"

    def check_adapter(self) -> None:
        """Raise if the model has no adapter to send, or one that a server would load only in part."""
        if self.method != "lora":
            return
        if not is_peft_model(self.vllm.model):
            raise ValueError(
                "vllm_weight_sync='lora' hot-loads a LoRA adapter, but the model has none. Pass a peft_config, or set "
                "vllm_weight_sync='disk' or 'nccl'."
            )
        adapter = self.vllm.model.active_peft_config
        if unsupported := unsupported_by_server(self.vllm.model):
            can_be_merged = not adapter.is_prompt_learning and "trainable_token_indices" not in unsupported
            disk = ", or vllm_weight_sync='disk', which sends merged weights" if can_be_merged else ""
            raise ValueError(
                f"vllm_weight_sync='lora' does not support {unsupported}, which an adapter on a vLLM server cannot "
                f"have. Use one active LoraConfig without it{disk}."
            )

    def sync_disk(self) -> None:
        """
        Write all weights and let the server reload them. Every rank iterates over sharded parameters, which is
        collective.
        """
        state = {}
        for name, parameter in self.vllm._iter_named_params():
            if self.vllm.accelerator.is_main_process:
                state[name] = parameter.detach().to("cpu", copy=True).contiguous()
        if not self.vllm.accelerator.is_main_process:
            return
        self.version += 1
        directory = self._new_directory()
        save_file(state, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        response = self.vllm.vllm_client.send("POST", "/collective_rpc", json=reload)
        if not response.get("results"):
            raise VLLMServerError(f"no worker has confirmed the reload, the response is {quote(response)}")
        self._remove_others()
        self.vllm.vllm_client.reset_prefix_cache()

    def sync_lora(self) -> None:
        """
        Write the adapter, let the server load it, and generate with its name. Collective where parameters are sharded.
        """
        from peft import get_peft_model_state_dict

        model = self.vllm.accelerator.unwrap_model(self.vllm.model)
        parameters = {name: p for name, p in model.named_parameters() if model.prefix in name}
        with self.vllm._dist.gather_params(list(parameters.values())):
            state = {name: _full(parameter.detach()).to("cpu", copy=True) for name, parameter in parameters.items()}
        self.version += 1
        if self.vllm.accelerator.is_main_process:
            directory = self._new_directory()
            # Without a look at the hub for every step, whether the vocabulary of the base model was changed.
            adapter = get_peft_model_state_dict(
                model, state_dict=state, adapter_name=model.active_adapter, save_embedding_layers=False
            )
            save_file(adapter, os.path.join(directory, "adapter_model.safetensors"), metadata={"format": "pt"})
            model.active_peft_config.save_pretrained(directory)
            load = {"lora_name": self.name, "lora_path": directory}
            response = self.vllm.vllm_client.send("POST", "/v1/load_lora_adapter", json=load)
            if not response.get("text", "").startswith("Success"):
                raise VLLMServerError(f"it has not confirmed that the adapter is loaded: {quote(response)}")
            self._remove_others()
        self.vllm.vllm_client.model = self.name

    def _new_directory(self) -> str:
        directory = os.path.join(self.directory, self.name)
        os.makedirs(directory)
        self._locks[self.name] = lock = FileLock(os.path.join(directory, IN_USE))
        lock.acquire(blocking=False)
        return directory

    def _remove_others(self) -> None:
        for name in self._locks.keys() - {self.name}:
            self._remove(name)

    def _remove(self, name: str) -> None:
        """
        Unload an adapter and remove its directory. A failure does no harm: it is tried again after the next
        synchronization.
        """
        if self.method == "lora":
            unload, path = {"lora_name": name}, "/v1/unload_lora_adapter"
            try:
                self.vllm.vllm_client.send("POST", path, json=unload, timeout=SHORT_SECONDS)
            except VLLMServerError as error:
                if error.status != 404:  # else the adapter is not there
                    logger.warning(f"The adapter {name} is still on the vLLM server: {error.cause}.")
                    return
        self._locks.pop(name).release()
        shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)

    def close(self) -> None:
        """
        Remove adapters from the server and directories from the disk. The directory of an adapter that could not be
        unloaded stays, so that the next run with the same directory unloads it.
        """
        for name in list(self._locks):
            self._remove(name)
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()
        with suppress(OSError):  # it is not empty, or was never created
            os.rmdir(self.directory)

    def remove_leftovers(self) -> None:
        """Remove leftovers of killed runs from the directory, and their adapters from the server."""
        if not os.path.isdir(self.directory):
            return
        for name in sorted(os.listdir(self.directory)):
            lock = FileLock(os.path.join(self.directory, name, IN_USE))
            if not re.fullmatch(r"ada-[0-9a-f]{8}-\d+", name) or not os.path.exists(lock.lock_file):
                continue
            with suppress(Timeout):  # it is in use
                lock.acquire(blocking=False)
                self._locks[name] = lock
                self._remove(name)


def unsupported_by_server(model: torch.nn.Module) -> str | None:
    """What of the adapter of a PEFT model a vLLM server cannot load; `None` if it can load everything."""
    config = model.active_peft_config
    if config.peft_type != "LORA":
        return f"peft_type={config.peft_type.value!r}"
    if len(names := model.base_model.active_adapters) > 1:
        return f"several active adapters ({', '.join(names)})"
    for option in ("modules_to_save", "trainable_token_indices", "bias", "lora_bias", "use_dora"):
        value = getattr(config, option, None)
        if value and value != "none":
            return f"{option}={value!r}"
    if str(config.init_lora_weights).startswith(("pissa", "olora", "corda", "loftq")):  # they change the base model
        return f"init_lora_weights={config.init_lora_weights!r}"
    return None


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter
