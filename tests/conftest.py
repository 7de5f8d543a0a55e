"""One thread: the models are so small that a second one only waits."""

import os
import tempfile


os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp(prefix="trackio"))  # before TRL imports it
