"""Reward functions: what they return, and what they change."""

import functools
import math

import numpy as np
import pytest
import torch
from datasets import Dataset

from ..helpers import MODES, PROMPTS, build, even_reward, length_reward, logs_of, weights_of
from .scripts import GUARDS, NO_END, RUNNING, Script, cases, check_script, disturb, everywhere


def returning(convert):
    def reward(completions, **kwargs):
        return convert(even_reward(completions))

    return reward


def changing(change):
    def reward(completions, **kwargs):
        rewards = even_reward(completions)
        change(kwargs | {"completions": completions})
        return rewards

    return reward


async def asynchronous(completions, **kwargs):
    return even_reward(completions)


class Instance:
    def __call__(self, completions, **kwargs):
        return even_reward(completions)


def generator(completions, **kwargs):
    yield from even_reward(completions)


def scaled(completions, scale, **kwargs):
    return [scale * reward for reward in even_reward(completions)]


def enter_inference_mode(kwargs):
    GUARDS.append(torch.inference_mode())
    GUARDS[-1].__enter__()


def disturb_and_fail(kwargs):
    disturb()
    torch.set_default_device("meta")
    raise ZeroDivisionError("my bug")


def fail_in_the_second_step(kwargs):
    if kwargs["trainer_state"].global_step:
        raise ZeroDivisionError("my bug")


def evaluate(kwargs):
    if RUNNING and RUNNING[0].model.training:
        assert "eval_reward" in RUNNING[0].evaluate()


def modify_everything(prompts, completions, completion_ids, tags, **kwargs):
    values = even_reward(completions)
    for ids, tag in zip(completion_ids, tags, strict=True):
        assert tag == {"names": ["a"]}, "Another rollout has changed it."
        ids.clear()
        tag["names"].append("b")
    for column in (prompts, completions, completion_ids):
        column[:] = [None] * len(column)
    return values


ITERABLES = [
    lambda rewards: [int(reward) for reward in rewards],
    lambda rewards: [np.float64(reward) for reward in rewards],
    lambda rewards: tuple(torch.tensor(reward) for reward in rewards),
    lambda rewards: torch.tensor(rewards, dtype=torch.bfloat16, requires_grad=True),
    np.array,
]


def one_mean_of_all_functions(run):
    logs = run.trainer.state.log_history[0]
    means = {value for name, value in logs.items() if name.startswith("rewards/") and name.endswith("/mean")}
    assert len(run.trainer.reward_func_names) == 4 + len(ITERABLES) and len(means) == 1 and 0 < means.pop() <= 1


def no_advantages(run):
    assert not any(batch["advantages"].any() for batch in run.batches)


def no_tokens(run):
    assert not any(batch["completion_mask"].any() for batch in run.batches)
    logs = run.trainer.state.log_history[0]
    assert logs["ada/frac_zero_advantage_groups"] == 1 and not logs.get("ada/frac_recovered_groups")


