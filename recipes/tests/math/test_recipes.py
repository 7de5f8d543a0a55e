"""The recipes of the paper: their batch sizes, settings and prompts, and two training steps of each on tiny models."""

import json
from itertools import cycle, product
from pathlib import Path

import pytest
from datasets import Dataset

from ada_trl import AdaGRPOConfig
from ada_trl.commands.reward_funcs import load_reward_funcs
from ada_trl.commands.run_setup import build_trainer
from ada_trl.commands.train import main, parse_args
from ada_trl.recipes.math.prompts import INSTRUCTION, SYSTEM_PROMPT, to_prompt, with_prompts

from ..tiny_math import ARCHITECTURES, PROBLEMS, save_model, save_problems


MATH = Path(__file__).parents[2] / "math"
MODELS = {
    "qwen2.5-math-1.5b": "qwen2.5-math",
    "qwen2.5-math-7b": "qwen2.5-math",
    "llama-3.2-3b-instruct": "llama-3.2",
    "qwen3-4b-instruct": "qwen3-instruct-2507",
}
HARD = ["qwen2.5-math-1.5b-hard", "qwen2.5-math-7b-hard"]
# adaptive_sampling, baseline, num_generations, scale_rewards, prompt_weighting, pass_rate_estimator
METHODS = {  # Algorithm 2 (line 19) has no weight; Est has 8 rollouts on average (section 4.1)
    "grpo-n4": ("uniform", "pool", 4, "group", "none", None),
    "dapo": ("uniform", "pool", 4, "group", "none", None),
    "seq-pos": ("seq-pos", "pool", 4, "none", "none", None),
    "seq-balance": ("seq-balance", "pool", 4, "none", "none", None),
    "est-ema": ("est", "pool", 8, "none", "inverse_sqrt", "ema"),
    "est-value": ("est", "pool", 8, "none", "inverse_sqrt", "value"),
}
VARIANTS = {  # trained with the 1.5B only
    "grpo-n8": ("uniform", "pool", 8, "group", "none", None),
    "grpo-n16": ("uniform", "pool", 16, "group", "none", None),
    "seq-balance-hybrid": ("seq-balance", "pool", 4, "none", "inverse_sqrt", None),
    "est-ema-n4": ("est", "pool", 4, "none", "inverse_sqrt", "ema"),
    "est-value-n4": ("est", "pool", 4, "none", "inverse_sqrt", "value"),
    "batch": ("uniform", "batch", 1, "none", "none", None),
    "maxrl": ("uniform", "pool", 8, "none", "inverse", None),
}
GROUP_SIZES = {method: settings[2] for method, settings in (METHODS | VARIANTS).items()}
# Processes that train, prompts per generation, optimizer steps per generation
HARDWARE = {
    "8-gpus": (8, 512, 4),
    "4+4-gpus": (4, 512, 4),
    "1-gpu": (1, 512, 4),
    "lora-24gb": (1, 64, 1),
    "lora-16gb": (1, 32, 1),
}
# Every model and every method, but not with each other: they are separate files.
METHODS_OF_PAPER = [(model, method, "8-gpus") for model, method in zip(cycle(MODELS), METHODS, strict=False)]
RUNS = [
    *METHODS_OF_PAPER,
    *product(["qwen2.5-math-1.5b"], VARIANTS, ["8-gpus"]),
    *product(["qwen2.5-math-1.5b"], ["seq-balance"], [name for name in HARDWARE if name != "8-gpus"]),
    *product(HARD, ["seq-balance"], ["8-gpus"]),
]
QUICK_RUNS = {*METHODS_OF_PAPER, ("qwen2.5-math-1.5b", "seq-balance", "lora-16gb")}


def files(model: str, method: str, hardware: str) -> list[str]:
    return ["--config", *(str(MATH / f"{name}.yaml") for name in ("paper", model, method, hardware))]


def test_every_file_is_a_model_a_method_or_hardware():
    known = {"paper", "script", *MODELS, *HARD, *METHODS, *VARIANTS, *HARDWARE}
    assert {path.stem for path in MATH.glob("*.yaml")} == known


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_batches(method, hardware, monkeypatch):
    processes, prompts, updates = HARDWARE[hardware]
    monkeypatch.setattr(AdaGRPOConfig, "world_size", property(lambda self: processes))
    overrides = ["--use_cpu", "--bf16=false", "--fp16=false"]
    _, args, _ = parse_args([*files("qwen2.5-math-1.5b", method, hardware), *overrides])
    rows = args.per_device_train_batch_size * processes * args.gradient_accumulation_steps
    if hardware.startswith("lora") or GROUP_SIZES[method] == 1:  # as many rows as fit, or as GRPO with n = 4
        prompts = prompts * 4 // args.num_generations
    assert args.generation_batch_size == prompts * args.num_generations
    assert rows * updates == args.generation_batch_size
    assert args.steps_per_generation == updates * args.gradient_accumulation_steps
    assert args.max_steps == 600 * updates and args.warmup_steps == 10 * updates


