"""A run of one step, as one of several processes."""

import sys

from ..helpers import build


if __name__ == "__main__":
    build(sys.argv[1], baseline="batch", max_steps=1, per_device_train_batch_size=8).train()
