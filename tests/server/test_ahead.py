"""Generation one step ahead: what is asked when, of which weights, and what is left when a run ends early."""

import asyncio
import json
from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from ada_trl import AdaGRPOTrainer
from ada_trl.pass_rates.store import PASS_RATES_FILE
from ada_trl.trainer.run_summary import summary
from ada_trl.vllm.client import VLLMServerError

from ..helpers import logs_of
from .fake import FakeServer, answer, fingerprint, random_texts
from .helpers import ONE_ROUND, becomes_idle, build, our_threads


SUMS = [f"{a}+{b}=" for a in range(1, 9) for b in range(1, 9)]
ROWS = Dataset.from_dict({"prompt": SUMS})
AHEAD = ONE_ROUND | {"max_staleness": 1, "learning_rate": 0.01}
MODES = {
    "posterior": {"baseline": "posterior", "num_generations": 1, "per_device_train_batch_size": 8},
    "batch": {"baseline": "batch", "num_generations": 2, "per_device_train_batch_size": 8},
    "GRPO": {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": 4},
    "est": {"adaptive_sampling": "est", "num_generations": 4, "max_samples": 8},
    "rounds across steps": {"baseline": "posterior", "adaptive_sampling": "seq-pos", "num_generations": 1, "per_device_train_batch_size": 8},
    "chosen": {"baseline": "posterior", "prompt_oversampling": 2, "num_generations": 1, "per_device_train_batch_size": 8},
    "two iterations": {"baseline": "posterior", "num_generations": 1, "num_iterations": 2, "per_device_train_batch_size": 8},
}  # fmt: skip


async def half(call):
    return answer(call, random_texts(call, 0.5))


class Witness(AdaGRPOTrainer):
    """By generation: the requests that the server had got when it was trained on, and the weights that were trained."""

    def _generate_and_score_completions(self, inputs):
        weights = fingerprint(self.model.parameters())
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            assert len(output["advantages"]) == self.args.generation_batch_size
            self.seen.append((weights, self.asked()))
        return output


def witness(tmp_path, server, steps=4, **options) -> Witness:
    options = AHEAD | {"max_steps": steps, "per_device_train_batch_size": 16} | options
    trainer = build(tmp_path, server, dataset=ROWS, trainer_class=Witness, **options)
    trainer.seen = []

    def asked() -> int:
        trainer.vllm_generation.wait_for_prefetch()
        return len(server.completions)

    trainer.asked = asked
    return trainer


@pytest.mark.parametrize("mode", MODES)
def test_the_next_step_is_asked_for_with_the_newest_weights_before_this_one_is_trained_on(mode, tmp_path):
    options = MODES[mode]
    generations = 4
    with FakeServer(half) as server:
        trainer = witness(tmp_path, server, generations * options.get("num_iterations", 1), **options)
        trainer.train()
    rows = {"posterior": 8, "batch": 4, "GRPO": 4, "est": 4}.get(mode, 8)  # prompts of a step
    assert len(server.completions) == rows * generations, "Nothing was asked that was not trained on."
    assert [asked for _, asked in trainer.seen] == [rows * min(i + 2, generations) for i in range(generations)]
    trained = [weights for weights, _ in trainer.seen]
    assert len(set(trained)) == generations
    sampled = [server.completions[i * rows].weights for i in range(generations)]
    assert sampled == pytest.approx([trained[0], *trained[:-1]], rel=1e-9), "Of the weights before the update."
    for i in range(generations):  # all of a step of the same
        assert {call.weights for call in server.completions[i * rows : (i + 1) * rows]} == {sampled[i]}
    assert "are trained on, while the server generates the next." in summary(trainer.args)
    logs = [step for step in logs_of(trainer) if "ada/staleness" in step]
    iterations = options.get("num_iterations", 1)
    assert [step["ada/staleness"] for step in logs] == [0] + [iterations] * (generations - 1)
    assert all(0 < step["ada/ess_ratio"] <= 1.0001 for step in logs)
    assert our_threads() == []


def test_the_prompts_are_those_of_a_run_without_it_and_what_waits_is_asked_first_after_a_resume(tmp_path):
    def prompts(name, resume=None, **options):
        with FakeServer(half) as server:
            trainer = witness(tmp_path / name, server, **MODES["posterior"] | options)
            trainer.train(resume_from_checkpoint=resume)
        return [call.prompt for call in server.completions]

    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = prompts("whole", **saving)
    assert len(set(whole)) == 32
    state = json.loads((tmp_path / "whole" / "checkpoint-2" / "ada_state.json").read_text())
    assert state["queue"]["stream"]["read"] == 16, "Two steps, and not the one that was asked ahead."
    resumed = prompts("resumed", str(tmp_path / "whole" / "checkpoint-2"), **saving)
    assert [sorted(resumed[i : i + 8]) for i in (0, 8)] == [sorted(whole[i : i + 8]) for i in (16, 24)]


def test_a_checkpoint_in_the_middle_of_a_generation_goes_back_two_steps(tmp_path):
    options = MODES["posterior"] | {"num_iterations": 2, "save_strategy": "steps", "save_steps": 3}
    with FakeServer(half) as server:
        witness(tmp_path, server, 8, **options).train()
    state = json.loads((tmp_path / "checkpoint-3" / "ada_state.json").read_text())
    assert state["queue"]["stream"]["read"] == 8


def test_nothing_is_under_way_while_the_weights_change_for_an_evaluation(tmp_path):
    in_flight = []

    async def slow(call):
        await asyncio.sleep(0.3)
        return await half(call)

    async def look(request, payload):
        in_flight.append(server.in_flight)

    with FakeServer(slow, control=look) as server:
        options = MODES["posterior"] | {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}
        options |= {"per_device_eval_batch_size": 8}
        trainer = build(
            tmp_path, server, dataset=ROWS, eval_dataset=ROWS.select(range(4)), **AHEAD | options | {"max_steps": 3}
        )
        trainer.train()
    assert in_flight and not any(in_flight)
    assert len([logs for logs in trainer.state.log_history if "eval_reward" in logs]) == 3
    assert [logs["ada/staleness"] for logs in logs_of(trainer)] == [0, 1, 1]


def test_an_evaluation_of_the_prefetched_prompts_samples_them_anew(tmp_path):
    """The data set is one prompt: evaluation and next step have the same rows, but not the same weights."""
    requests = []

    class Count(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            requests.append(len(server.completions))

    options = MODES["GRPO"] | {"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"per_device_eval_batch_size": 4, "num_generations_eval": 4, "max_steps": 3}
    with FakeServer(half) as server:
        rows = ROWS.select([0])
        trainer = build(tmp_path, server, dataset=rows, eval_dataset=rows, **AHEAD | options)
        trainer.add_callback(Count())
        trainer.train()
    # A request for each of the steps 1 and 2, then for an evaluation, for step 3, and for two more evaluations.
    assert requests == [3, 5, 6]
    weights = [call.weights for call in server.completions]
    assert weights[0] == weights[1] and weights[2] == weights[3] and len(set(weights)) == 4


@pytest.mark.parametrize("mode", ["posterior", "chosen"])
@pytest.mark.parametrize("failure", ["requests", "pass rates"])
def test_prompts_of_a_step_that_could_not_be_prefetched_are_the_next_ones_again(failure, mode, tmp_path, monkeypatch):
    with FakeServer(half) as server:
        trainer = witness(tmp_path, server, **MODES[mode])
        owner, name = {
            "requests": (trainer.vllm_generation, "prefetch"),
            "pass rates": (trainer.pass_rates, "start_step"),
        }[failure]
        call, calls = getattr(owner, name), []

        def fail_at_the_third_step(*args):
            calls.append(args)
            if len(calls) == (2 if name == "prefetch" else 3):
                raise VLLMServerError("no route to host")
            call(*args)

        monkeypatch.setattr(owner, name, fail_at_the_third_step)
        with pytest.raises(VLLMServerError, match="no route to host"):
            trainer.train()
        queue = trainer.prompt_source.queue
        state = queue.state_dict()
        assert trainer._prefetched is None and our_threads() == [] and len(server.completions) == 16
        sampled = {call.prompt for call in server.completions}
        trainer.train()
    taken, read = state["stream"]["taken"], state["stream"]["read"]
    assert taken + len(state["stream"]["front"]) == read
    if mode == "posterior":
        assert taken == 16 and read == 24, "Two steps, and the one that waits."
        waiting = {SUMS[position] for position in state["stream"]["front"]}
        assert not waiting & sampled and waiting == {call.prompt for call in server.completions[16:24]}


@pytest.mark.parametrize("mode", ["posterior", "GRPO", "est"])
def test_an_override_of_generate_single_turn_is_used_in_modes_with_one_round(mode, tmp_path):
    class Shortening(Witness):
        def _generate_single_turn(self, *args, **kwargs):
            completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
            return [ids[:1] for ids in completion_ids], [values[:1] for values in logprobs]

    with FakeServer(half) as server:
        options = AHEAD | MODES[mode] | {"max_staleness": 0, "max_steps": 2}
        trainer = build(tmp_path, server, dataset=ROWS, trainer_class=Shortening, **options)
        trainer.seen, trainer.asked = [], lambda: 0
        trainer.train()
    assert [logs["completions/max_length"] for logs in logs_of(trainer)] == [1, 1]


class Stop(TrainerCallback):
    def __init__(self, how):
        self.how = how

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            if isinstance(self.how, BaseException):
                raise self.how
            control.should_training_stop = True


@pytest.mark.parametrize("how", [KeyboardInterrupt(), SystemExit(143), ZeroDivisionError("my bug"), "early"], ids=str)
def test_however_it_ends_nothing_is_left_and_nothing_is_skipped(how, tmp_path):
    async def slow(call):
        await asyncio.sleep(5 if call.number >= 16 else 0)  # those of the third step are under way when it ends
        return await half(call)

    with FakeServer(slow) as server:
        trainer = witness(tmp_path, server, **MODES["posterior"])
        trainer.add_callback(Stop(how))
        if isinstance(how, BaseException):
            with pytest.raises(type(how)):
                trainer.train()
        else:
            trainer.train()
        assert becomes_idle(server)
    assert our_threads() == [] and trainer._prefetched is None
    assert not (tmp_path / "vllm_weight_sync").exists()
    waiting = [candidate.position for slot in trainer.prompt_source.queue.next_slots() for candidate in slot]
    asked = {call.prompt for call in server.completions[:16]}
    assert len(waiting) == 8 and not {SUMS[position] for position in waiting} & asked
    assert {call.prompt for call in server.completions[16:]} <= {SUMS[position] for position in waiting}


def test_a_server_that_is_restarted_meanwhile_is_one_clear_error(tmp_path):
    with FakeServer(half) as server:
        trainer = witness(tmp_path, server, **MODES["posterior"])
        steps = trainer.training_step

        def restart(*args):
            if trainer.state.global_step == 1:
                server.restart("second")
            return steps(*args)

        trainer.training_step = restart
        with pytest.raises(VLLMServerError, match="it was restarted during the step") as caught:
            trainer.train()
    assert server.url in str(caught.value) and our_threads() == []


def test_a_request_that_fails_stops_the_step_that_needs_it(tmp_path):
    async def failing(call):
        if call.number == 20:
            await asyncio.sleep(60)
        return await half(call)

    with FakeServer(failing) as server:
        trainer = witness(tmp_path, server, **MODES["posterior"] | {"vllm_request_timeout": 2})
        with pytest.raises(VLLMServerError, match="rollouts are missing"):
            trainer.train()
        assert becomes_idle(server)
    assert trainer.state.global_step == 2 and our_threads() == []


def test_the_update_is_that_of_the_corrected_ratios(tmp_path):
    """The server tells the log-probabilities of its weights; what the trainer makes of them has another policy's, but for the first."""
    with FakeServer(half, truthful=True) as server:
        trainer = witness(tmp_path, server, **MODES["posterior"] | {"learning_rate": 0.05})
        trainer.train()
    logs = logs_of(trainer)
    assert logs[0]["ada/ess_ratio"] == pytest.approx(1, abs=1e-4)
    assert all(step["ada/ess_ratio"] < 0.9999 for step in logs[1:])
    assert torch.isfinite(torch.tensor([step["loss"] for step in logs])).all()


@pytest.mark.parametrize("mode", ["est", "chosen", "posterior"])
def test_what_was_drawn_is_remembered_of_the_prompts_that_were_asked(mode, tmp_path):
    """And not of those that are asked ahead in the meantime."""
    with FakeServer(half) as server:
        witness(tmp_path, server, **MODES[mode] | {"save_strategy": "steps", "save_steps": 4}).train()
    asked = Counter()
    for call in server.completions:
        asked[call.prompt] += call.n
    record = pq.read_table(tmp_path / "checkpoint-4" / PASS_RATES_FILE).to_pylist()
    assert {row["prompt"]: row["draws"] for row in record} == asked


@pytest.mark.parametrize("scale", ["none", "batch"])  # the second has a state without a queue
def test_a_checkpoint_of_a_run_that_took_its_prompts_from_the_loader_is_said_to_start_the_data_anew(
    scale, tmp_path, caplog
):
    options = MODES["batch"] | {"save_strategy": "steps", "save_steps": 2, "scale_rewards": scale}
    with FakeServer(half) as server:
        witness(tmp_path / "without", server, **options | {"max_staleness": 0}).train()
        caplog.clear()
        witness(tmp_path / "ahead", server, **options).train(str(tmp_path / "without" / "checkpoint-2"))
    assert sum("from the start of the data set" in record.message for record in caplog.records) == 1


def test_the_share_of_effective_samples_is_that_of_all_rows(tmp_path, monkeypatch):
    rows = []

    def share(output, accelerator):
        rows.extend(output["completion_mask"].sum(dim=1).tolist())
        return 1.0

    def nothing(completions, **kwargs):
        return [0.0] * len(completions)

    monkeypatch.setattr("ada_trl.trainer.ada_grpo_trainer.ess_ratio", share)
    with FakeServer(half) as server:
        options = MODES["GRPO"] | {"zero_variance_groups": "mask", "reward_funcs": nothing}
        witness(tmp_path, server, **options).train()
    assert len(rows) == 4 * 16 and all(rows), "Also of those that are masked."
