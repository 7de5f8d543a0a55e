"""
Long runs, many trainers and interrupted steps in one process: objects, memory, threads and open files do not grow.
"""

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from ada_trl import AdaGRPOTrainer

from ..helpers import MODES, build, even_reward


SOAKED = {"default": {}, **{name: MODES[name] for name in ("batch", "est", "dynamic sampling", "retries")}}
modes = pytest.mark.parametrize("mode", SOAKED)


def dataset():
    return Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(64)]})


def resources():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "objects": len(gc.get_objects()),
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")),
        "megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }


def assert_flat(samples, objects_per_sample):
    """
    Threads and open files are the same, and between the middle and the end objects grow by less than one in each
    sample (a leak of one object per step or trainer is several), whatever there is at the beginning.
    """
    middle, end = samples[len(samples) // 2], samples[-1]
    for name in ("threads", "open files"):
        assert end[name] <= middle[name], f"{name}: {[sample[name] for sample in samples]}"
    number = len(samples) - 1 - len(samples) // 2
    growth = end["objects"] - middle["objects"]
    assert growth < objects_per_sample * number, f"objects: {[sample['objects'] for sample in samples]}"
    assert end["megabytes"] - middle["megabytes"] < 16, f"megabytes: {[sample['megabytes'] for sample in samples]}"


class Sampled(TrainerCallback):
    """Measures after every 20 steps."""

    def __init__(self):
        self.samples = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 20 == 0:
            self.samples.append(resources())


@pytest.mark.slow
@modes
def test_300_steps(mode, tmp_path):
    sampled = Sampled()
    options = {"max_steps": 300, "logging_steps": 5, "learning_rate": 1e-4, "callbacks": [sampled]} | SOAKED[mode]
    build(tmp_path, dataset=dataset(), trainer_class=AdaGRPOTrainer, **options).train()
    assert_flat(sampled.samples, objects_per_sample=10)  # of 20 steps: a leak of one object per step is 20


@pytest.mark.slow
@modes
def test_20_trainers(mode, tmp_path):
    """Built, trained and deleted; every other one is built only."""
    samples, trainers = [], []
    for i in range(20):
        trainer = build(tmp_path / str(i), dataset=dataset(), **SOAKED[mode])
        if i % 2:
            trainer.train()
        trainers.append(weakref.ref(trainer))
        del trainer
        samples.append(resources())
        assert trainers[-1]() is None, "Something keeps the trainer."
    assert_flat(samples, objects_per_sample=10)


@pytest.mark.slow
@modes
def test_20_interrupted_steps(mode, tmp_path):
    """A script catches the error of a reward function, and trains again."""
    failing, samples = [], []

    def reward(completions, **kwargs):
        if failing:
            raise OSError("no route to host")
        return even_reward(completions)

    trainer = build(tmp_path, reward, dataset(), **SOAKED[mode])
    for _ in range(20):
        failing.append(True)
        with pytest.raises(OSError):
            trainer.train()
        failing.clear()
        trainer.train()
        trainer.state.log_history.clear()
        trainer.batches.clear()
        trainer.rollouts.clear()
        samples.append(resources())
    assert_flat(samples, objects_per_sample=10)


def tqdm_threads():
    return [thread for thread in threading.enumerate() if type(thread).__name__ == "TMonitor"]


@pytest.mark.parametrize("mode", ["default", "batch"])
def test_a_training_leaves_no_thread_and_no_open_file(mode, tmp_path):
    """Also no thread of tqdm, with `disable_tqdm`."""
    build(tmp_path / "first", **SOAKED[mode]).train()  # what is opened once in a process
    for thread in tqdm_threads():  # of other tests' bars
        thread.exit()
        thread.tqdm_cls.monitor = None
    before = resources()
    build(tmp_path / "second", **SOAKED[mode]).train()
    after = resources()
    assert (after["threads"], after["open files"]) == (before["threads"], before["open files"])
    assert not tqdm_threads()
