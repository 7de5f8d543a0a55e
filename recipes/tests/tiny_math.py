"""Tiny models of the paper's architectures with their chat templates, whose completions are a few digits."""

import json
from pathlib import Path

import torch
import trl
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config, set_seed

from ada_trl.recipes.math.prompts import INSTRUCTION, SYSTEM_PROMPT


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
PROBLEMS = ["What is $2 + 3$?", "Compute $\\frac{10}{2}$.", 'How many vowels has "education"?', "What is $7 - 2$?"]
SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}
# name: configuration class, chat template that TRL ships, family of special tokens
ARCHITECTURES = {
    "qwen2.5-math": (Qwen2Config, "qwen2_5", "qwen"),
    "qwen3-instruct-2507": (Qwen3Config, "qwen3_instruct_2507", "qwen"),
    "llama-3.2": (LlamaConfig, "llama3_2", "llama"),
}


def build_tokenizer(architecture: str) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the prompts, with the family's special tokens and chat template."""
    _, template, family = ARCHITECTURES[architecture]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([SYSTEM_PROMPT, INSTRUCTION, *PROBLEMS], vocab_size=500, show_progress=False)
    special = SPECIAL[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=special[0] if family == "llama" else None,
        eos_token=special[-1],
        pad_token=special[0],
        additional_special_tokens=special[1:-1],
    )
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


def save_model(architecture: str, directory: Path, hidden_size: int = 16, head_dim: int = 8) -> None:
    """Save random weights with a head that prefers "5", "7" and EOS, so that some completions are correct."""
    tokenizer = build_tokenizer(architecture)
    set_seed(0)
    config = ARCHITECTURES[architecture][0](
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    likely = [*tokenizer.convert_tokens_to_ids(["5", "7"]), tokenizer.eos_token_id]
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0  # a direction that all hidden states share
        model.get_output_embeddings().weight[likely, 0] = 3.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_problems(directory: Path) -> None:
    """Save problems with the schema of the authors' sets on the hub: `problem` and `gt`."""
    directory.mkdir()
    rows = [{"problem": problem, "gt": "5"} for problem in PROBLEMS * 8]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
