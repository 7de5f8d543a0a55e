"""
Readers of the documentation pages for the tests, and the generator of the table that comes from the code.

`python -m tests.documentation` writes the options of docs/reference.md again, from `AdaGRPOConfig`.
"""

import re
from itertools import product
from pathlib import Path

from ada_trl import AdaGRPOConfig
from benchmarks.common import fill


ROOT = Path(__file__).parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "notebooks" / "README.md",
]


def expand(text: str) -> list[str]:
    """`a{b,c}d` as bash reads it: `abd`, `acd`."""
    parts = [part.split(",") if i % 2 else [part] for i, part in enumerate(re.split(r"\{([^{}]*)\}", text))]
    return ["".join(choice) for choice in product(*parts)]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def command_lines(text: str) -> list[str]:
    """Every line to type in a bash block, comments left out, continued lines joined."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [line for line in lines if line]


def commands(page: Path) -> list[list[str]]:
    """The words of every line to type in a page's bash blocks."""
    return [line.split() for line in command_lines("\n".join(blocks(page, "bash")))]


def quick_start_diff() -> tuple[str, str]:
    """The lines before and after the diff of the README, which are a part of the quick start."""
    (diff,) = blocks(README, "diff")
    lines = diff.splitlines()
    return tuple("".join(line[1:] + "\n" for line in lines if line[:1] != left_out) for left_out in "+-")


def quick_start_before() -> str:
    """The GRPO script that the diff of the README turns into the quick start."""
    before, after = quick_start_diff()
    script = (ROOT / "examples" / "quick_start.py").read_text(encoding="utf-8")
    assert script.count(after) == 1, "The diff of the README is not one part of examples/quick_start.py."
    return script.replace(after, before)


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented_metrics() -> list[str]:
    """Return the `ada/` metrics in the lists of docs/reference.md; `<k>` and `<p>` stand for numbers."""
    section = (DOCS / "reference.md").read_text(encoding="utf-8").split("\n## Metrics\n")[1].split("\n## ")[0]
    items = re.findall(r"^- (.*?):", section, flags=re.M | re.S)
    return [name for item in items for name in code(item) if name.startswith("ada/")]


def server_metrics() -> set[str]:
    """The metrics of docs/reference.md that runs with a vLLM server log."""
    names = documented_metrics()
    others = {"ada/time/idle", "ada/time/reward_overlapped", "ada/ess_ratio", "ada/staleness"}
    return {name for name in names if name in others or name.startswith("ada/vllm/")}


def generic(names) -> set[str]:
    """Return the names of logged `ada/` metrics as docs/reference.md writes them."""
    names = {re.sub(r"round_\d+$", "round_<k>", name) for name in names if name.startswith("ada/")}
    return {re.sub(r"rollouts_at_\d\.\d+$", "rollouts_at_<p>", name) for name in names}


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(
        r"^#+ (.*)", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M), flags=re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def field_tables() -> str:
    """The table of docs/reference.md: name, default, meaning of every option that `AdaGRPOConfig` adds or changes."""
    rows = []
    for name in AdaGRPOConfig.__annotations__:
        parameter = AdaGRPOConfig.__dataclass_fields__[name]
        meaning = parameter.metadata["help"].replace("|", r"\|")
        rows.append(f"| `{name}` | `{parameter.default!r}` | {meaning} |")
    return "| Option | Default | Meaning |\n|---|---|---|\n" + "\n".join(rows)


if __name__ == "__main__":
    fill("fields", field_tables(), DOCS / "reference.md")
