"""Markdown tables."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    first, *others = ("| " + " | ".join(line) + " |" for line in [header, *rows])
    return "\n".join([first, "|" + "---|" * len(header), *others])
