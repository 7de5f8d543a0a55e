"""Tiny models, data and rewards that need no download."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.trainer.step import log_step
from recipes.arithmetic.task import build_tokenizer as tiny_tokenizer


ROOT = Path(__file__).parent.parent
PROMPTS = ["1+2=", "31+4=", "5+55=", "7+8="]
VISION_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(tokenizer: PreTrainedTokenizerBase, **config) -> Qwen2Config:
    defaults = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    return Qwen2Config(**defaults | config)


def tiny_model(seed: int = 0) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 of a few thousand parameters."""
    set_seed(seed)
    return Qwen2ForCausalLM(tiny_config(tiny_tokenizer()))


def save_tiny_model(directory, seed: int = 0) -> None:
    """Write the same and its tokenizer to disk."""
    tiny_model(seed).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)


def saved_tiny_model(directory) -> Qwen2ForCausalLM:
    """The same from a checkpoint on disk, from which TRL can build a reference model."""
    save_tiny_model(directory)
    return Qwen2ForCausalLM.from_pretrained(directory)


def write_jsonl(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompt_dataset(repeats: int = 4) -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS * repeats})


def even_reward(completions: list[str], **kwargs) -> list[float]:
    """Deterministic, and about half of random completions earn it."""
    return [float(sum(map(ord, completion)) % 2 == 0) for completion in completions]


def length_reward(completions: list[str], **kwargs) -> list[float]:
    return [len(completion) / 10 for completion in completions]


def chat_tokenizer(template: str = "qwen3") -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with one of the chat templates that TRL ships, and the special tokens of Qwen."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<image>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    return fast


def tiny_chat_model(tokenizer: PreTrainedTokenizerBase, **config) -> Qwen2ForCausalLM:
    """As [`tiny_model`], for conversations of some thousand bytes."""
    set_seed(0)
    return Qwen2ForCausalLM(tiny_config(tokenizer, max_position_embeddings=8192, **config))


def tiny_vision_language_model(tokenizer: PreTrainedTokenizerBase):
    """A LLaVA of a few thousand parameters and its processor: images of 28 × 28 pixels become four tokens."""
    set_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=tiny_config(tokenizer, max_position_embeddings=8192),
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        )
    )
    pixels = {"height": 28, "width": 28}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=pixels),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=VISION_TEMPLATE,
    )
    return model, processor


def free_port() -> int:
    """For servers and process groups, so that two test runs on one machine do not meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def command(module, *arguments, processes=1, launcher=("--multi_gpu", "--mixed_precision=no")) -> list[str]:
    """`python -m module arguments`, under `accelerate launch` if several processes are asked for."""
    words = [sys.executable, "-W", "ignore", "-m"]
    if processes > 1:
        words += ["accelerate.commands.launch", f"--num_processes={processes}", f"--main_process_port={free_port()}"]
        words += [*launcher, "--module"]
    return [*words, module, *map(str, arguments)]


ON_CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


def run_module(module, *arguments, seconds=600, environment=ON_CPU, **launch) -> subprocess.CompletedProcess:
    """In the repository, to its end."""
    words, options = command(module, *arguments, **launch), {"capture_output": True, "text": True, "cwd": ROOT}
    return subprocess.run(words, env=os.environ | environment, timeout=seconds, **options)


def read_rank_outputs(directory: Path, processes: int, result: subprocess.CompletedProcess) -> list:
    """Of workers that write what they have seen to `rank<i>.json`."""
    ranks = [directory / f"rank{i}.json" for i in range(processes)]
    assert all(rank.exists() for rank in ranks), result.stderr[-3000:]
    return [json.loads(rank.read_text()) for rank in ranks]


# Arguments of every training run in the tests: CPU, quiet, quick.
QUICK = {
    "per_device_train_batch_size": 8,
    "max_completion_length": 5,
    "max_steps": 2,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
}


# The same on a command line.
QUICK_ARGUMENTS = [
    *("--max_steps=2", "--max_completion_length=4", "--logging_steps=1", "--use_cpu", "--bf16=false"),
    *("--gradient_accumulation_steps=1", "--disable_tqdm=true", "--report_to=none", "--learning_rate=0.01"),
]


class ScriptedRewards:
    """Deals out rewards per prompt in order of sampling: a draw's reward does not depend on its completion."""

    __name__ = "scripted"

    def __init__(self, **scripts):
        self.scripts = {prompt: list(rewards) for prompt, rewards in scripts.items()}
        self.calls = []

    def __call__(self, prompts, completions, **kwargs):
        self.calls.append(list(prompts))
        return [self.scripts[prompt].pop(0) for prompt in prompts]


