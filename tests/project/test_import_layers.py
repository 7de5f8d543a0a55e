"""Every layer of the package imports from the layers below it, and from no other (CONTRIBUTING.md)."""

import ast
import graphlib
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


def test_no_module_imports_itself_through_others():
    """Imports within functions and for type annotations included."""
    modules = {path.relative_to(ROOT).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
    modules = {name[:-1] if name[-1] == "__init__" else name: path for name, path in modules.items()}
    graph = {}
    for name, path in modules.items():
        package, graph[name] = path.relative_to(ROOT).parent.parts, set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                start = package[: len(package) - node.level + 1] if node.level else ()
                base = (*start, *(node.module or "").split(".")) if node.module else start
                for alias in node.names:
                    imported = (*base, alias.name) if (*base, alias.name) in modules else base
                    graph[name] |= {imported} & modules.keys() - {name}
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError


@pytest.mark.slow
def test_the_trainer_loads_the_code_for_vllm_and_pass_rates_only_when_a_run_uses_it():
    optional = ("ada_trl.vllm", "ada_trl.pass_rates", "ada_trl.commands", "ada_trl.recipes")
    code = (
        f"import sys; from ada_trl import AdaGRPOTrainer; print([n for n in sys.modules if n.startswith({optional})])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
