"""
Units of work in processes of their own, for the tests of the benchmarks on a GPU.
Without torch, so that they start quickly.
"""

import subprocess
import sys
import time


def square(value: int) -> dict:
    if value == 0:
        raise ValueError("The value is 0.")
    return {"square": value**2}


def hang(file: str) -> dict:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(file, "w") as pids:
        pids.write(str(child.pid))
    time.sleep(600)
    return {}
