"""
Verifier process: reads one JSON task per line and writes one JSON answer per line.

It is started by its path, not as a module of the package, so that it imports neither torch nor TRL. It exits when a
task takes too long; `verifier.py` then starts another process.
"""

import faulthandler
import json
import logging
import os
import re
import signal
import sys
from functools import lru_cache


MEMORY_LIMIT = 4 * 2**30  # bytes of address space; a task that needs more raises MemoryError

# Spellings that math-verify misreads, and their replacements.
SPELLINGS = [
    (re.compile(r"(?<=\d)\\[,!](?=\d{3})"), ""),  # 1\,000
    (re.compile(r"\\[bB]igg?[lr]?(?![a-zA-Z])"), ""),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(?:mathrm|text)\{([ie])\}"), r"\1"),  # the imaginary unit, not a unit of measurement
    (re.compile(r"\\text\{\s*percent\s*\}"), r"\\%"),
    (re.compile(r"(?:\\[,;:!\s]|[.,;:\s])+(?=\}$|$)"), ""),  # at the end
]
INTEGER = re.compile(r"\\boxed\{(-?[0-9]{1,99})\}")


def normalize(text: str) -> str:
    """Remove differences in spelling that never change the meaning."""
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def as_math(text: str) -> str:
    r"""Put a bare answer into `\boxed{}`, so that all of it is parsed and not the first number in it."""
    delimited = "\\boxed" in text or "\\(" in text or "\\[" in text or text.replace("\\$", "").count("$") >= 2
    return text if delimited else f"\\boxed{{{text}}}"


@lru_cache(maxsize=4096)
def parse_answer(text: str) -> list:
    """Parse an answer by math-verify; an empty list if it is not recognized."""
    from math_verify import parse

    return parse(normalize(text), parsing_timeout=None)


def can_parse(reference: str) -> bool:
    """Check whether `reference` contains anything that an answer can equal."""
    reference = as_math(reference)
    return bool(INTEGER.fullmatch(reference) or parse_answer(reference))


def compare(reference: str, answer: str) -> bool:
    """Check whether `answer` equals `reference`."""
    reference = as_math(reference)
    if normalize(answer) == normalize(reference):
        return True
    whole, other = INTEGER.fullmatch(reference), INTEGER.fullmatch(answer)
    if whole and other:  # most comparisons, a thousand times faster
        return int(whole[1]) == int(other[1])
    from math_verify import verify

    # An interval is also accepted as the inequality that describes it.
    return verify(parse_answer(reference), parse_answer(answer), timeout_seconds=None, allow_set_relation_comp=True)


def main() -> None:
    """Answer tasks `[seconds, verb, *texts]` until the input ends."""
    logging.disable()  # math-verify warns that it has no time limit in this process
    compare("1/2", r"\boxed{0.5}")  # loads the parser before the first task; fails here if the package is missing
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # parsers print
    os.dup2(nowhere, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    for line in sys.stdin:
        seconds, verb, *texts = json.loads(line)
        # A watchdog thread in C: it ends the process even if the parser loops in C code and never releases the GIL,
        # and whether or not the parent still exists.
        faulthandler.dump_traceback_later(seconds, exit=True)
        reply = can_parse(*texts) if verb == "parse" else compare(*texts)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose `select.py` and `statistics.py` would hide the standard library's
    main()
