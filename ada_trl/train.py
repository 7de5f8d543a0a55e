"""
Train with Reinforce-Ada from a configuration file.

`python -m ada_trl.train --config recipes/arithmetic/seq-balance.yaml [--any_field value]`, or under
`accelerate launch -m ada_trl.train …`. Of several files, the later ones win.
"""

import ast
import dataclasses
import importlib
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

import yaml
from datasets import load_dataset
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from .mathematics.prompts import with_prompts
from .trainer.ada_grpo_config import AdaGRPOConfig
from .trainer.ada_grpo_trainer import AdaGRPOTrainer


@dataclass
class AdaScriptArguments(ScriptArguments):
    """
    Script arguments of `ada_trl.train`, on top of [`~trl.ScriptArguments`].

    Args:
        reward_funcs (`list[str]`):
            Reward functions: dotted import paths of functions (`my_package.rewards.accuracy`, looked up in the current
            directory too; those of TRL are `trl.rewards.accuracy_reward` and so on), calls of functions that make one
            (`trl.rewards.get_repetition_penalty_reward(ngram_size=4)`), or reward models by name or local path.
    """

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: dotted import paths (`my_package.rewards.accuracy`, "
            "`trl.rewards.accuracy_reward`), or reward models by name or local path."
        },
    )


HELP = """\
usage: python -m ada_trl.train --config FILE [FILE ...] [--any_field value ...]
       accelerate launch -m ada_trl.train --config FILE [FILE ...] [--any_field value ...]

Train a causal language model with Reinforce-Ada. A field is given in a YAML file (of several files, the last one wins), on
the command line (which wins over files), or left at its default. The most important ones are listed here. Every field of trl.GRPOConfig,
transformers.TrainingArguments and trl.ModelConfig (LoRA: --use_peft) is accepted too; --help-all lists them all.
"""


def parse_args(args: list[str] | None = None) -> tuple[AdaScriptArguments, AdaGRPOConfig, ModelConfig]:
    """Parse a command line (default: `sys.argv`) into script, trainer and model arguments."""
    args = sys.argv[1:] if args is None else list(args)
    if "--help" in args or "-h" in args:
        print(short_help())
        raise SystemExit(0)
    if "--help-all" in args:
        args = ["--help"]
    parser = TrlParser((AdaScriptArguments, AdaGRPOConfig, ModelConfig), prog="python -m ada_trl.train")
    return parser.parse_args_and_config(_apply_configs(parser, args))


def _apply_configs(parser: TrlParser, args: list[str]) -> list[str]:
    """
    `args` with the last of the files after `--config` only, which is all that [`~trl.TrlParser`] takes. Those before it
    become defaults of `parser`.

    Raises:
        `ValueError`: for a file that is no mapping, or a field that does not exist.
    """
    if "--config" not in args:
        return args
    start = args.index("--config") + 1
    end = next((i for i in range(start, len(args)) if args[i].startswith("--")), len(args))
    for path in args[start : end - 1]:
        with open(path) as file:
            config = yaml.safe_load(file)
        if not isinstance(config, dict):
            raise ValueError(f"{path} must contain a YAML mapping of fields to values, not {config!r}.")
        if unknown := parser.set_defaults_with_config(**config):
            raise ValueError(f"{path} has unknown fields: {' '.join(unknown)}. `--help-all` lists all fields.")
    return args[:start] + args[end - 1 :]


def short_help() -> str:
    """The fields that matter for a first run, with defaults and one line each."""
    inherited = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    ours = [f.name for f in dataclasses.fields(AdaGRPOConfig) if inherited.get(f.name, f) != f.default]
    sections = {
        "What to train": (ModelConfig, ["model_name_or_path", "dtype", "use_peft", "lora_r"]),
        "On what": (
            AdaScriptArguments,
            ["dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "reward_funcs"],
        ),
        "Reinforce-Ada": (AdaGRPOConfig, ours),
        "The run": (
            AdaGRPOConfig,
            ["output_dir", "max_steps", "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps"]
            + [
                "max_completion_length",
                "temperature",
                "beta",
                "loss_type",
                "eval_strategy",
                "eval_steps",
                "save_steps",
            ]
            + ["log_completions", "report_to", "resume_from_checkpoint", "seed"],
        ),
    }
    lines = [HELP]
    for title, (config, names) in sections.items():
        lines.append(f"{title}:")
        fields = {f.name: f for f in dataclasses.fields(config)}
        for name in names:
            has_factory = fields[name].default_factory is not dataclasses.MISSING
            default = fields[name].default_factory() if has_factory else fields[name].default
            shown = "" if default in (None, dataclasses.MISSING) else f" (default: {default})"
            text = textwrap.shorten(fields[name].metadata.get("help", ""), 260, placeholder=" …") + shown
            lines.append(f"  --{name}")
            lines += textwrap.wrap(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines.append("")
    return "\n".join(lines)


def load_reward_funcs(names: list[str] | None) -> list[Callable | str]:
    """Dotted import paths to functions; anything that is no importable path is kept as the name of a reward model."""
    if not names:
        raise ValueError(
            "No reward function was given. Set `reward_funcs` to one or more import paths, for example "
            "`--reward_funcs trl.rewards.accuracy_reward`."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return [_load_reward_func(name) for name in names]


def _load_reward_func(name: str) -> Callable | str:
    if name.endswith(")"):
        return _call_reward_factory(name)
    return name if "." not in name or "/" in name else _import_reward_func(name)


def _import_reward_func(path: str) -> Callable:
    module_name, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise ValueError(
            f"Reward function {path!r} could not be imported ({error}). Give the dotted path of a function that is "
            f"importable from {os.getcwd()!r}, or `organisation/name` for a reward model."
        ) from error


def _call_reward_factory(text: str) -> Callable:
    """The result of a call with literal keyword arguments, such as `package.get_reward(limit=5)`."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(item.arg is None for item in call.keywords):
            raise ValueError("it is no call with keyword arguments only")
        path, arguments = ast.unparse(call.func), {item.arg: ast.literal_eval(item.value) for item in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"Reward function {text!r} could not be read ({error}). Write a call as "
            "`package.get_reward(name=value, ...)` with plain values."
        ) from error
    return _import_reward_func(path)(**arguments)


def build_trainer(
    script_args: AdaScriptArguments, training_args: AdaGRPOConfig, model_args: ModelConfig
) -> AdaGRPOTrainer:
    """
    Load the data set and the model and build the trainer.

    Raises:
        `ValueError`: if the model, the data set, its split or a reward function is missing.
    """
    for name, value in (
        ("model_name_or_path", model_args.model_name_or_path),
        ("dataset_name", script_args.dataset_name),
    ):
        if not value:
            raise ValueError(f"{name} is not set. Give it in the configuration file or as --{name}.")
    reward_funcs = load_reward_funcs(script_args.reward_funcs)
    dataset = load_dataset(
        script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
    )
    evaluate = training_args.eval_strategy != "no"
    for name in ["dataset_train_split", "dataset_test_split"][: 1 + evaluate]:
        if getattr(script_args, name) not in dataset:
            raise ValueError(
                f"{name} ({getattr(script_args, name)!r}) is not a split of {script_args.dataset_name!r}, which has "
                f"{', '.join(map(repr, dataset))}."
            )
        dataset[getattr(script_args, name)] = with_prompts(dataset[getattr(script_args, name)])
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    } | (training_args.model_init_kwargs or {})
    return AdaGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluate else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), train, save to `output_dir`."""
    script_args, training_args, model_args = parse_args(args)
    trainer = build_trainer(script_args, training_args, model_args)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    main()