@pytest.mark.parametrize("model", [*MODELS, *HARD])
def test_the_papers_settings(model):
    paper = {"temperature": 1, "max_completion_length": 2048, "learning_rate": 1e-6, "beta": 0, "epsilon": 0.2}
    paper |= {"epsilon_high": 0.28, "entropy_coef": 1e-4, "loss_type": "dapo", "num_iterations": 1, "max_rounds": 4}
    paper |= {"samples_per_round": 8, "positive_threshold": 0.7, "lr_scheduler_type": "constant_with_warmup"}
    script_args, args, model_args = parse_args([*files(model, "seq-balance", "8-gpus"), "--use_cpu", "--bf16=false"])
    assert {name: getattr(args, name) for name in paper} == paper
    assert script_args.dataset_name.startswith("RLHFlow/reinforce_ada_")
    assert ("hard" in script_args.dataset_name) == (model in HARD or not model.startswith("qwen2.5"))
    assert model_args.model_name_or_path.lower().rpartition("/")[2].startswith(model.removesuffix("-hard"))


def test_differences_between_script_and_paper():
    """Each of them as in the authors' run_reinforce_ada.sh; TRL's `delta` is verl's `clip_ratio_c`."""
    quick = ["--use_cpu", "--bf16=false"]
    paper, script = (
        parse_args(["--config", *(str(MATH / f"{name}.yaml") for name in names), *quick])[1].to_dict()
        for names in (PAPER_FILES, [PAPER_FILES[0], "script", *PAPER_FILES[1:]])
    )
    changed = {name: script[name] for name in script if script[name] != paper[name] and "dir" not in name}
    assert changed == {"delta": 10.0, "entropy_coef": 0.0, "max_steps": 1600, "save_steps": 200}
    assert script["weight_decay"] == 0


PAPER_FILES = ["paper", "qwen2.5-math-1.5b", "seq-balance", "8-gpus"]


@pytest.mark.parametrize("method", METHODS | VARIANTS)
def test_settings_and_rewards_of_each_method(method):
    script_args, args, _ = parse_args([*files("qwen2.5-math-7b", method, "8-gpus"), "--use_cpu", "--bf16=false"])
    names = "adaptive_sampling baseline num_generations scale_rewards prompt_weighting pass_rate_estimator".split()
    assert tuple(getattr(args, name) for name in names) == (METHODS | VARIANTS)[method]
    assert args.zero_variance_groups == ("resample" if method == "dapo" else "keep")
    accuracy, *others = load_reward_funcs(script_args.reward_funcs)
    assert accuracy.__name__ == "math_accuracy_reward" and len(others) == (method == "dapo")
    if others:
        assert others[0].__name__ == "soft_overlong_punishment_reward"
        assert (others[0].max_completion_len, others[0].soft_punish_cache) == (args.max_completion_length, 410)


# Prompts


