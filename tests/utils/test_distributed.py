"""Objects that are sent to another process."""

import threading
from types import SimpleNamespace

import pytest
import torch

from ada_trl.utils.distributed import exchange


def test_a_row_that_cannot_be_pickled_is_an_error_with_a_fix(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    accelerator = SimpleNamespace(process_index=0, device=torch.device("cpu"))
    row = {"prompt": "1+2=", "lock": threading.Lock()}
    with pytest.raises(ValueError, match=r"cannot be sent to another process \(.*lock.*Remove live objects"):
        exchange({1: {0: row}}, accelerator)
