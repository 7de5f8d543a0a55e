"""Warnings are printed on separate lines above the progress bar."""

import logging
import subprocess
import sys

from ada_trl.utils.logging import get_logger


SCRIPT = """
import sys
from tqdm import tqdm
from ada_trl.utils.logging import get_logger
bar = tqdm(total=3, file=sys.stderr)
for _ in range(3):
    bar.update()
    get_logger("ada_trl.x").warning("Look at %s.", "this")
    get_logger("ada_trl.x").warning_once("Only once.")
"""


def test_warnings_do_not_break_the_progress_bar():
    error = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True).stderr
    lines = [part for line in error.split("\n") for part in line.split("\r")]
    assert lines.count("Look at this.") == 3 and "RANK" not in error
    assert lines.count("Only once.") == 3 or lines.count("Only once.") == 1


def test_other_handlers_receive_warnings_once(caplog, capsys):
    handler = logging.Handler()
    seen = []
    handler.emit = seen.append
    root = logging.getLogger()
    kept, root.handlers = root.handlers, [handler]
    try:
        get_logger("ada_trl.y").warning("Once.")
    finally:
        root.handlers = kept
    assert [record.getMessage() for record in seen] == ["Once."] and capsys.readouterr().err == ""
