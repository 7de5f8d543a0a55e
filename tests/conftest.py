"""One thread: the models are so small that a second one only waits."""

import os


os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
