"""User code that GRPOTrainer accepts: changes of global state, live objects in rows, caught errors, unusual rewards."""

import copy
import functools
import gc
import math
import threading
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from transformers import TrainerCallback, set_seed

from ada_trl.trainer.user_code import TrainingState, check_rewards

from ..conversations import Counting, add
from ..helpers import (
    PROMPTS,
    Recorder,
    build,
    chat_tokenizer,
    even_reward,
    prompt_dataset,
    tiny_chat_model,
    tiny_model,
    tiny_tokenizer,
    tiny_vision_language_model,
    train_with_and_without_resume,
)


QUEUE = {"adaptive_sampling": "uniform", "zero_variance_groups": "resample", "num_generations": 4}
RETRIES = {"adaptive_sampling": "seq-pos", "baseline": "posterior", "num_generations": 1}
MODES = {
    "uniform": {"adaptive_sampling": "uniform", "num_generations": 4},
    "batch": {"baseline": "batch"},
    "est": {"adaptive_sampling": "est-ema", "num_generations": 4},
    "seq-balance": {"num_generations": 4},
    "dynamic sampling": QUEUE,
    "oversampling": {"adaptive_sampling": "uniform", "prompt_oversampling": 2, "num_generations": 4},
    "retries": RETRIES,
}
all_modes = pytest.mark.parametrize("mode", MODES)


# Code of the user that changes global state

CHANGES = {
    "evaluation mode": lambda trainer: trainer.model.eval(),
    "one module in evaluation mode": lambda trainer: trainer.model.get_submodule("lm_head").eval(),
    "no gradients": lambda trainer: torch.set_grad_enabled(False),
    "default dtype": lambda trainer: torch.set_default_dtype(torch.float64),
    "default device": lambda trainer: torch.set_default_device("meta"),
    "inference mode": lambda trainer: trainer.__dict__.setdefault("guards", []).append(inference_mode()),
}


def inference_mode():
    guard = torch.inference_mode()
    guard.__enter__()
    return guard


@pytest.fixture(autouse=True)
def defaults():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)


class Changing:
    """A reward function that changes something and does not restore it."""

    __name__ = "changing"

    def __init__(self, change):
        self.change, self.trainer = change, None

    def __call__(self, completions, **kwargs):
        if self.trainer is not None:
            self.change(self.trainer)
        return even_reward(completions)


@pytest.mark.parametrize("mode", ["uniform", "batch", "seq-balance", "dynamic sampling"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_reward_function_changes_is_restored(change, mode, tmp_path):
    runs = []
    for active in (False, True):
        reward = Changing(CHANGES[change])
        trainer = build(tmp_path, reward, **MODES[mode])
        reward.trainer = trainer if active else None
        trainer.train()
        runs.append(trainer)
    assert runs[1].model.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    expected, actual = ([batch["advantages"].tolist() for batch in run.batches] for run in runs)
    assert expected == actual
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("change", CHANGES)
def test_training_state_is_restored_after_an_error(change):
    class Trainer:
        model = tiny_model().train()

    trainer = Trainer()
    with pytest.raises(ZeroDivisionError), TrainingState(trainer.model).preserved():
        CHANGES[change](trainer)
        1 / 0  # noqa: B018
    assert all(module.training for module in trainer.model.modules())
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.get_default_dtype() is torch.float32 and torch.get_default_device().type == "cpu"


class Disturbing(Counting):
    """An environment whose reset and tool leave everything in another state."""

    model = None

    def reset(self, **row):
        disturb(self.model)
        return super().reset(target=1, **row)


def disturb(model):
    if model is not None:
        model.eval()
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("mode", ["uniform", "batch", "seq-balance"])
def test_what_an_environment_changes_is_restored(mode, tmp_path, monkeypatch):
    tokenizer, seen = chat_tokenizer(), []
    trainer = build_conversation(tmp_path, tokenizer, environment_factory=Disturbing, **MODES[mode])
    monkeypatch.setattr(Disturbing, "model", trainer.model)
    compute_loss = trainer.compute_loss

    def remember(*args, **kwargs):
        seen.append((torch.get_default_dtype(), torch.is_grad_enabled()))
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = remember
    trainer.train()
    assert set(seen) == {(torch.float32, True)}
    assert any("reward" in logs for logs in trainer.state.log_history), "Nothing was logged as an evaluation."


@pytest.mark.parametrize("mode", ["dynamic sampling", "oversampling", "retries"])
@pytest.mark.parametrize("streaming", [False, True])
def test_what_a_transform_changes_is_restored(streaming, mode, tmp_path):
    def transform(rows):
        disturb(getattr(trainer, "model", None))
        return rows

    trainer = None
    dataset = prompt_dataset()
    dataset = dataset.to_iterable_dataset().map(transform) if streaming else dataset.with_transform(transform)
    trainer = build(tmp_path, dataset=dataset, **MODES[mode])
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.model.training
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32


def build_conversation(tmp_path, tokenizer, **options):
    return build_with(
        tmp_path,
        lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))],
        CONVERSATIONS,
        tiny_chat_model(tokenizer),
        tokenizer=tokenizer,
        **options,
    )


