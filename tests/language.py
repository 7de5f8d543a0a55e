"""
Names, log keys, help texts and pages use standard terms, and none of those that were abandoned (see docs/method.md).

`python -m tests.language`, a part of `make lint`, prints the terms that it finds.
"""

import json
import re
import sys
from pathlib import Path

import ada_trl
from ada_trl import AdaGRPOConfig

from .documentation import PAGES, ROOT, documented_metrics


ABANDONED = {  # pattern: standard term
    r"\b(no|without( any)?|lack of) contrast\b": "zero reward variance, zero-variance group",
    r"\bsilent(ly)?\b": "zero-variance group",
    r"\bteach(es)?\b|\btaught\b": "has a non-zero gradient",
    r"\bword that we advise\b|\bwe advise\b|\badvised\b": "recommended",
    r"\brefus(e|es|ed)\b": "raises a ValueError, is not supported",
    r"\bremed(y|ies)\b": "suggested fix",
    r"\banew\b": "again",
    r"\blanes?\b": "slot",
    r"\bways to sample\b|\bways of sampling\b": "sampling strategy",
    r"\blevel with\b|\bbeyond chance\b": "no significant difference from",
    r"\bahead of (GRPO|it|batch|`batch`|Batch|Posterior)\b|\bbehind (GRPO|it|Posterior)\b": "significantly better or worse than",
    r"\bprompts? (that )?(is|are|was|were) asked\b|\basks? (a|the|another|other|as many|four times) ": "prompts are sampled",
    r"\bwhat (is|was) expected\b|\bwhat has not passed\b": "predicted mean reward, unsolved prompts",
    r"\bdifficulty record\b": "per-prompt pass rates",
    r"\bof (its|their|one's|your) own\b": "separate, custom",
    r"\b(unresolved|prompt_candidates|exit_reward|zero_signal|est-joint)\b(?!\.yaml)": "the names of AdaGRPOConfig",
}
ABANDONED_IN_NAMES = r"lane|silent|contrast|teach|unresolved|zero_signal|(^|_)ways?($|_)|asked|beliefs?$|gave_up"


def abandoned_terms(text: str) -> list[str]:
    """Return the abandoned terms in a text, each with the standard term."""
    return [
        f"{found[0]!r} (use: {standard})"
        for pattern, standard in ABANDONED.items()
        for found in re.finditer(pattern, text, flags=re.IGNORECASE)
    ]


def prose(path: Path) -> str:
    """The text of a page or a module, the Markdown cells of a notebook, or the comments of a configuration."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        return "\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    if path.suffix == ".md":
        return re.sub(r"```bibtex.*?```", "", text, flags=re.DOTALL)
    return text if path.suffix == ".py" else "\n".join(re.findall(r"#.*", text))


OTHERS = [
    ("notebooks", "*.ipynb"),
    ("recipes", "*.yaml"),
    *((folder, "*.py") for folder in ("ada_trl", "recipes", "examples")),
]
FILES = [*PAGES, *sorted(path for folder, pattern in OTHERS for path in (ROOT / folder).rglob(pattern))]


def main() -> bool:
    """Returns whether no abandoned term was found."""
    found = [f"{path.relative_to(ROOT)}: {term}" for path in FILES for term in abandoned_terms(prose(path))]
    found += [f"docstring of AdaGRPOConfig: {term}" for term in abandoned_terms(AdaGRPOConfig.__doc__ or "")]
    names = [*ada_trl.__all__, *AdaGRPOConfig.__annotations__]
    names += [path.stem for path in (ROOT / "ada_trl").rglob("*.py")]
    names += [part for name in documented_metrics() for part in name.split("/")]
    found += [f"name: {name}" for name in names if re.search(ABANDONED_IN_NAMES, name)]
    print("\n".join(found) or f"{len(FILES)} files use standard terms.")
    return not found


if __name__ == "__main__":
    sys.exit(not main())
