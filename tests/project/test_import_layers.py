"""Every layer of the package imports from the layers below it, and from no other (CONTRIBUTING.md)."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ada_trl.commands import COMMANDS


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ada_trl"
FILES = [path for path in PACKAGE.rglob("*.py") if path not in (PACKAGE / "__init__.py", PACKAGE / "version.py")]


def layers() -> list[str]:
    """The layers that CONTRIBUTING.md lists, from the top down."""
    return re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)


def imported(path: Path) -> set[str]:
    """Layers that a module imports from, wherever in it."""
    package = ("ada_trl", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))[1:]
            names = [base] if node.module else [(*base[:-1], alias.name) for alias in node.names]
            found |= {parts[0] for parts in names if not parts[0].startswith("__")}
    return found


def test_the_page_lists_every_layer():
    there = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}
    assert len(layers()) == len(set(layers())) and set(layers()) == there
    assert all((PACKAGE / "commands" / f"{name}.py").exists() for name in COMMANDS)


def test_imports_point_down():
    listed, wrong = layers(), {}
    for path in FILES:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if above := imported(path) - {*listed[listed.index(own) :], "version"}:
            wrong[str(path)] = above
    assert not wrong


@pytest.mark.slow
def test_the_trainer_loads_the_code_for_vllm_and_pass_rates_only_when_a_run_uses_it():
    optional = ("ada_trl.vllm", "ada_trl.pass_rates", "ada_trl.commands", "ada_trl.recipes")
    code = (
        f"import sys; from ada_trl import AdaGRPOTrainer; print([n for n in sys.modules if n.startswith({optional})])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
