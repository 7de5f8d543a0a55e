"""
Threads, event loops, open files and directories: a trainer with a server releases all of them (see `nothing_left`,
too).
"""

import gc
import os
import threading
import time

import pytest
from transformers import PreTrainedModel, TrainerCallback

from ada_trl import AdaGRPOTrainer

from .fake import TOKENIZER, FakeServer
from .helpers import LORA, UNIFORM, build, fails, reject


AHEAD = UNIFORM | {"max_staleness": 1, "num_generations": 4, "max_steps": 2}


def open_resources() -> dict[str, int]:
    gc.collect()
    models = sum(issubclass(type(one), PreTrainedModel) for one in gc.get_objects())
    return {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "models": models}


class Interrupt(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise KeyboardInterrupt


def train_interrupt_and_train_again(tmp_path, server):
    trainer = build(tmp_path, server, **AHEAD)
    trainer.add_callback(Interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Interrupt)
    trainer.train()


class Failing(AdaGRPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        raise ValueError("my bug")


def fail_in_the_construction(tmp_path, server):
    with pytest.raises(ValueError, match="my bug"):
        build(tmp_path, server, trainer_class=Failing)


def fail_in_a_request(tmp_path, server):
    server.behave, behave = reject, server.behave
    with fails("400"):
        build(tmp_path, server, **LORA).train()
    server.behave = behave


def generate_outside_of_a_training(tmp_path, server):
    """The thread ends with the trainer."""
    build(tmp_path, server).vllm_generation.generate([TOKENIZER("1+2=")["input_ids"]] * 2, None, 2)


USES = {
    "train": lambda *where: build(*where).train(),
    "train with an adapter": lambda *where: build(*where, **LORA).train(),
    "interrupt and train again": train_interrupt_and_train_again,
    "never used": lambda *where: build(*where) and None,
    "failed construction": fail_in_the_construction,
    "failed request": fail_in_a_request,
    "generation outside of a training": generate_outside_of_a_training,
}


@pytest.mark.parametrize("use", USES)
def test_nothing_accumulates(use, tmp_path):
    with FakeServer() as server:
        USES[use](tmp_path, server)  # modules are imported, caches are filled
        before = open_resources()
        for _ in range(5):
            USES[use](tmp_path, server)
        # A thread that is ending closes its files a moment later; what has accumulated stays.
        for _ in range(50):
            after = open_resources()
            if all(after[name] < before[name] + 3 for name in before):
                return
            time.sleep(0.1)
    pytest.fail(f"{before} became {after}.")