WITHOUT_GRPO = [mode for mode in MODES if mode != "uniform"]  # whose sums of these overflow
EVALUATED = {"eval_dataset": Dataset.from_dict({"prompt": ["9+9="] * 2}), "per_device_eval_batch_size": 4}
REWARDS = {
    "too few": Script(returning(lambda rewards: rewards[1:]), rejected=everywhere(".")),
    "all unscored": Script(returning(lambda rewards: [None] * len(rewards)), check=no_advantages),
    "NaN": Script(returning(lambda rewards: [math.nan if i % 3 else reward for i, reward in enumerate(rewards)])),
    "infinite": Script(returning(lambda rewards: [math.inf if i % 3 else -math.inf for i in range(len(rewards))])),
    "largest floats": Script(returning(lambda r: [3e38 * (-1) ** i for i in range(len(r))]), modes=WITHOUT_GRPO),
    "numpy objects": Script(returning(lambda rewards: np.array([None, *rewards[1:]], dtype=object))),
    "any callable and iterable": Script(
        [generator, asynchronous, Instance(), functools.partial(scaled, scale=1), *map(returning, ITERABLES)],
        options={"success_reward": "generator"},
        check=one_mean_of_all_functions,
    ),
    "all unscored where the weight is not 0": Script(
        [even_reward, returning(lambda rewards: [None] * len(rewards))],
        options={"reward_weights": [0.0, 1.0]},
        check=no_advantages,
    ),
    "unscored where the weight is not 0": Script(  # 0, as in GRPO
        [length_reward, returning(lambda rewards: [reward or None for reward in rewards])],
        options={"reward_weights": [0.0, 1.0]},
        equals=[length_reward, even_reward],
        modes=[mode for mode in MODES if MODES[mode].get("baseline") != "batch"],
    ),
    "unscored where the weight is not 0, in a batch": Script(  # where 0 is compared with the rewards of other prompts
        [length_reward, returning(lambda rewards: [reward or None for reward in rewards])],
        options={"reward_weights": [0.0, 1.0]},
        equals=[returning(lambda rewards: [None] * len(rewards)), returning(lambda r: [x or None for x in r])],
        modes=[mode for mode in MODES if MODES[mode].get("baseline") == "batch"],
    ),
    "modifies its arguments": Script(
        modify_everything,
        lambda: Dataset.from_list(
            [{"prompt": p, "tags": {"names": ["a"]}} for p in PROMPTS * 4]
        ).to_iterable_dataset(),
        equals=even_reward,
    ),
    "evaluation mode": Script(changing(lambda _: RUNNING[0].model.eval()), equals=even_reward),
    "a module's evaluation mode": Script(changing(lambda _: RUNNING[0].model.lm_head.eval()), equals=even_reward),
    "no gradients": Script(changing(lambda _: torch.set_grad_enabled(False)), equals=even_reward),
    "inference mode": Script(changing(enter_inference_mode), equals=even_reward),
    "default dtype": Script(changing(lambda _: torch.set_default_dtype(torch.float64)), equals=even_reward),
    "default device": Script(changing(lambda _: torch.set_default_device("meta")), equals=even_reward),
    "seeds": Script(changing(lambda _: torch.manual_seed(7))),
    "fails": Script(changing(fail_in_the_second_step), rejected=everywhere("^my bug$")),
    "changes state and fails": Script(changing(disturb_and_fail), rejected=everywhere("^my bug$")),
    "evaluates the policy": Script(
        changing(evaluate), options=EVALUATED | {"num_generations_eval": 2}, equals=changing(evaluate)
    ),  # GRPOTrainer goes on in evaluation mode
    "logs": Script(changing(lambda kwargs: kwargs["log_metric"]("mine", 1.0))),
    "logs too little": Script(changing(lambda kwargs: kwargs["log_extra"]("mine", [1]))),
    "all rows masked": Script(
        options={"mask_truncated_completions": True, "generation_kwargs": NO_END}, check=no_tokens
    ),
}


@pytest.mark.parametrize(("name", "mode"), cases(REWARDS))
def test_reward_functions(name, mode, tmp_path):
    check_script(REWARDS[name], mode, tmp_path)


@pytest.mark.parametrize("mode", ["uniform", "seq-balance"])
def test_rollouts_without_a_success_reward_train_on_their_other_rewards(mode, tmp_path):
    """As in GRPO, whose sum leaves out functions that return `None`; so their groups are not masked either."""

    def no_answer(completions, **kwargs):
        return [None] * len(completions)

    runs = []
    for success_reward in ("no_answer", "sum"):
        options = MODES[mode] | {"success_reward": success_reward, "prompt_weighting": "none", "max_steps": 4}
        runs.append(build(tmp_path, [even_reward, no_answer], zero_variance_groups="mask", **options))
        runs[-1].train()
    without, with_sum = ([logs["ada/frac_zero_advantage_groups"] for logs in logs_of(run)] for run in runs)
    assert min(without) < 1
    if mode == "uniform":
        assert torch.equal(*map(weights_of, runs)) and without == with_sum


@pytest.mark.parametrize("mode", ["uniform", "seq-balance"])
def test_a_reward_function_may_assign_others(mode, tmp_path):
    def constant(completions, **kwargs):
        return [0.5] * len(completions)

    def reward(completions, **kwargs):
        trainer.reward_funcs = [constant]
        return even_reward(completions)

    trainer = build(tmp_path, reward, **MODES[mode])
    trainer.train()
    assert trainer.reward_funcs == [constant] and trainer.state.log_history[1]["reward"] == 0.5


@pytest.mark.parametrize("mode", ["batch", "uniform"])
def test_reward_functions_of_the_same_name_share_a_metric_as_in_grpo(mode, tmp_path):
    rewards = [lambda completions, **_: [1.0] * len(completions), lambda completions, **_: [0.0] * len(completions)]
    logs = []
    for functions in (rewards, rewards[::-1]):
        trainer = build(tmp_path, functions, max_steps=1, **MODES[mode])
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert [log["rewards/<lambda>/mean"] for log in logs] == [0.5, 0.5]