def build_with(*args, **options):
    """As `build`, with arguments of the trainer that `build` does not take."""
    names = {"tools", "environment_factory", "optimizers"}
    given = {name: options.pop(name) for name in names & options.keys()}

    class Trainer(Recorder):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | given)

    return build(*args, trainer_class=Trainer, **options)


@pytest.mark.parametrize("mode", ["uniform", "batch", "seq-balance", "dynamic sampling"])
def test_a_reward_function_may_evaluate_the_policy(mode, tmp_path):
    evaluation = Dataset.from_dict({"prompt": ["9+9="] * 2})
    sampled, running = [], []

    def reward(prompts, completions, **kwargs):
        if not running:
            running.append(True)
            assert "eval_reward" in trainer.evaluate()
            running.clear()
            sampled.append(set(prompts))
        return even_reward(completions)

    trainer = build(
        tmp_path, reward, eval_dataset=evaluation, num_generations_eval=2, per_device_eval_batch_size=4, **MODES[mode]
    )
    trainer.train()
    assert sampled and set().union(*sampled) <= set(PROMPTS), "The evaluation's prompts are not part of a step."
    assert len(trainer.batches) == 2 and all(len(batch["advantages"]) == 8 for batch in trainer.batches)


@all_modes
def test_a_reward_function_may_modify_what_it_is_given(mode, tmp_path):
    runs = []
    for modifies in (False, True):

        def reward(prompts, completions, completion_ids, tags, modifies=modifies, **kwargs):
            values = even_reward(completions)
            if modifies:
                for ids, tag in zip(completion_ids, tags, strict=True):
                    assert tag == {"names": ["a"]}
                    ids.clear()
                    tag["names"].append("b")
                for column in (prompts, completions, completion_ids):
                    column[:] = [None] * len(column)
            return values

        rows = [{"prompt": prompt, "tags": {"names": ["a"]}} for prompt in PROMPTS * 4]
        trainer = build(tmp_path, [reward], Dataset.from_list(rows).to_iterable_dataset(), **MODES[mode])
        trainer.train()
        runs.append(trainer)
    for expected, actual in zip(*(run.batches for run in runs), strict=True):
        assert torch.equal(expected["completion_ids"], actual["completion_ids"])
        assert torch.equal(expected["advantages"], actual["advantages"])


def seeding_reward(completions, **kwargs):
    set_seed(7)
    return even_reward(completions)


@pytest.mark.parametrize("mode", ["batch", "seq-balance", "oversampling"])
def test_a_reward_function_may_seed(mode, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **MODES[mode]}
    train_with_and_without_resume(build, tmp_path, seeding_reward, prompt_dataset(), at=2, **options)


# Live objects in rows


LOCK = threading.Lock()


