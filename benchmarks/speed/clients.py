"""Generation on a vLLM server through TRL's client and through ours, for comparisons of the two."""

import tempfile

import torch
from accelerate import Accelerator
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.generation.vllm_client import VLLMClient

from ada_trl.vllm.generation import AdaVLLMGeneration
from recipes.arithmetic.task import build_tokenizer


class TRL:
    """Sends a batch in one request."""

    def __init__(self, url: str, max_tokens: int):
        self.client, self.max_tokens = VLLMClient(base_url=url), max_tokens

    def rows(self, rows: list[list[int]], copies: int) -> tuple[list, list]:
        """Token ids and log-probabilities of `copies` completions of each row."""
        output = self.client.generate(rows, n=copies, max_tokens=self.max_tokens, logprobs=0)
        return output["completion_ids"], [[top[0] for top in sequence] for sequence in output["logprobs"]]


class Ours:
    """Sends the requests of a batch at once; the model is not used, as no weights are sent."""

    def __init__(self, url: str, max_tokens: int):
        tokenizer = build_tokenizer()
        config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        config.num_attention_heads = config.num_key_value_heads = 2
        self.directory = tempfile.TemporaryDirectory()
        self.vllm = AdaVLLMGeneration(
            Qwen2ForCausalLM(config),
            Accelerator(cpu=not torch.cuda.is_available()),
            tokenizer,
            mode="server",
            server_base_url=url,
            max_completion_length=max_tokens,
            weight_sync="disk",
            weight_sync_dir=self.directory.name,
        )

    def rows(self, rows: list[list[int]], copies: int) -> tuple[list, list]:
        """As above."""
        _, ids, logprobs, _ = self.vllm.generate([row for row in rows for _ in range(copies)], None, copies)
        return ids, [[top[0] for top in sequence] for sequence in logprobs]
