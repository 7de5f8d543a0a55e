"""
Readers of the documentation pages for the tests, and generators of the tables that come from the code.

`python -m tests.documentation` writes these tables again, and the help page of `ada-trl train`: the options of docs/settings.md
from the docstring of `AdaGRPOConfig`, and those of docs/commands.md from the help texts of the parsers.
"""

import argparse
import inspect
import re
from contextlib import suppress
from importlib import import_module
from itertools import product
from pathlib import Path
from unittest.mock import patch

from ada_trl import AdaGRPOConfig
from ada_trl.commands.options import HELP_PAGE, help_page
from ada_trl.utils.tables import markdown_table
from benchmarks.common import fill


ROOT = Path(__file__).parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "notebooks" / "README.md",
]


def expand(text: str) -> list[str]:
    """`a{b,c}d` as bash reads it: `abd`, `acd`."""
    parts = [part.split(",") if i % 2 else [part] for i, part in enumerate(re.split(r"\{([^{}]*)\}", text))]
    return ["".join(choice) for choice in product(*parts)]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.S | re.M)


def commands(page: Path) -> list[list[str]]:
    """The words of every line to type in a page's bash blocks, comments left out, continued lines joined."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [line.split() for line in lines if line]


def table_rows(text: str) -> list[list[str]]:
    """The cells of all tables, without headers."""
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("|")
    ]
    headers = {i - 1 for i, row in enumerate(rows) if set("".join(row)) <= set("|-: ")}
    return [row for i, row in enumerate(rows) if i not in headers and set("".join(row)) - set("|-: ")]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented_metrics() -> dict[str, list[str]]:
    """Return the `ada/` metrics in the tables of docs/metrics.md by section; `<k>` and `<p>` stand for numbers."""
    sections = re.split(r"^## ", (DOCS / "metrics.md").read_text(), flags=re.M)
    return {
        section.splitlines()[0]: [
            name for row in table_rows(section) for name in code(row[0]) if name.startswith("ada/")
        ]
        for section in sections
    }


def generic(names) -> set[str]:
    """Return the names of logged `ada/` metrics as docs/metrics.md writes them."""
    names = {re.sub(r"round_\d+$", "round_<k>", name) for name in names if name.startswith("ada/")}
    return {re.sub(r"rollouts_at_\d\.\d+$", "rollouts_at_<p>", name) for name in names}


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def fields_of(docstring: str) -> dict[str, list[list[str]]]:
    """The parameters of a docstring by its `> Parameters that control …` headings: name, default, meaning."""
    groups = {}
    for group in re.split(r"^    > Parameters that control ", docstring, flags=re.M)[1:]:
        heading, _, text = group.partition("\n")
        text = text.partition("> [!NOTE]")[0]
        rows = []
        for name, kind, meaning in re.findall(r"^ {4}(\w+) \((.*?)\):\n(.*?)(?=^ {4}\w|\Z)", text, flags=re.S | re.M):
            default = re.search(r"defaults to (`.*`)", kind)
            meaning = re.sub(r"^\s*- ", "", " ".join(meaning.split()).replace("Possible values are: - ", ""))
            meaning = re.sub(r"(?<=[.;]) - (?=`)", " ", meaning).replace("|", r"\|")
            meaning = re.sub(r"\[`~(?:\w+\.)*(\w+)`\]", r"`\1`", meaning)
            rows.append([f"`{name}`", default[1] if default else "`None`", meaning])
        groups[heading[0].upper() + heading[1:]] = rows
    return groups


def field_tables() -> str:
    """docs/settings.md's tables."""
    groups = fields_of(inspect.cleandoc(AdaGRPOConfig.__doc__))
    head = "| Field | Default | Meaning |\n|---|---|---|\n"
    return "\n\n".join(
        f"### {heading}\n\n{head}" + "\n".join(f"| {' | '.join(row)} |" for row in rows)
        for heading, rows in groups.items()
    )


def options_of(command: str) -> list[tuple[str, str, str]]:
    """The options of a command as its parser has them: name, default, help."""
    parsers, rows = [], []
    with (
        patch.object(argparse.ArgumentParser, "print_help", lambda parser: parsers.append(parser)),
        suppress(SystemExit),
    ):
        import_module(f"ada_trl.commands.{command}").main(["--help"])
    for action in (action for action in parsers[0]._actions if action.dest != "help"):
        name = action.option_strings[0] if action.option_strings else f"{action.metavar} …"
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else action.default
        needed = "needed" if action.option_strings and action.required else ""
        shown = needed if default in (None, "") else f"`{default}`"
        rows.append((f"`{name}`", shown, action.help.replace("|", r"\|")))
    return sorted(rows, key=lambda row: row[1] != "needed")


def option_tables() -> str:
    """docs/commands.md's tables."""
    tables = {f"`ada-trl {name}`": options_of(name) for name in ("plots",)}
    return "\n\n".join(
        f"**{title}**\n\n" + markdown_table(["Option", "Default", "Meaning"], rows) for title, rows in tables.items()
    )


if __name__ == "__main__":
    fill("options", option_tables(), DOCS / "commands.md")
    fill("fields", field_tables(), DOCS / "settings.md")
    HELP_PAGE.write_text(help_page(), encoding="utf-8")