def with_objects(rows):
    empty = {"array": np.zeros(1), "tensor": torch.zeros(1), "set": set(), "queue": deque(), "ordered": OrderedDict()}
    number = len(rows["prompt"])
    shared = {"lock": [LOCK] * number, "nested": [{"locks": [LOCK]}] * number}
    return rows | shared | {"values": [copy.deepcopy(empty) for _ in range(number)]}


@all_modes
def test_containers_in_rows_belong_to_one_rollout_and_other_objects_are_shared(mode, tmp_path):
    def reward(completions, lock, nested, values, **kwargs):
        assert all(one is LOCK for one in lock) and all(one["locks"][0] is LOCK for one in nested)
        for row in values:
            assert not any(row.values())
            row["array"] += 1
            row["tensor"] += 1
            row["set"].add(1)
            row["queue"].append(1)
            row["ordered"]["a"] = 1
        return even_reward(completions)

    trainer = build(tmp_path, reward, prompt_dataset().with_transform(with_objects), **MODES[mode])
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("mode", ["uniform", "batch", "seq-balance"])
def test_a_reward_function_may_assign_others(mode, tmp_path):
    def constant(completions, **kwargs):
        return [0.5] * len(completions)

    def reward(completions, **kwargs):
        trainer.reward_funcs = [constant]
        return even_reward(completions)

    trainer = build(tmp_path, reward, **MODES[mode])
    trainer.train()
    assert trainer.reward_funcs == [constant] and trainer.state.log_history[1]["reward"] == 0.5


@pytest.mark.parametrize("mode", ["seq-balance", "dynamic sampling"])
def test_decoded_images_are_shared_between_rollouts(mode, tmp_path):
    tokenizer = chat_tokenizer()
    model, processor = tiny_vision_language_model(tokenizer)
    images = [Image.new("RGB", (28, 28), color) for color in ("red", "green", "blue", "white")]
    rows = [
        {"prompt": [{"role": "user", "content": prompt}], "image": image}
        for prompt, image in zip(PROMPTS, images, strict=True)
    ]
    held = []

    def reward(completions, **kwargs):
        gc.collect()
        held.append(sum(isinstance(one, Image.Image) for one in gc.get_objects()) - before)
        return [0.0] * len(completions)

    trainer = build(
        tmp_path,
        reward,
        Dataset.from_list(rows),
        model,
        tokenizer=processor,
        **{"pass_rate_estimator": None, "max_rounds": 4, "max_steps": 1} | MODES[mode],
    )
    gc.collect()
    before = sum(isinstance(one, Image.Image) for one in gc.get_objects())
    trainer.train()
    assert len(held) > 1 and max(held) <= held[0] <= 16, f"Images by round: {held}"


# What TRL accepts and then fails with, or ignores


def stream(number):
    return Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(number)]}).to_iterable_dataset()


@pytest.mark.parametrize("mode", [name for name in MODES if name != "uniform"])
def test_a_stream_shorter_than_a_step_is_an_error(mode, tmp_path):
    trainer = build(tmp_path, even_reward, stream(1), **MODES[mode])
    with pytest.raises(ValueError, match=r"needs \d distinct prompts"):
        trainer.train()


