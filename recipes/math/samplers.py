"""
Samplers: vLLM or transformers, in this process.

`generate(prompts, seeds)` takes token ids and returns the token ids of `num_samples` completions for each prompt. A
prompt's completions depend on its seed only, not on the rest of the batch. `close()` releases the model.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .sampling import SamplingArguments


def make_sampler(
    model: str, tokenizer: "PreTrainedTokenizerBase", args: "SamplingArguments"
) -> "TransformersSampler | VLLMSampler":
    """Create the sampler of `args.backend` for a model by name or path."""
    sampler = VLLMSampler if args.backend == "vllm" else TransformersSampler
    return sampler(model, tokenizer, args)


class TransformersSampler:
    """Sampler that calls `generate` of transformers, one prompt at a time."""

    def __init__(self, model: str, tokenizer: "PreTrainedTokenizerBase", args: "SamplingArguments"):
        import torch
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, **args.model_kwargs).to(device).eval()
        self.args = args
        eos = self.model.generation_config.eos_token_id
        self.eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        pad = tokenizer.pad_token_id
        self.pad = min(self.eos, default=0) if pad is None else pad

    def generate(self, prompts: list[list[int]], seeds: list[int]) -> list[list[list[int]]]:
        import torch

        completions: list[list[list[int]]] = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            torch.manual_seed(seed)
            completions.append([])
            while missing := self.args.num_samples - len(completions[-1]):
                completions[-1] += self._generate(prompt, min(self.args.batch_size, missing))
        return completions

    def _generate(self, prompt: list[int], number: int) -> list[list[int]]:
        import torch

        prompts = torch.tensor([prompt] * number, device=self.model.device)  # (B, T)
        # Options that a model's generation_config often has are given, so that they have no influence.
        random = {"do_sample": True, "temperature": self.args.temperature, "top_p": self.args.top_p}
        random |= {"top_k": 0, "min_p": 0.0}
        with torch.inference_mode():
            output = self.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=self.args.max_new_tokens,
                eos_token_id=sorted(self.eos) or None,
                pad_token_id=self.pad,
                repetition_penalty=1.0,
                **(random if self.args.temperature else {"do_sample": False}),
            )
        return [self._until_eos(ids) for ids in output[:, prompts.size(1) :].tolist()]

    def _until_eos(self, ids: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(ids) if token in self.eos), len(ids))
        return ids[:end]

    def close(self) -> None:
        import torch

        del self.model
        torch.cuda.empty_cache()


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's max_lora_rank


class VLLMSampler:
    """Sampler with vLLM in this process. It supports LoRA adapters."""

    def __init__(self, model: str, tokenizer: "PreTrainedTokenizerBase", args: "SamplingArguments"):
        try:
            from vllm import LLM
            from vllm.lora.request import LoRARequest
        except ImportError as error:
            raise ImportError(
                "vLLM is not installed. Install it (`pip install ada_trl[vllm]`), or set --backend transformers."
            ) from error
        self.args = args
        self.stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.lora, options = None, {}
        adapter = Path(model) / "adapter_config.json"
        if adapter.exists():
            config = json.loads(adapter.read_text(encoding="utf-8"))
            largest = max([config["r"], *(config.get("rank_pattern") or {}).values()])
            rank = next((rank for rank in LORA_RANKS if rank >= largest), largest)
            self.lora = LoRARequest("adapter", 1, model)
            options = {"enable_lora": True, "max_lora_rank": rank, "tokenizer": model}
            model = config["base_model_name_or_path"]
        self.llm = LLM(model=model, **options, **args.model_kwargs)

    def generate(self, prompts: list[list[int]], seeds: list[int]) -> list[list[list[int]]]:
        from vllm import SamplingParams

        common = {"n": self.args.num_samples, "temperature": self.args.temperature, "top_p": self.args.top_p}
        common |= {"max_tokens": self.args.max_new_tokens, "stop_token_ids": self.stop, "detokenize": False}
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(seed=seed, **common) for seed in seeds],
            lora_request=self.lora,
            use_tqdm=False,
        )
        return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
