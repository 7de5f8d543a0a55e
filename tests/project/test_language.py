"""Names, log keys, help texts and pages use standard terms, and none of those that were abandoned (see docs/method.md)."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import ada_trl
from ada_trl import AdaGRPOConfig

from ..documentation import PAGES, ROOT, documented_metrics


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files(path):
    assert abandoned_terms(prose(path)) == []


def test_help_texts():
    fields = {field.name: field for field in dataclasses.fields(AdaGRPOConfig)}
    texts = [AdaGRPOConfig.__doc__]
    texts += [fields[name].metadata["help"] for name in AdaGRPOConfig.__annotations__]
    assert abandoned_terms("\n".join(texts)) == []


def test_public_names():
    names = [*ada_trl.__all__, *AdaGRPOConfig.__annotations__]
    names += [path.stem for path in (ROOT / "ada_trl").rglob("*.py")]
    names += [part for names in documented_metrics().values() for name in names for part in name.split("/")]
    assert len(names) > 100
    assert [name for name in names if re.search(ABANDONED_IN_NAMES, name)] == []


def test_abandoned_terms_are_found():
    assert len(abandoned_terms("Groups without contrast teach nothing; the option is refused.")) == 3
    assert re.search(ABANDONED_IN_NAMES, "ways") and not re.search(ABANDONED_IN_NAMES, "always")
