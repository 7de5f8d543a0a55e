"""Every room of the package imports from the rooms below it, and from no other (CONTRIBUTING.md)."""

import ast
import re
from pathlib import Path

from ada_trl import cli


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ada_trl"
COMMANDS = {"check", "plan", "plots", "train"}
FILES = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def rooms() -> list[str]:
    """As CONTRIBUTING.md lists them, from the bottom up."""
    return re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)


def room_of(parts: tuple[str, ...]) -> str:
    return "commands" if parts[0] in COMMANDS else parts[0]


def imported(path: Path) -> set[str]:
    """Rooms that a module takes something from, wherever in it."""
    package = ("ada_trl", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))[1:]
            names = [base] if node.module else [(*base[:-1], alias.name) for alias in node.names]
            found |= {room_of(parts) for parts in names if not parts[0].startswith("__")}
    return found


def test_the_page_lists_every_room():
    there = {room_of(path.relative_to(PACKAGE).with_suffix("").parts) for path in FILES}
    assert len(rooms()) == len(set(rooms())) and set(rooms()) == there
    assert set(cli.COMMANDS) == COMMANDS


def test_imports_lead_down():
    listed, wrong = rooms(), {}
    for path in FILES:
        own = room_of(path.relative_to(PACKAGE).with_suffix("").parts)
        wrong[path] = imported(path) - set(listed[: listed.index(own) + 1])
    assert not {str(path): above for path, above in wrong.items() if above}
