"""Objects that are sent to another process, and collectives that a thread leaves out."""

import threading
from types import SimpleNamespace

import pytest
import torch

from ada_trl.utils.distributed import collectives_disabled, exchange, gather_unless_disabled, no_collectives


def test_a_row_that_cannot_be_pickled_is_an_error_with_a_fix(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    accelerator = SimpleNamespace(process_index=0, device=torch.device("cpu"))
    row = {"prompt": "1+2=", "lock": threading.Lock()}
    with pytest.raises(ValueError, match=r"cannot be sent to another process \(.*lock.*Remove live objects"):
        exchange({1: {0: row}}, accelerator)


def test_collectives_are_disabled_for_one_thread_only():
    def collective(tensor):
        return "everyone's"

    gather, inside, outside = gather_unless_disabled(collective), threading.Event(), threading.Event()
    seen = []

    def other():
        inside.wait(10)
        seen.append(gather("mine"))
        with no_collectives():
            seen.append(gather("mine"))
            outside.set()

    thread = threading.Thread(target=other)
    thread.start()
    with no_collectives():
        inside.set()
        assert outside.wait(10)
        with no_collectives():
            assert gather("mine") == "mine"
        assert gather("mine") == "mine"
    thread.join()
    assert seen == ["everyone's", "mine"] and gather("mine") == "everyone's" and not collectives_disabled()
