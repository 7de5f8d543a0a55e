"""
Every notebook runs from a clean kernel. The one that needs a GPU is stored without outputs, the others with real ones.
"""

import ast
import re

import pytest
from trl import GRPOConfig, GRPOTrainer

from recipes.tests.tiny_math import save_model
from tests.helpers import QUICK, build, even_reward, prompt_dataset, tiny_model, tiny_tokenizer


nbformat = pytest.importorskip("nbformat", reason="needs the extra [notebooks]")

from notebooks.run import DRY_RUN, FOLDER, execute  # noqa: E402 (imports nbformat)


NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def offline(path, tmp_path, monkeypatch, replacements=()):
    """The notebook's dry run with a tiny local model in place of the one that it would download."""
    for name in (DRY_RUN, "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    text = path.read_text()
    if "recipes.reasoning" in text:
        pytest.importorskip("reasoning_gym", reason="needs the extra [reasoning]")
        save_model("qwen2.5-math", tmp_path / "tiny", hidden_size=64, head_dim=32)
        replacements = [("MODEL = None", f"MODEL = '{tmp_path / 'tiny'}'"), *replacements]
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    changed = tmp_path / path.name
    changed.write_text(text)
    return changed


def kinds(notebook):
    """Outputs of each code cell: kinds and the number of printed lines of each stream."""
    return [
        [
            (
                output.output_type,
                *sorted(output.get("data", {})),
                output.get("name"),
                output.get("text", "").count("\n"),
            )
            for output in cell.outputs
            if output.get("name") != "stderr"
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_executes_from_a_clean_kernel(path, tmp_path, monkeypatch):
    fresh = execute(offline(path, tmp_path, monkeypatch))
    code = [cell for cell in fresh.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    if DRY_RUN not in path.read_text():
        assert kinds(fresh) == kinds(nbformat.read(path, as_version=4))


def test_runs_of_scripts_and_of_grpo_can_be_read(tmp_path, monkeypatch):
    """They have a checkpoint, but no state beside it, no evaluation, and not every metric."""
    saving = {"save_strategy": "steps", "save_steps": 2, "pass_rate_estimator": "ema"}
    build(tmp_path / "default", **saving).train()
    build(tmp_path / "skip", adaptive_sampling="uniform", zero_variance_groups="skip", **saving).train()
    saving.pop("pass_rate_estimator")
    args = GRPOConfig(str(tmp_path / "stock"), **QUICK | saving | {"num_generations": 4})
    GRPOTrainer(tiny_model(), even_reward, args, prompt_dataset(), processing_class=tiny_tokenizer()).train()
    runs = {name: str(tmp_path / name) for name in ("default", "skip", "stock")}

    pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs the extra [plots]")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    shown = []
    scope = {"display": shown.append}
    notebook = nbformat.read(FOLDER / "3_read_your_run.ipynb", as_version=4)
    with pyplot.rc_context():
        for cell in notebook.cells:
            if cell.cell_type == "code":
                code = re.sub(r"^%.*", "", cell.source, flags=re.MULTILINE)
                exec(re.sub(r"^RUNS = .*", f"RUNS = {runs}", code, flags=re.MULTILINE), scope)
    pyplot.close("all")
    assert scope["runs"].keys() == runs.keys() and len(shown) == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    has_outputs = any(cell.outputs for cell in code)
    assert has_outputs == (DRY_RUN not in path.read_text()), "Run `make notebooks`."
    stderr = [o.text for cell in code for o in cell.outputs if o.get("name") == "stderr"]
    assert not stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            ast.parse("\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!"))))
            continue
        for target in [part.split(")")[0] for part in cell.source.split("](")[1:]]:
            assert target.startswith("https://") or (FOLDER / target.split("#")[0]).exists(), target