class Recorder(AdaGRPOTrainer):
    """Keeps what reaches the loss, and the [`~ada_trl.core.Rollouts`] of each step."""

    def __init__(self, *args, **kwargs):
        self.batches, self.rollouts = [], []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        def record(trainer, plan, batch, output):
            self.rollouts.append(batch.rollouts)
            log_step(trainer, plan, batch, output)

        with mock.patch("ada_trl.trainer.ada_grpo_trainer.log_step", record):
            output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.batches.append(output)
        return output


def expand_mode(options: dict) -> dict:
    """
    The options, in which tests may abbreviate `adaptive_sampling="est"` with an estimator to "est-ema" and
    "est-value".
    """
    mode = options.get("adaptive_sampling") or ""
    if not mode.startswith("est-"):
        return options
    return {"pass_rate_estimator": mode.removeprefix("est-")} | options | {"adaptive_sampling": "est"}


# One mode of each kind: prompts come from the data loader, or from the prompt queue.
LOADER_MODES = {
    "uniform": {"adaptive_sampling": "uniform", "num_generations": 4},
    "batch": {"baseline": "batch", "num_generations": 2},
    "est": {"adaptive_sampling": "est-ema", "num_generations": 4},
    "seq-balance": {"num_generations": 4},
}
QUEUE_MODES = {
    "dynamic sampling": {"adaptive_sampling": "uniform", "zero_variance_groups": "resample", "num_generations": 4},
    "retries": {"baseline": "batch", "retries": 3},
}
MODES = LOADER_MODES | QUEUE_MODES


def config(output_dir, **options) -> AdaGRPOConfig:
    return AdaGRPOConfig(str(output_dir), **expand_mode(options))


ARGUMENTS = (
    "tools",
    "environment_factory",
    "optimizers",
    "advantage_func",
    "rollout_func",
    "reward_processing_classes",
)


def build(
    tmp_path,
    reward_funcs=even_reward,
    dataset=None,
    model=None,
    peft_config=None,
    eval_dataset=None,
    tokenizer=None,
    callbacks=None,
    trainer_class=Recorder,
    **overrides,
):
    """A trainer of the tiny model; `overrides` are options of its configuration, and `ARGUMENTS` of the trainer."""
    given = {name: overrides.pop(name) for name in ARGUMENTS if name in overrides}
    return trainer_class(
        model or tiny_model(),
        reward_funcs,
        config(tmp_path, **QUICK | overrides),
        prompt_dataset() if dataset is None else dataset,
        eval_dataset,
        tokenizer or tiny_tokenizer(),
        callbacks=callbacks,
        peft_config=peft_config,
        **given,
    )


def prompts_of(batch):
    return tiny_tokenizer().batch_decode(batch["prompt_ids"], skip_special_tokens=True)


def logs_of(trainer) -> list[dict]:
    """What was logged for the training steps; of a run that logged none, nothing could be asserted."""
    logs = [logs for logs in trainer.state.log_history if "reward" in logs]
    assert logs, "No step was logged."
    return logs


def weights_of(trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def moved(trainer) -> dict[str, bool]:
    """Train, and say of each parameter whether it has moved; all must stay finite."""
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    return {name: not torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters()}


def assert_same_run(whole, resumed) -> None:
    """The same weights to the bit, and the same logs but for times."""
    assert torch.equal(weights_of(whole), weights_of(resumed))
    expected, actual = (
        [{name: value for name, value in logs.items() if "time" not in name} for logs in logs_of(trainer)]
        for trainer in (whole, resumed)
    )
    assert expected == actual
