"""The benchmark with a simulated GPU: both clients receive the same rollouts in every mode."""

import pytest

from benchmarks.speed import in_flight
from benchmarks.speed.simulated_gpu import running


@pytest.fixture(scope="module")
def url():
    with running(a=0, c=0) as url:
        yield url


@pytest.mark.parametrize("mode", in_flight.MODES)
def test_both_clients_sample_as_many_rollouts(mode, url, monkeypatch):
    monkeypatch.setattr(in_flight, "TRAINING_SECONDS", 0)
    clients = [in_flight.TRL(url, 20), in_flight.Ours(url, 20)]
    trl, ours = (
        in_flight.measured(url, lambda client=client: in_flight.MODES[mode](client, 12))[2] for client in clients
    )
    clients[1].vllm.close()
    assert trl == ours >= 12


def test_rounds_are_compared_at_equal_rollouts_of_both_clients(monkeypatch, capsys):
    monkeypatch.setattr(in_flight, "MAX_TOKENS", 5)
    in_flight.compare_rounds([6], repeats=1)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    clients = ("TRL", "TRL, filled rounds", "ours")
    assert [row[:3] for row in rows] == [["| " + k, "6", c] for k in ("uniform", "hard") for c in clients]
    for of_trl, filled, ours in (rows[:3], rows[3:]):
        assert of_trl[3:6] == filled[3:6] == ours[3:6]
        assert float(ours[5]) <= 1