@pytest.mark.parametrize("mode", MODES)
def test_a_callback_may_stop_training_on_a_stream_before_the_first_step(mode, tmp_path):
    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            control.should_training_stop = True

    options = {"gradient_accumulation_steps": 2, "callbacks": [Stop()], **MODES[mode]}
    trainer = build(tmp_path, even_reward, stream(64), **options)
    trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_a_stream_may_have_different_columns(mode, tmp_path):
    def rows():
        for i in range(64):
            yield {"prompt": f"{i}+1="} | ({"answer": str(i + 1)} if i % 2 else {"source": "test"})

    def reward(prompts, completions, answer, source, **kwargs):
        for prompt, right, origin in zip(prompts, answer, source, strict=True):
            i = int(prompt.partition("+")[0])
            assert (right, origin) == ((str(i + 1), None) if i % 2 else (None, "test"))
        return even_reward(completions)

    dataset = IterableDataset.from_generator(rows)
    trainer = build(tmp_path, reward, dataset, shuffle_dataset=False, max_steps=3, **MODES[mode])
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_stream_shorter_than_a_step_is_a_warning_in_the_mode_that_equals_grpo(tmp_path, caplog):
    trainer = build(tmp_path, even_reward, stream(1), **MODES["uniform"])
    trainer.train()
    assert trainer.state.global_step == 0 and "No training step can be run" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_return_sequences": 2}, r"generation_kwargs=\{'num_return_sequences': 2\}.*Set num_generations"),
        ({"n": 4}, r"generation_kwargs=\{'n': 4\} is not supported.*Set num_generations"),
        ({"return_dict_in_generate": True}, r"'return_dict_in_generate': True\} is not supported.*Remove the option"),
        ({"stop_strings": ["1"]}, r"'stop_strings': \['1'\]\} is not supported with use_vllm=False.*Use a stop token"),
        ({"stop_strings": []}, r"'stop_strings': \[\]\} is not supported with use_vllm=False"),
        ({"token_healing": True}, r"'token_healing': True\} is not supported with use_vllm=False"),
    ],
)
def test_generation_options_that_fail_later_are_rejected(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, generation_kwargs=options)


def test_an_adapter_that_is_not_trainable_is_rejected(tmp_path):
    get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    with pytest.raises(ValueError, match="0 trainable parameters.*is_trainable=True"):
        build(tmp_path, model=model)


@pytest.mark.parametrize("peft_config", [None, LoraConfig(r=2, target_modules=["q_proj"])])
def test_an_optimizer_of_other_parameters_is_rejected(peft_config, tmp_path):
    model = tiny_model()
    other = torch.optim.SGD((tiny_model() if peft_config is None else model).parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"optimizer has \d+ parameters, but none of the \d+ trainable ones.*Create it"
    ):
        build_with(tmp_path, model=model, peft_config=peft_config, optimizers=(other, None))


CONVERSATIONS = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS * 4]})


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dataset": CONVERSATIONS}, "training"),
        ({"eval_dataset": CONVERSATIONS, "eval_strategy": "steps", "eval_steps": 1}, "evaluation"),
        ({"eval_dataset": {"hard": CONVERSATIONS}, "eval_strategy": "steps", "eval_steps": 1}, "evaluation 'hard'"),
    ],
)
def test_conversations_without_a_chat_template_are_rejected(options, name, tmp_path):
    with pytest.raises(ValueError, match=f"the {name} dataset .*has no chat template .*Set tokenizer.chat_template"):
        build(tmp_path, **options)


def test_tools_for_prompts_that_are_strings_are_rejected(tmp_path):
    tokenizer = chat_tokenizer()
    with pytest.raises(ValueError, match=r"are strings \(the first is '1\+2='\), but tools require conversations"):
        build_with(tmp_path, model=tiny_chat_model(tokenizer), tokenizer=tokenizer, tools=[add])


@pytest.mark.parametrize("reward", [(even_reward, even_reward), [even_reward, None], {"a": even_reward}, 3])
def test_what_is_not_a_reward_function_is_rejected(reward, tmp_path):
    with pytest.raises(ValueError, match=r"reward_funcs \(.*\) must be a function, .*Pass a list"):
        build(tmp_path, reward)


INVALID_REWARDS = [
    *(1.0, "good", None, {"reward": 1.0}, torch.tensor(1.0), {1.0, 0.0}, b"10"),
    *(["1", "0"], [[1.0]], [(1.0, 2)], np.ones((2, 1)), [object()], [10**400], [1j]),
]


@pytest.mark.parametrize("value", INVALID_REWARDS, ids=lambda value: type(value).__name__)
def test_rewards_of_the_wrong_kind_name_the_function(value):
    with pytest.raises(ValueError, match="The reward function 'wrong' returned .*must return one number or None per"):
        check_rewards(value, "wrong")


