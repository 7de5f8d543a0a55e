"""
Text on a console whose encoding does not have every character, such as cp1252 on Windows: a question mark, not an
error.
"""

import io
import sys


def show(text: str) -> None:
    """
    Print a line at once. Unlike `print`, it never fails because of a character that standard output cannot encode.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a stream of a notebook or of a test may not have one
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)


def replace_unknown_characters() -> None:
    """
    Let whatever this process prints be as tolerant as [`show`]. For programs, not for a library in the user's process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
