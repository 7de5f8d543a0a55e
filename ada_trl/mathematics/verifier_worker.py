"""
What a verifier process runs: reads one JSON task per line, writes one JSON answer per line.

It is started by its path, not as a module of the package, so that it imports neither torch nor TRL. `ada_trl.mathematics.verifier`
kills a process that is late and starts another; the alarm here is for a process whose parent has died.
"""

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import lru_cache


MEMORY_LIMIT = 4 * 2**30  # bytes of address space; more is an explosion, and raises MemoryError
GRACE = 10  # seconds after its deadline at which a process whose parent has died ends itself


# What math-verify trips over and means nothing, or has a spelling that it knows.
SPELLINGS = [
    (re.compile(r"(?<=\d)\\[,!](?=\d{3})"), ""),  # 1\,000
    (re.compile(r"\\[bB]igg?[lr]?(?![a-zA-Z])"), ""),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(?:mathrm|text)\{([ie])\}"), r"\1"),  # the imaginary unit is no unit of measurement
    (re.compile(r"\\text\{\s*percent\s*\}"), r"\\%"),
    (re.compile(r"(?:\\[,;:!\s]|[.,;:\s])+(?=\}$|$)"), ""),  # at the end
]
INTEGER = re.compile(r"\\boxed\{(-?[0-9]{1,99})\}")


def normalise(text: str) -> str:
    """Without differences in spelling that never are differences in meaning."""
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def as_math(text: str) -> str:
    r"""A bare answer in `\boxed{}`, so that all of it is parsed and not the first number in it."""
    delimited = "\\boxed" in text or "\\(" in text or "\\[" in text or text.replace("\\$", "").count("$") >= 2
    return text if delimited else f"\\boxed{{{text}}}"


@lru_cache(maxsize=4096)
def parse_answer(text: str) -> list:
    """What math-verify makes of an answer; an empty list if nothing."""
    from math_verify import parse

    return parse(normalise(text), parsing_timeout=None)


def can_parse(reference: str) -> bool:
    """Whether there is anything in `reference` that an answer can equal."""
    reference = as_math(reference)
    return bool(INTEGER.fullmatch(reference) or parse_answer(reference))


def compare(reference: str, answer: str) -> bool:
    """Whether `answer` equals `reference`."""
    reference = as_math(reference)
    if normalise(answer) == normalise(reference):
        return True
    whole, other = INTEGER.fullmatch(reference), INTEGER.fullmatch(answer)
    if whole and other:  # most comparisons, a thousand times faster
        return int(whole[1]) == int(other[1])
    from math_verify import verify

    # An interval is also accepted as the inequality that describes it.
    return verify(parse_answer(reference), parse_answer(answer), timeout_seconds=None, allow_set_relation_comp=True)


VERBS: dict[str, Callable[..., bool]] = {"parse": can_parse, "compare": compare}


def main() -> None:
    """Answer tasks `[seconds, verb, *texts]` until the input ends."""
    logging.disable()  # math-verify warns that it has no time limit of its own
    compare("1/2", r"\boxed{0.5}")  # loads the parser, so that no task pays for it; a missing package is seen
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # parsers print
    os.dup2(nowhere, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    for line in sys.stdin:
        seconds, verb, *texts = json.loads(line)
        if hasattr(signal, "alarm"):
            signal.alarm(int(seconds) + GRACE)
        print(json.dumps(VERBS[verb](*texts)), file=replies, flush=True)
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    del sys.path[0]  # the package's folder: its modules are not meant to be found at the top level
    main()
