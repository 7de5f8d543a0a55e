"""README and docs/ agree with the code: options, metrics, commands, links, and the numbers of the README."""

import dataclasses
import importlib
import re

import pytest

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.commands.options import parse_args

from ..documentation import (
    DOCS,
    PAGES,
    README,
    ROOT,
    anchors,
    blocks,
    code,
    commands,
    documented_metrics,
    expand,
    field_tables,
    generic,
    quick_start_before,
    server_metrics,
)
from ..helpers import build, moved


FIELDS = {field.name: field for field in dataclasses.fields(AdaGRPOConfig)}
page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# Settings


def test_table_of_options_matches_the_docstring():
    assert f"<!-- fields -->\n{field_tables()}\n<!-- end -->" in (DOCS / "reference.md").read_text(encoding="utf-8"), (
        "`python -m tests.documentation` writes them."
    )


@page
def test_settings_in_the_text_exist(page):
    """`name=value` in the text, and fields of our own in YAML blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    known = {
        *FIELDS,
        *("prompt_oversampling", "selection_correction", "value_model", "pass_rate_prior"),  # negative results
        *vars(AdaGRPOTrainer),
        "environment_factory",
        "peft_config",
        "resume_from_checkpoint",
        "reward_funcs",
    }
    for span in code(text):
        for name in re.findall(r"(?<![-\w.])([a-z]\w+)=(?=[\w\"'<])", span):
            assert name in known or "(" in span or "--" in span or name in ALSO, (name, span)


ALSO = {"n", "p", "k"}


@pytest.mark.parametrize("block", [block for page in PAGES for block in blocks(page, "yaml")])
def test_yaml_blocks_are_valid_configurations(block, tmp_path):
    (tmp_path / "run.yaml").write_text(block)
    sizes = ["--output_dir=unused", "--use_cpu", "--bf16=false", "--per_device_train_batch_size=16"]
    parse_args([f"--config={tmp_path / 'run.yaml'}", *sizes])


MODES = [
    options
    for options in re.findall(r"^\|[^|]+\| `([^`]+)`", README.read_text(encoding="utf-8"), flags=re.M)
    if "=" in options
]


@pytest.mark.parametrize("options", MODES)
def test_modes_of_the_readme_train(options, tmp_path):
    assert any(moved(build(tmp_path, **eval(f"dict({options})"))).values())


# Metrics


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Return the names of all `ada/` metrics that small runs log in all modes, without a vLLM server."""
    names = set()
    for mode in (
        {},
        {"adaptive_sampling": "est", "pass_rate_estimator": "value"},
        {
            "adaptive_sampling": "est",
            "per_device_train_batch_size": 16,
            "max_steps": 4,
        },  # different numbers of rollouts
        {"adaptive_sampling": "uniform", "pass_rate_estimator": "ema"},
        {"baseline": "batch", "retries": 3},
        {"adaptive_sampling": "uniform", "zero_variance_groups": "resample"},
    ):
        trainer = build(tmp_path_factory.mktemp("run"), log_completions=True, **mode)
        trainer.train()
        names |= generic(name for logs in trainer.state.log_history for name in logs)
    return names


def test_reference_has_exactly_the_metrics_that_are_logged(logged):
    names = documented_metrics()
    assert len(names) == len(set(names))
    assert set(names) ^ logged == server_metrics(), "See server/test_sampling.py."


# Commands and links


@page
def test_relative_links_and_anchors_exist(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@page
def test_commands_can_be_pasted(page, capsys):
    """Modules, options, recipes and make targets exist, and there are no ellipses."""
    for words in commands(page):
        assert "…" not in " ".join(words), words
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M), words
        for path in (path for word in words for path in expand(word)):
            if re.match(r"recipes/.*\.ya?ml$", path):
                assert (ROOT / path).exists(), path
        module, arguments = called(words)
        if module is not None:
            check_options(module, arguments, capsys)


def called(words: list[str]) -> tuple[str | None, list[str]]:
    """The module of ours that a command starts, and its arguments; `None` for other commands."""
    if words[0].endswith("ada-trl") and not words[1].startswith("-"):
        return f"ada_trl.commands.{words[1]}", words[2:]
    start = words.index("-m") + 1 if "-m" in words else len(words)
    ours = start < len(words) and words[start].startswith(("ada_trl.", "recipes.", "benchmarks."))
    return (words[start], words[start + 1 :]) if ours else (None, [])


def check_options(module: str, words: list[str], capsys) -> None:
    module = module.replace("ada_trl.recipes.", "recipes.")  # as a wheel has them
    options = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--config"}  # TrlParser's own
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    shown = spec.loader.get_source(spec.name)
    if re.search(r"^def main\(args: ", shown, flags=re.M):
        with pytest.raises(SystemExit):
            importlib.import_module(module).main(["--help-all" if module == "ada_trl.commands.train" else "--help"])
        shown = capsys.readouterr().out
    assert all(re.search(rf"{option}\b", shown) for option in options), (module, options)


def test_the_readme_links_to_every_page():
    linked = set(re.findall(r"\]\(((?:docs|benchmarks)/[\w/.]+\.md)[)#]", README.read_text(encoding="utf-8")))
    assert linked == {
        str(page.relative_to(ROOT)) for page in PAGES if page.relative_to(ROOT).parts[0] in ("docs", "benchmarks")
    }


# The README


def test_quick_start_of_the_readme_is_the_example():
    """The diff of the README turns a GRPO script, which tests/examples trains, into the example."""
    before = quick_start_before().split("# ///\n")[1]
    assert "ada" not in before.lower() and "GRPOTrainer(" in before


def test_numbers_in_the_text_of_the_readme_are_in_generated_tables():
    """Numbers with three decimals outside of generated blocks are found in a generated block of a page."""
    generated = r"<!-- [\w-]+ -->\n.*?<!-- end -->"
    tables = "".join(
        text for page in PAGES for text in re.findall(generated, page.read_text(encoding="utf-8"), flags=re.S)
    )
    written = re.findall(r"\b\d\.\d{3}\b", re.sub(generated, "", README.read_text(encoding="utf-8"), flags=re.S))
    for number in written:
        assert number in tables, number


def test_reward_function_of_the_reference():
    namespace = {}
    exec(blocks(DOCS / "reference.md", "python")[0], namespace)
    assert namespace["short_and_right"](["1" * 10, " 2"], answer=["1", "2"]) == [0.0, 0.998]


@page
def test_python_blocks_compile(page):
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")
