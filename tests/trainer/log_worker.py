"""Two steps in every mode, as one of several processes; the main one prints which mode begins."""

import sys

from accelerate import PartialState

from ..helpers import build


MODES = {
    "posterior": {"baseline": "posterior"},
    "posterior of groups": {"baseline": "posterior", "num_generations": 2},
    "weighted": {"baseline": "posterior", "prompt_weighting": "inverse_sqrt"},
    "batch": {"baseline": "batch"},
    "retries": {"baseline": "posterior", "adaptive_sampling": "seq-pos", "num_generations": 1},
    "oversampling": {"baseline": "posterior", "prompt_oversampling": 2},
    "seq-balance": {},
    "est": {"adaptive_sampling": "est"},
    "uniform": {"adaptive_sampling": "uniform"},
    "dynamic sampling": {"adaptive_sampling": "uniform", "zero_variance_groups": "resample"},
}


if __name__ == "__main__":
    for mode, options in MODES.items():
        if PartialState(cpu=True).is_main_process:
            print(f"mode {mode}", flush=True)
        build(
            sys.argv[1],
            lambda completions, **_: [float(sum(map(ord, text)) % 3 == 0) for text in completions],
            **{"log_level": "warning", "max_steps": 2, "per_device_train_batch_size": 8} | options,
        ).train()
