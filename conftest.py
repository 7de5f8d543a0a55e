"""
One thread: the models are so small that a second one only waits. Ctrl-C as on a terminal, also in the background.
"""

import gc
import os
import signal


os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
# A shell lets its background jobs ignore it, and their children.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """
    Each training ends with a full garbage collection:
    three quarters of its time, if it looks through all that was imported.
    """
    gc.collect()
    gc.freeze()
