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
MODULES = {path.relative_to(ROOT).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
MODULES = {name[:-1] if name[-1] == "__init__" else name: path for name, path in MODULES.items()}
LAYERS = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)  # from the top down


def imported(name: tuple[str, ...]) -> set[tuple[str, ...]]:
    """The modules that one imports, wherever in it, within functions and for type annotations included."""
    package, found = MODULES[name].relative_to(ROOT).parent.parts, set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = (*start, *(node.module or "").split(".")) if node.module else start
            found |= {(*base, alias.name) if (*base, alias.name) in MODULES else base for alias in node.names}
    return found & MODULES.keys() - {name}


def test_the_page_lists_every_layer():
    assert sorted(LAYERS) == sorted({name[1] for name in MODULES if name[1:]} - {"version"})
    assert all((PACKAGE / "commands" / f"{name}.py").exists() for name in COMMANDS)


def test_imports_point_down():
    for name in MODULES:
        if name[1:] and name[1] != "version":
            above = {other[1] for other in imported(name) if other[1:]} - {*LAYERS[LAYERS.index(name[1]) :], "version"}
            assert not above, name


def test_no_module_imports_itself_through_others():
    graphlib.TopologicalSorter({name: imported(name) for name in MODULES}).prepare()  # raises a CycleError


@pytest.mark.slow
def test_the_trainer_loads_the_code_for_vllm_and_pass_rates_only_when_a_run_uses_it():
    optional = ("ada_trl.vllm", "ada_trl.pass_rates", "ada_trl.commands", "ada_trl.recipes")
    code = (
        f"import sys; from ada_trl import AdaGRPOTrainer; print([n for n in sys.modules if n.startswith({optional})])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
