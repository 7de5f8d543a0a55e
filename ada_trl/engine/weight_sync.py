"""How the weights reach a vLLM server: hot-loaded adapters and directories, besides TRL's NCCL."""

import os
import shutil
from contextlib import contextmanager

import torch
from accelerate.utils import is_peft_model
from safetensors.torch import save_file
from trl.generation.vllm_generation import VLLMGeneration

from .client import VLLMServerError


class WeightSync:
    """
    Sends the trainer's weights to a vLLM server.

    `"lora"` writes the adapter to a new directory, hot-loads it under a new name, generates with that name and unloads
    the one before. `"disk"` writes all weights (adapters merged) to a new directory, has every worker reload them and
    resets the prefix cache. A directory is removed once its successor is in use, never while it may be read.

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
        if missing:
            raise VLLMServerError(
                f"it was started without what vllm_weight_sync={self.method!r} needs; restart it with "
                f"{'; and '.join(missing)}"
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
            save_file(state, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
            reload = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
            client._post(f"{client.base_url}/collective_rpc", json=reload)
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
                adapter = get_peft_model_state_dict(model, state_dict=state)
                save_file(adapter, os.path.join(directory, "adapter_model.safetensors"), metadata={"format": "pt"})
                model.active_peft_config.save_pretrained(directory)
                self._lora("load", lora_name=self.name, lora_path=directory)
                self.unload_lora()
        else:
            self.version += 1
        self.vllm.vllm_client.model = self.name

    def _lora(self, action: str, **kwargs) -> None:
        client = self.vllm.vllm_client
        client._post(f"{client.base_url}/v1/{action}_lora_adapter", json=kwargs)

    def unload_lora(self) -> None:
        client = self.vllm.vllm_client
        if client.model != self.vllm.base_model:
            self._lora("unload", lora_name=client.model)

    @contextmanager
    def _new_version(self):
        """A new directory to write weights to; the one before is removed once the body has succeeded."""
        previous = os.path.join(self.directory, self.name)
        self.version += 1
        directory = os.path.join(self.directory, self.name)
        os.makedirs(directory)
        yield directory
        shutil.rmtree(previous, ignore_errors=True)

    def clean_up(self) -> None:
        """Remove what was written."""
        if not os.path.isdir(self.directory):
            return
        for entry in os.listdir(self.directory):
            if entry.startswith(f"{self.run_name}-"):
                shutil.rmtree(os.path.join(self.directory, entry), ignore_errors=True)
        if not os.listdir(self.directory):
            os.rmdir(self.directory)


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter
