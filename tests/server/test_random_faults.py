"""A hundred trainings, each against a server with a random fault, on one process and on two."""

import random
import re

import pytest

from ada_trl.vllm.errors import LONGEST_ERROR

from .faults import Fault, FaultyServer
from .helpers import UNIFORM, launch


DEADLINE = 1.5
BUSY_MACHINE = 5  # times as long as the run without a fault
FIX = "(?i)check its log|correct vllm_server_base_url|use a dedicated server|restart it with"
AHEAD = 0.35  # share of the runs that generate one step ahead


def script(seed: int, runs: int, processes: int) -> tuple[list[Fault | None], list[dict]]:
    rng, faults, options = random.Random(seed), [None], []
    for number in range(runs + 1):
        sync = "lora" if rng.random() < 0.25 and number else "disk"
        mode = UNIFORM if rng.random() < 0.4 else {}
        if number and rng.random() < AHEAD:
            mode = UNIFORM | {"num_generations": 4}
            mode |= {"baseline": rng.choice(("posterior", "batch", "pool")), "max_staleness": 1, "max_steps": 3}
        common = {"vllm_weight_sync": sync, "per_device_train_batch_size": 16 // processes, "samples_per_round": 4}
        options.append(common | {"max_rounds": 3, "max_steps": 2, "vllm_request_timeout": DEADLINE} | mode)
        if number:
            faults.append(Fault.draw(rng, sync))
    return faults, options


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "runs"), [(1, 65), (2, 40)])
def test_every_row_comes_from_the_right_weights_or_all_ranks_raise_the_same_error(processes, runs, tmp_path):
    faults, options = script(processes, runs, processes)
    with FaultyServer(faults) as server:
        instructions = {"url": server.url, "runs": options, "limit": 240}
        ranks = launch(processes, tmp_path / "runs", instructions, "tests.server.fault_worker", seconds=850)
    assert all(len(outcomes) == runs + 1 for outcomes in ranks)
    normal = max(outcomes[0]["seconds"] for outcomes in ranks)
    assert all(outcomes[0]["error"] is None and outcomes[0]["rows"] for outcomes in ranks)
    wrong, errors = [], 0
    for fault, met, *outcomes in zip(faults, server.met, *ranks, strict=True):
        problems = list(check(fault, outcomes, server, met, normal))
        wrong += [(fault, problem) for problem in problems]
        errors += outcomes[0]["error"] is not None
    assert not wrong, "\n".join(map(str, wrong))
    assert server.left == []
    assert 0.2 * runs < errors < 0.9 * runs and sum(met is not None for met in server.met) > 0.6 * runs


def check(fault: Fault | None, outcomes: list[dict], server: FaultyServer, met: float | None, normal: float):
    errors = [outcome["error"] for outcome in outcomes]
    if any(errors) and not all(errors):
        yield f"one-sided: {errors}"
    for error in filter(None, errors):
        if server.url not in error or not re.search(FIX, error):
            yield f"no address or fix: {error}"
        if len(error.partition(": ")[2]) > LONGEST_ERROR:
            yield f"{len(error)} characters: {error}"
    for outcome in outcomes:
        rows = [(server.completions[number].weights, ours) for number, ours in outcome["rows"]]
        if any(abs(theirs - ours) > 1e-9 * ours for theirs, ours in rows):
            yield f"trained on other weights, error {outcome['error']}"
        # The files of an adapter that cannot be unloaded stay.
        stuck = fault is not None and fault.path == "/v1/unload_lora_adapter" and fault.number > 2
        if outcome["left"] and not stuck:
            yield f"left behind: {outcome['left']}"
        if met is not None and outcome["ended"] - met > DEADLINE + 5 + BUSY_MACHINE * normal:
            yield f"{outcome['ended'] - met:.1f} seconds, {normal:.1f} without a fault"
