"""Threads of torch: one where the model is so small that a second one only waits."""

import pytest
import torch
from torch import nn

from ada_trl.utils.threads import SMALL_MODEL, bounded_threads


@pytest.fixture(autouse=True)
def two_threads():
    given = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(given)


def test_small_models_have_one_thread_also_after_an_error():
    with pytest.raises(KeyboardInterrupt), bounded_threads(nn.Linear(2, 2)):
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("model", [nn.Embedding(SMALL_MODEL // 100, 101), nn.Linear(2, 2, device="meta")])
def test_other_models_keep_all_threads(model):
    with bounded_threads(model):
        assert torch.get_num_threads() == 2