@pytest.mark.parametrize("mode", ["uniform", "batch", "seq-balance"])
def test_a_wrong_number_of_rewards_is_an_error(mode, tmp_path):
    trainer = build(tmp_path, lambda completions, **kwargs: even_reward(completions)[1:], **MODES[mode])
    with pytest.raises((ValueError, RuntimeError)):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("mode", ["uniform", "batch", "seq-balance"])
@pytest.mark.parametrize("kind", ["function", "async"])
def test_the_rewards_of_every_function_are_checked(mode, kind, tmp_path):
    def wrong(completions, **kwargs):
        return None

    async def wrong_async(completions, **kwargs):
        return None

    function = wrong if kind == "function" else wrong_async
    trainer = build(tmp_path, [even_reward, function], **MODES[mode])
    with pytest.raises(ValueError, match=f"The reward function '{function.__name__}' returned None"):
        trainer.train()
    assert trainer.reward_funcs[1] is function


class Instance:
    def __call__(self, completions, **kwargs):
        return even_reward(completions)


def test_reward_functions_may_be_any_callable_and_return_any_iterable(tmp_path):
    def generator(completions, **kwargs):
        yield from even_reward(completions)

    def array(completions, **kwargs):
        return np.array(even_reward(completions))

    def tensors(completions, **kwargs):
        return tuple(torch.tensor(reward) for reward in even_reward(completions))

    async def asynchronous(completions, **kwargs):
        return even_reward(completions)

    def scaled(completions, scale, **kwargs):
        return [scale * reward for reward in even_reward(completions)]

    functions = [generator, array, tensors, asynchronous, Instance(), functools.partial(scaled, scale=1)]
    functions.append(lambda completions, **_: torch.tensor(even_reward(completions)))
    trainer = build(tmp_path, functions, **MODES["batch"])
    trainer.train()
    logs = trainer.state.log_history[0]
    means = {value for name, value in logs.items() if name.startswith("rewards/") and name.endswith("/mean")}
    assert len(trainer.reward_func_names) == 7 and len(means) == 1 and 0 < means.pop() < 1


@pytest.mark.parametrize("mode", MODES)
def test_rewards_of_weight_zero_alone_do_not_score_a_row(mode, tmp_path):
    def unscored(prompts, **kwargs):
        return [None] * len(prompts)

    trainer = build(tmp_path, [even_reward, unscored], reward_weights=[0.0, 1.0], max_steps=1, **MODES[mode])
    assert all(map(math.isnan, trainer.split_rewards(torch.tensor([[1.0, math.nan]]))[0]))
    trainer.train()
    assert not trainer.batches[0]["advantages"].any()


@pytest.mark.parametrize("mode", ["uniform", "batch", "seq-balance"])
def test_prompts_whose_rows_are_all_masked_have_no_gradient(mode, tmp_path):
    trainer = build(
        tmp_path,
        mask_truncated_completions=True,
        max_steps=1,
        generation_kwargs={"suppress_tokens": [tiny_tokenizer().eos_token_id, tiny_tokenizer().pad_token_id]},
        **MODES[mode],
    )
    trainer.train()
    assert not trainer.batches[0]["completion_mask"].any()
    assert trainer.state.log_history[0]["ada/frac_zero_advantage_groups"] == 1


@pytest.mark.parametrize("mode", ["batch", "seq-balance"])
def test_reward_functions_of_the_same_name_share_a_metric_as_in_grpo(mode, tmp_path):
    rewards = [lambda completions, **_: [1.0] * len(completions), lambda completions, **_: [0.0] * len(completions)]
    logs = []
    for functions in (rewards, rewards[::-1]):
        trainer = build(tmp_path, functions, max_steps=1, **MODES[mode])
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert [log["rewards/<lambda>/mean"] for log in logs] == [0.5, 0.5]


# Errors that a script catches