@pytest.mark.parametrize(
    ("architecture", "rendered"),
    [
        (
            "qwen2.5-math",
            "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3-instruct-2507",
            "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama-3.2",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
            "Today Date: 26 Jul 2024\n\n{system}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{user}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)  # fmt: skip
def test_prompts_as_tokens_of_each_family(architecture, rendered, models, problems, tmp_path):
    recipe = next(name for name, family in MODELS.items() if family == architecture)
    arguments = command_line(recipe, "grpo-n4", "8-gpus", models, problems, tmp_path)
    trainer = build_trainer(*parse_args(arguments))
    row = trainer.train_dataset[0]
    assert row["answer"] == "5"
    ids, *_ = trainer._tokenize_prompts([row["prompt"]])
    tokenizer = trainer.processing_class
    user = PROBLEMS[0] + r" Let's think step by step and output the final answer within \boxed{}."
    system = r"Please reason step by step, and put your final answer within \boxed{}."
    assert tokenizer.decode(ids[0]) == rendered.format(system=system, user=user)
    assert [tokenizer.decode(i) for i in ids[0] if i in tokenizer.all_special_ids] == [
        token + ">" for part in rendered.split("<|")[1:] for token in ["<|" + part.split(">")[0]]
    ]


def test_problems_become_prompts_and_prompts_are_not_changed():
    hub = with_prompts(Dataset.from_list([{"problem": "1 + 1?", "gt": "2"}]))
    messages = [("system", SYSTEM_PROMPT), ("user", f"1 + 1? {INSTRUCTION}")]
    assert hub.to_list() == [
        {"problem": "1 + 1?", "answer": "2", "prompt": [{"role": r, "content": c} for r, c in messages]}
    ]
    assert hub[0]["prompt"] == to_prompt("1 + 1?")
    streamed = with_prompts(Dataset.from_list([{"problem": "1 + 1?", "gt": "2"}]).to_iterable_dataset())
    assert list(streamed) == hub.to_list()
    for columns in ({"prompt": "1+1=", "problem": "x", "gt": "2"}, {"prompt": to_prompt("1 + 1?"), "answer": "2"}):
        assert with_prompts(Dataset.from_list([columns])).to_list() == [columns]
    both = with_prompts(Dataset.from_list([{"problem": "1 + 1?", "gt": "2", "answer": "two"}]))
    assert (both[0]["gt"], both[0]["answer"]) == ("2", "two")
    with pytest.raises(ValueError, match="columns 'question', 'answer'. It needs 'prompt' or 'problem'"):
        with_prompts(Dataset.from_list([{"question": "1 + 1?", "answer": "2"}]))


# Training


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for architecture in ARCHITECTURES:
        save_model(architecture, directory / architecture)
    return directory


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "problems"
    save_problems(directory)
    return directory


def command_line(model: str, method: str, hardware: str, models: Path, problems: Path, output_dir: Path) -> list[str]:
    """A recipe with its model, its data and its sizes replaced, and what needs a GPU or a server switched off."""
    rows = 2 * max(GROUP_SIZES[method], 8)
    if method == "batch":
        rows *= 2  # its logged reward is that of new prompts only
    return [
        *files(model, method, hardware),
        f"--model_name_or_path={models / MODELS[model.removesuffix('-hard')]}",
        f"--dataset_name={problems}",
        f"--output_dir={output_dir}",
        "--max_steps=2",
        f"--generation_batch_size={rows}",
        f"--per_device_train_batch_size={rows}",
        "--gradient_accumulation_steps=1",
        "--max_completion_length=2",
        "--logging_steps=1",
        "--use_vllm=false",
        *("--use_cpu", "--bf16=false", "--fp16=false", "--dtype=float32", "--disable_tqdm=true"),
    ]


@pytest.mark.parametrize(
    ("model", "method", "hardware"),
    [pytest.param(*run, marks=[pytest.mark.slow] * (run not in QUICK_RUNS)) for run in RUNS],
)
def test_recipe_trains_two_steps_and_saves(model, method, hardware, models, problems, tmp_path):
    main(command_line(model, method, hardware, models, problems, tmp_path))
    weights = "adapter_model.safetensors" if hardware.startswith("lora") else "model.safetensors"
    assert (tmp_path / weights).exists() and (tmp_path / "tokenizer.json").exists()
    steps = [
        logs
        for logs in json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
        if "rewards/math_accuracy_reward/mean" in logs
    ]
    assert len(steps) == 2
    assert any(logs["grad_norm"] > 0 for logs in steps)
    assert 0 < sum(logs["rewards/math_accuracy_reward/mean"] for logs in steps) < 2
    samples = [logs["ada/samples_per_prompt/mean"] for logs in steps]
    group = GROUP_SIZES[method]
    assert all(number >= 8 for number in samples) if method.startswith("seq") else samples == [group, group]
    assert ("rewards/soft_overlong_punishment_reward/mean" in steps[0]) == (method == "dapo")
    assert ("ada/estimator/brier" in steps[-1]) == method.startswith("est")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trl.rewards.get_soft_overlong_punishment(2048, 410)", "keyword arguments only"),
        ("trl.rewards.get_soft_overlong_punishment(max_completion_len=n)", "could not be read"),
        ("trl.rewards.get_soft(max_completion_len=1)", "could not be imported"),
        ("trl.rewards.get_soft(", "could not be imported"),
        ("(1)", "could not be read"),
    ],
)
def test_bad_reward_factories(name, message):
    with pytest.raises(ValueError, match=message):
        load_reward_funcs([name])
