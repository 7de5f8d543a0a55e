"""Other versions of TRL."""

import pytest
import trl
from trl import GRPOTrainer

from ada_trl.trainer import trl_version

from ..helpers import build


@pytest.fixture
def fresh_check():
    trl_version.check_trl.cache_clear()
    yield
    trl_version.check_trl.cache_clear()


def test_a_newer_trl_with_the_same_signatures_trains_with_one_warning(fresh_check, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    for name in ("first", "second"):
        build(tmp_path / name).train()
    warnings = [record for record in caplog.records if "newer than the newest version" in record.getMessage()]
    assert len(warnings) == 1 and "1.99.0" in warnings[0].getMessage()


def test_a_changed_signature_is_named(fresh_check, monkeypatch, tmp_path):
    def _calculate_rewards(self, inputs, prompts, completions):
        raise AssertionError("not reached")

    monkeypatch.setattr(trl, "__version__", "1.99.0")
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", _calculate_rewards)
    with pytest.raises(RuntimeError, match=r"_calculate_rewards has the parameters .* in TRL 1.99.0, but .* 1.16"):
        build(tmp_path)


def test_a_missing_method_is_named(fresh_check, monkeypatch, tmp_path):
    monkeypatch.delattr(GRPOTrainer, "_tool_call_loop")
    with pytest.raises(RuntimeError, match="_tool_call_loop does not exist"):
        build(tmp_path)
