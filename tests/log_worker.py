"""Two steps in every mode of `tests.test_logs`, as one of several processes; the main one prints which mode begins."""

import sys

from accelerate import PartialState

from .helpers import build
from .test_logs import MODES


if __name__ == "__main__":
    for mode, options in MODES.items():
        if PartialState(cpu=True).is_main_process:
            print(f"mode {mode}", flush=True)
        build(
            sys.argv[1],
            lambda completions, **_: [float(sum(map(ord, text)) % 3 == 0) for text in completions],
            **{"log_level": "warning", "max_steps": 2, "per_device_train_batch_size": 8} | options,
        ).train()
