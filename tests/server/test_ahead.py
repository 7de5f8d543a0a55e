"""
Generation one step ahead: when rollouts are requested, from which weights, and what is left when a run ends early.
"""

import asyncio
import json
from concurrent.futures import wait

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from ada_trl import AdaGRPOTrainer
from ada_trl.pass_rates.prompt_id import prompt_key
from ada_trl.pass_rates.store import PASS_RATES_FILE
from ada_trl.vllm.errors import VLLMServerError

from ..helpers import logs_of
from .fake import RIGHT, FakeServer, answer, fingerprint, random_texts
from .helpers import ONE_ROUND, becomes_idle, build, fails


SUMS = [f"{a}+{b}=" for a in range(1, 9) for b in range(1, 9)]
ROWS = Dataset.from_dict({"prompt": SUMS})
AHEAD = ONE_ROUND | {"max_staleness": 1, "learning_rate": 0.01}
ONE_COMPLETION = {"baseline": "batch", "num_generations": 1, "per_device_train_batch_size": 8}
MODES = {
    "one completion": ONE_COMPLETION | {"adaptive_sampling": "uniform"},
    "batch": {"baseline": "batch", "num_generations": 2, "per_device_train_batch_size": 8},
    "GRPO": {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": 4},
    "est": {"adaptive_sampling": "est", "num_generations": 4, "max_samples": 8},
    "retries": ONE_COMPLETION | {"retries": 3},
    "two iterations": ONE_COMPLETION | {"adaptive_sampling": "uniform", "num_iterations": 2},
}


async def half(call):
    return answer(call, random_texts(call, 0.5))


async def right(call):
    """No prompt is retried: those of each step are the next ones of the dataset."""
    return answer(call, [RIGHT] * call.n)


class Recorder(AdaGRPOTrainer):
    """By generation: the weights that are trained, and the number of requests that the server has received by then."""

    def _generate_and_score_completions(self, inputs):
        weights = fingerprint(self.model.parameters())
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            assert len(output["advantages"]) == self.args.generation_batch_size
            if (batch := self.vllm_generation.prefetched) is not None:
                wait(batch.futures)
            self.seen.append((weights, len(self.server.completions)))
        return output


def build_ahead(tmp_path, server, steps=4, **options) -> Recorder:
    options = AHEAD | {"max_steps": steps, "per_device_train_batch_size": 16, "dataset": ROWS} | options
    trainer = build(tmp_path, server, trainer_class=Recorder, **options)
    trainer.seen, trainer.server = [], server
    return trainer


@pytest.mark.parametrize("mode", MODES)
def test_the_next_step_is_requested_with_the_newest_weights_before_this_one_is_trained_on(mode, tmp_path):
    options = MODES[mode]
    generations = 4
    with FakeServer(half) as server:
        trainer = build_ahead(tmp_path, server, generations * options.get("num_iterations", 1), **options)
        trainer.train()
    rows = {"batch": 4, "GRPO": 4, "est": 4}.get(mode, 8)  # prompts of a step
    assert len(server.completions) == rows * generations  # no request that is not trained on
    assert [requests for _, requests in trainer.seen] == [rows * min(i + 2, generations) for i in range(generations)]
    trained = [weights for weights, _ in trainer.seen]
    assert len(set(trained)) == generations
    sampled = [server.completions[i * rows].weights for i in range(generations)]
    assert sampled == pytest.approx([trained[0], *trained[:-1]], rel=1e-9)  # weights before the update
    for i in range(generations):
        assert {call.weights for call in server.completions[i * rows : (i + 1) * rows]} == {sampled[i]}
    logs = [step for step in logs_of(trainer) if "ada/staleness" in step]
    iterations = options.get("num_iterations", 1)
    assert [step["ada/staleness"] for step in logs] == [0] + [iterations] * (generations - 1)
    assert all(0 < step["ada/ess_ratio"] <= 1.0001 for step in logs)


def test_a_resumed_run_samples_the_prefetched_prompts_again(tmp_path):
    def prompts(name, resume=None, **options):
        with FakeServer(right) as server:
            trainer = build_ahead(tmp_path / name, server, **MODES["retries"] | options)
            trainer.train(resume_from_checkpoint=resume)
        return [call.prompt for call in server.completions]

    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = prompts("whole", **saving)
    assert len(set(whole)) == 32
    state = json.loads((tmp_path / "whole" / "checkpoint-2" / "ada_state.json").read_text())
    assert state["queue"]["stream"]["read"] == 16  # two steps, without the prefetched one
    resumed = prompts("resumed", str(tmp_path / "whole" / "checkpoint-2"), **saving)
    assert [sorted(resumed[i : i + 8]) for i in (0, 8)] == [sorted(whole[i : i + 8]) for i in (16, 24)]


def test_rewards_receive_what_an_override_of_generate_returns(tmp_path):
    """Rewards are computed before TRL adds these fields to the rows."""
    received = []

    class Extra(Recorder):
        def _generate(self, prompts):
            columns = super()._generate(prompts)
            return *columns[:5], columns[5] | {"bonus": list(range(len(prompts)))}, *columns[6:]

    def reward(completions, bonus=None, **kwargs):
        received.append(bonus)
        return [float(len(text) % 2) for text in completions]

    with FakeServer(half) as server:
        options = AHEAD | MODES["batch"] | {"max_steps": 2}
        trainer = build(tmp_path, server, reward, ROWS, trainer_class=Extra, **options)
        trainer.seen, trainer.server = [], server
        trainer.train()
    assert received == [list(range(8))] * 2


def test_a_checkpoint_inside_a_generation_batch_goes_back_two_steps(tmp_path):
    options = MODES["retries"] | {"num_iterations": 2, "save_strategy": "steps", "save_steps": 3}
    with FakeServer(right) as server:
        build_ahead(tmp_path, server, 8, **options).train()
    state = json.loads((tmp_path / "checkpoint-3" / "ada_state.json").read_text())
    assert state["queue"]["stream"]["read"] == 8


def test_no_request_is_in_flight_while_the_weights_change_for_an_evaluation(tmp_path):
    in_flight = []

    async def slow(call):
        await asyncio.sleep(0.3)
        return await half(call)

    async def record(request, payload):
        in_flight.append(server.in_flight)

    with FakeServer(slow, control=record) as server:
        options = MODES["one completion"] | {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}
        options |= {"per_device_eval_batch_size": 8, "eval_dataset": ROWS.select(range(4))}
        trainer = build_ahead(tmp_path, server, 3, **options)
        trainer.train()
    assert in_flight and not any(in_flight)
    assert len([logs for logs in trainer.state.log_history if "eval_reward" in logs]) == 3
    assert [logs["ada/staleness"] for logs in logs_of(trainer)] == [0, 1, 1]


def test_an_evaluation_of_the_prefetched_prompts_samples_them_again(tmp_path):
    """The dataset is one prompt: evaluation and next step have the same rows, but not the same weights."""
    requests = []

    class Count(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            requests.append(len(server.completions))

    options = MODES["GRPO"] | {"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"per_device_eval_batch_size": 4, "num_generations_eval": 4}
    options |= dict.fromkeys(("dataset", "eval_dataset"), ROWS.select([0]))
    with FakeServer(half) as server:
        trainer = build_ahead(tmp_path, server, 3, **options)
        trainer.add_callback(Count())
        trainer.train()
    # A request for each of the steps 1 and 2, then for an evaluation, for step 3, and for two more evaluations.
    assert requests == [3, 5, 6]
    weights = [call.weights for call in server.completions]
    assert weights[0] == weights[1] and weights[2] == weights[3] and len(set(weights)) == 4


def test_prompts_of_a_step_that_could_not_be_prefetched_are_waiting_again(tmp_path, monkeypatch):
    with FakeServer(right) as server:
        trainer = build_ahead(tmp_path, server, **MODES["retries"])
        prefetch, calls = trainer.vllm_generation.prefetch, []

        def fail_at_the_third_step(*args):
            calls.append(args)
            if len(calls) == 2:
                raise VLLMServerError("no route to host")
            prefetch(*args)

        monkeypatch.setattr(trainer.vllm_generation, "prefetch", fail_at_the_third_step)
        with pytest.raises(VLLMServerError, match="no route to host"):
            trainer.train()
        state = trainer.prompt_source.state_dict()["queue"]
        assert trainer._prefetched is None and len(server.completions) == 16
        sampled = {call.prompt for call in server.completions}
        trainer.train()
    taken, read = state["stream"]["taken"], state["stream"]["read"]
    assert taken + len(state["stream"]["front"]) == read
    assert taken == 16 and read == 24, "two steps, and the one that was not sampled"
    waiting = {SUMS[position] for position in state["stream"]["front"]}
    assert not waiting & sampled
    first, of_next_training = ({call.prompt for call in server.completions[i : i + 8]} for i in (0, 16))
    assert of_next_training == first


class Stop(TrainerCallback):
    def __init__(self, how):
        self.how = how

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            if isinstance(self.how, BaseException):
                raise self.how
            control.should_training_stop = True


@pytest.mark.parametrize("how", [KeyboardInterrupt(), SystemExit(143), ZeroDivisionError("my bug"), "early"], ids=str)
def test_a_run_that_ends_early_leaves_nothing_and_skips_no_prompts(how, tmp_path):
    async def slow(call):
        await asyncio.sleep(5 if call.number >= 16 else 0)  # those of the third step are under way when it ends
        return await right(call)

    with FakeServer(slow) as server:
        trainer = build_ahead(tmp_path, server, **MODES["retries"])
        trainer.add_callback(Stop(how))
        if isinstance(how, BaseException):
            with pytest.raises(type(how)):
                trainer.train()
        else:
            trainer.train()
        assert becomes_idle(server)
    assert trainer._prefetched is None
    following = {SUMS[candidate.position] for slot in trainer.prompt_source.next_candidates() for candidate in slot}
    assert len(following) == 8 and not following & {call.prompt for call in server.completions[:16]}
    assert {call.prompt for call in server.completions[16:]} <= following


def test_a_server_that_is_restarted_during_a_prefetch_stops_the_run(tmp_path):
    with FakeServer(half) as server:
        trainer = build_ahead(tmp_path, server, **MODES["one completion"])
        steps = trainer.training_step

        def restart(*args):
            if trainer.state.global_step == 1:
                server.restart("second")
            return steps(*args)

        trainer.training_step = restart
        with fails("it was restarted during the step") as caught:
            trainer.train()
    assert server.url in str(caught.value)


def test_the_effective_sample_size_shows_older_weights(tmp_path):
    """All steps but the first are sampled from the weights before the last update."""
    with FakeServer(half, truthful=True) as server:
        trainer = build_ahead(tmp_path, server, **MODES["one completion"] | {"learning_rate": 0.05})
        trainer.train()
    logs = logs_of(trainer)
    assert logs[0]["ada/ess_ratio"] == pytest.approx(1, abs=1e-4)
    assert all(step["ada/ess_ratio"] < 0.9999 for step in logs[1:])
    assert torch.isfinite(torch.tensor([step["loss"] for step in logs])).all()


def test_rollouts_are_recorded_for_their_own_prompts(tmp_path):
    """And not for those that are prefetched in the meantime."""
    with FakeServer(half) as server:
        build_ahead(tmp_path, server, **MODES["est"] | {"save_strategy": "steps", "save_steps": 4}).train()
    record = pq.read_table(tmp_path / "checkpoint-4" / PASS_RATES_FILE).to_pylist()
    draws = {prompt_key(prompt): number for prompt, number in server.draws.items()}
    assert {row["prompt_id"]: row["rollouts"] for row in record} == draws


def test_the_effective_sample_size_counts_masked_rows(tmp_path, monkeypatch):
    rows = []

    def share(output, accelerator):
        rows.extend(output["completion_mask"].sum(dim=1).tolist())
        return 1.0

    def nothing(completions, **kwargs):
        return [0.0] * len(completions)

    monkeypatch.setattr("ada_trl.trainer.step.ess_ratio", share)
    with FakeServer(half) as server:
        options = MODES["GRPO"] | {"zero_variance_groups": "mask", "reward_funcs": nothing}
        build_ahead(tmp_path, server, **options).train()
    assert len(rows) == 4 * 16 and all(rows)
