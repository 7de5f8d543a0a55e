"""Markdown tables."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, align_right: bool = False) -> str:
    """Format a Markdown table; with `align_right`, the columns after the first are right-aligned, as for numbers."""
    rule = ["---", *["---:" if align_right else "---"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *rows])