@pytest.mark.parametrize("mode", ["dynamic sampling", "oversampling", "retries"])
@pytest.mark.parametrize("place", ["reward function", "transform", "generation"])
def test_prompts_of_an_interrupted_step_are_sampled_when_training_goes_on(place, mode, tmp_path, monkeypatch):
    failing, sampled = [], []

    def fail_once(where):
        if failing == [where]:
            failing.clear()
            raise OSError("no route to host")

    def reward(prompts, completions, **kwargs):
        fail_once("reward function")
        sampled.append(set(prompts))
        return [float(i % 2) for i in range(len(prompts))]

    def transform(rows):
        fail_once("transform")
        return rows

    class Failing(Recorder):
        def _generate_single_turn(self, *args, **kwargs):
            fail_once("generation")
            return super()._generate_single_turn(*args, **kwargs)

    dataset = Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(64)]}).with_transform(transform)
    trainer = build(tmp_path, reward, dataset, trainer_class=Failing, shuffle_dataset=False, **MODES[mode])
    trainer.train()
    queue, before = trainer.prompt_source.queue, trainer.prompt_source.queue.state_dict()
    failing.append(place)
    with pytest.raises(OSError):
        trainer.train()
    after = queue.state_dict()
    assert after["stream"]["taken"] == before["stream"]["taken"]
    for name in ("retry_queue", "reserved", "skips"):
        assert after[name] == before[name]
    expected = {dataset[p]["prompt"] for p in before["reserved"] + after["stream"]["front"]}
    expected |= {dataset[retry["position"]]["prompt"] for retry in before["retry_queue"]}
    sampled.clear()
    trainer.train()
    assert sampled[0] <= expected


@pytest.mark.parametrize("mode", ["batch", "seq-balance", "oversampling"])
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([3] * 16, "The prompt 3 cannot be tokenized: it must be a string or a list of messages"),
        ([[5, 6]] * 16, r"The prompt \[5, 6\] cannot be tokenized"),
        ([None] * 16, "The prompt None cannot be tokenized"),
        ([[]] * 16, r"The prompt \[\] cannot be tokenized"),
        (
            [[{"from": "human", "value": "1+2="}]] * 16,
            "'human'.* cannot be tokenized: .*messages with 'role' and 'content'",
        ),
        ([""] * 16, "The first prompt of the batch \\(''\\) has 0 tokens"),
        (["", *["1+1="] * 3] * 4, "has 0 tokens"),
    ],
)
def test_prompts_that_cannot_be_tokenized_are_named(prompts, message, mode, tmp_path):
    dataset = Dataset.from_dict({"prompt": prompts})
    trainer = build(tmp_path, dataset=dataset, shuffle_dataset=False, **MODES[mode])
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_strings_and_conversations_in_one_batch_are_rejected(tmp_path):
    def mix(rows):
        return {"prompt": [[{"role": "user", "content": p}] if p[0] == "7" else p for p in rows["prompt"]]}

    trainer = build(tmp_path, dataset=prompt_dataset().with_transform(mix), **MODES["batch"])
    with pytest.raises(ValueError, match="some are strings and some are lists of messages.*Convert the strings"):
        trainer.train()


@all_modes
def test_a_data_set_that_replaces_the_first_one_is_trained_on(mode, tmp_path):
    seen = set()

    def reward(prompts, completions, **kwargs):
        seen.update(prompts)
        return even_reward(completions)

    trainer = build(tmp_path, reward, max_steps=1, remove_unused_columns=True, **MODES[mode])
    trainer.train()
    assert seen <= set(PROMPTS)
    seen.clear()
    trainer.train_dataset = Dataset.from_dict({"prompt": [f"{i}+9=" for i in range(8)]})
    trainer.train()
    assert seen and seen <= set(trainer.train_dataset["prompt"])
    seen.clear()
    trainer.train_dataset.set_transform(lambda rows: {"prompt": [prompt[::-1] for prompt in rows["prompt"]]})
    trainer.train()
    assert seen and all(prompt.startswith("=9+") for prompt in seen)
    trainer.train_dataset = trainer.train_dataset.select([])
    if mode != "uniform":
        with pytest.raises(ValueError, match="has only 0"):
            trainer.train()
