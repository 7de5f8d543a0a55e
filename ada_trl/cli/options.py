"""
The help of `ada-trl train` and `ada-trl check`. It is read from the source of the configuration classes: importing them imports torch, which
takes seconds.
"""

import ast
import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from .parser import CommandParser


OURS = ("ada_trl", "trainer/ada_grpo_config.py", "AdaGRPOConfig")
# A class before its parents, whose defaults it changes.
THEIRS = {
    "The script": (
        ("ada_trl", "train.py", "AdaScriptArguments"),
        ("trl", "scripts/utils.py", "ScriptArguments"),
        ("trl", "scripts/utils.py", "DatasetMixtureConfig"),
    ),
    "TRL: how it trains (GRPOConfig)": (
        ("trl", "trainer/grpo_config.py", "GRPOConfig"),
        ("trl", "trainer/base_config.py", "_BaseConfig"),
    ),
    "TRL: the model, LoRA and quantization (ModelConfig)": (("trl", "trainer/model_config.py", "ModelConfig"),),
    "transformers: the run (TrainingArguments)": (("transformers", "training_args.py", "TrainingArguments"),),
}
NEEDED = "What every run needs (a recipe has it)"
NEEDED_FIELDS = ("model_name_or_path", "dataset_name", "reward_funcs", "output_dir")
# Of the other inherited fields, those that a first run is likely to set.
MOST_USED = {
    "The data": ("dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "prepare"),
    "The run": (
        *(
            "max_steps",
            "learning_rate",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "beta",
            "loss_type",
        ),
        *("max_completion_length", "temperature", "use_vllm", "vllm_mode", "use_peft", "lora_r", "dtype", "bf16"),
        *("use_cpu", "eval_strategy", "eval_steps", "save_steps", "logging_steps", "log_completions", "report_to"),
        *("resume_from_checkpoint", "seed"),
    ),
}
WHAT = {
    "train": "Train a causal language model with Reinforce-Ada.",
    "check": "See in about a minute whether a training run will work, and what it will cost: samples and scores some prompts, "
    "sends the weights to the server, makes one step on rows of the greatest length, and leaves nothing behind. Takes the "
    "arguments of train.",
}
DESCRIPTION = (
    "A field is given in a YAML file, on the command line (which wins), "
    "or left at its default. Of several files the last one wins; a recipe that comes with the package is found by its "
    "name. Under `accelerate launch`: `-m ada_trl.{command} …`."
)


class Field(NamedTuple):
    """A field of a configuration class."""

    name: str
    type: str
    default: str | None  # as it is shown; None for none
    help: str
    section: str  # of the class docstring, without "Parameters that control"


def train_help(everything: bool = False, command: str = "train") -> str:
    """
    The text of `--help`, or of `--help-all`.

    Args:
        everything (`bool`, *optional*, defaults to `False`):
            Whether to list every field, and not only ours and the inherited ones that are used most.
        command (`str`, *optional*, defaults to `"train"`):
            Whose help it is.
    """
    description = f"{WHAT[command]} {DESCRIPTION.format(command=command)}"
    parser = CommandParser(
        command=command, description=description, example="--config arithmetic/seq-balance.yaml --max_steps 20"
    )
    parser.add_argument("--config", nargs="+", metavar="FILE", required=True, help="YAML files, or names of recipes.")
    parser.add_argument("--help-all", action="store_true", help="List every field, those of TRL and transformers too.")
    parser.add_argument(
        "--debug", action="store_true", help="Show the traceback of an error; a value is transformers'."
    )
    for title, fields in _groups(everything).items():
        group = parser.add_argument_group(title)
        for field in fields:
            text = _shortened(field.help) if title in MOST_USED else field.help
            group.add_argument(f"--{field.name}", metavar=field.type, default=field.default, help=text)
    return parser.format_help()


def _groups(everything: bool) -> dict[str, list[Field]]:
    """What is shown, by title; each field once."""
    ours = {field.name: field for field in read_fields(*OURS)}
    theirs = {title: [f for source in sources for f in read_fields(*source)] for title, sources in THEIRS.items()}
    fields = {field.name: field for group in reversed(theirs.values()) for field in reversed(group)} | ours
    groups = {NEEDED: [fields[name] for name in NEEDED_FIELDS]}
    for field in ours.values():
        groups.setdefault(f"Reinforce-Ada: {field.section or 'defaults that differ from TRL'}", []).append(field)
    if not everything:
        return groups | {title: [fields[name] for name in names] for title, names in MOST_USED.items()}
    shown = {*ours, *NEEDED_FIELDS, "debug"}
    for title, group in theirs.items():
        groups[title] = []
        for field in group:
            if field.name not in shown:
                groups[title].append(field)
                shown.add(field.name)
    return groups


def _shortened(text: str) -> str:
    """Its beginning; the sign of argparse for a percent sign stays whole."""
    return textwrap.shorten(text.replace("%%", "%"), 200, placeholder=" …").replace("%", "%%")


def read_fields(package: str, path: str, name: str) -> list[Field]:
    """The fields that a dataclass declares itself, from the source of the installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"{package} is not installed.")
    tree = ast.parse((Path(spec.origin).parent / path).read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    sections = _sections(ast.get_docstring(body) or "")
    return [
        _field(node.target.id, node.annotation, node.value, sections.get(node.target.id, ""))
        for node in body.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    ]


def _sections(docstring: str) -> dict[str, str]:
    """For each field the part of the docstring that it is documented in: `> Parameters that control …`."""
    found, section = {}, ""
    for line in docstring.splitlines():
        if heading := re.match(r"\s*> Parameters that control (.*)", line):
            section = heading[1].replace("`", "").removeprefix("the ")
        elif documented := re.match(r"\s{,8}(\w+) \(`", line):
            found[documented[1]] = section
    return found


def _field(name: str, annotation: ast.expr, value: ast.expr, section: str) -> Field:
    options = {"default": value}
    if isinstance(value, ast.Call):
        options = {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg}
    default = options.get("default", options.get("default_factory"))
    if isinstance(default, ast.Lambda):
        default = default.body
    shown = None if default is None else str(_literal(default))
    metadata = options.get("metadata")
    texts = {}
    if isinstance(metadata, ast.Dict):
        texts = {_literal(key): value for key, value in zip(metadata.keys, metadata.values, strict=True) if key}
    text = _literal(texts["help"]) if "help" in texts else ""
    shown = None if shown in ("None", "list", "dict") else shown
    return Field(name, _shown_type(annotation), shown, " ".join(str(text).split()), section)


def _shown_type(annotation: ast.expr) -> str:
    """`int | None` as INT, `list[str]` as STR …; of several types the plainest."""
    kinds = ast.unparse(annotation).replace("'", "").split(" | ")
    kind = next((plain for plain in ("bool", "int", "float", "str") if plain in kinds), kinds[0])
    return re.sub(r"^LIST\[(.*)\]$", r"\1 …", kind.upper())


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
