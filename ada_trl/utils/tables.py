"""Tables of the reports."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, align_right: bool = False) -> str:
    """A Markdown table; with `align_right`, the columns after the first are flushed right, as suits numbers."""
    rule = ["---", *["---:" if align_right else "---"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *rows])
