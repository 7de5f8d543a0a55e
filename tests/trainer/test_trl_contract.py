"""
Everything in TRL that the package relies on.
A new release of TRL that changes it should fail here first, with an explanation.

Tried and not supported: TRL 1.15, whose log-probability kernel needs Triton, so that nothing trains on a CPU; TRL
1.14, which has no `eos_token_ids`.
"""

import ast
import inspect
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import base_trainer, grpo_trainer
from trl.trainer.utils import nanstd

import ada_trl
from ada_trl import AdaGRPOTrainer
from ada_trl.trainer.interception import _EMPTY_COLUMNS
from ada_trl.trainer.trl_private import rank_local_collectives, vllm_generation_class
from ada_trl.trainer.trl_version import SIGNATURES
from ada_trl.vllm.client import completion_request

from ..conversations import NUMBERS, Counting
from ..helpers import QUICK, chat_tokenizer, even_reward, prompt_dataset, tiny_chat_model, tiny_model, tiny_tokenizer


def test_signatures_of_all_overrides_are_checked_when_a_trainer_is_built():
    own = {
        name
        for name in vars(AdaGRPOTrainer)
        if hasattr(GRPOTrainer, name) and inspect.isfunction(getattr(GRPOTrainer, name))
    }
    assert own - SIGNATURES.keys() <= {"train", "__init__"}, "These two pass all arguments on."


# Names of TRL and Transformers that the package uses although most are private, by owner.
METHODS = {  # with their parameters, besides those in trl_version.py
    GRPOTrainer: {
        "_get_output_dir": ["trial"],
        "create_accelerator_and_postprocess": [],
    },
    VLLMGeneration: {
        "_init_vllm": [],
        "_iter_named_params": [],
        "_place_features": ["features", "prompt_ids"],
        "generate": ["prompts", "images", "num_generations", "profiler"],
        "sync_weights": [],
    },
    VLLMClient: {
        "check_server": ["total_timeout", "retry_interval"],
        "get_server_info": [],
        "reset_prefix_cache": [],
    },
}
TRAINER_STATE = ["_buffered_inputs", "_is_vlm", "_logs", "_metrics", "_multi_environment", "_pending_extra_logs"]
TRAINER_STATE += ["_pending_metrics", "_step", "_tokenizer", "_train_batch_size"]
CARD = ["_name", "_paper", "_tag_names"]
# Each has a test below.
ENVIRONMENT_STATE = ["_batch_environments", "_environment_pool"]
# Where prompts come from the queue, overrides of `_get_dataloader` are rejected by name, and the others are called.
DATA_LOADING = ["_get_collator_with_removed_columns", "_get_dataloader", "_remove_unused_columns"]
ENGINE_STATE = ["_dist"]


@pytest.mark.parametrize(
    ("owner", "method"), [(owner, method) for owner, names in METHODS.items() for method in names]
)
def test_methods_have_the_expected_parameters(owner, method):
    found, expected = list(inspect.signature(getattr(owner, method)).parameters), ["self", *METHODS[owner][method]]
    assert found == expected, f"ada_trl relies on {owner.__name__}.{method}: it has changed."


def test_every_private_name_of_trl_in_use_is_listed_here():
    """All names in the package that begin with one underscore and that occur in TRL's trainer and engine too."""
    package, used, theirs = Path(ada_trl.__file__).parent, set(), set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in ("attr", "name", "arg", "id", "value"):
                used.add(value) if isinstance(value := getattr(node, name, None), str) else None
    for module in (grpo_trainer, base_trainer, vllm_generation, vllm_client, transformers.trainer):
        theirs |= set(re.findall(r"\b_[a-z]\w*", Path(module.__file__).read_text()))
    listed = {name for names in (*METHODS.values(), SIGNATURES) for name in names if name.startswith("_")} - {
        "__init__"
    }
    assert used & theirs == listed.union(TRAINER_STATE, CARD, ENVIRONMENT_STATE, ENGINE_STATE, DATA_LOADING)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    class Recorder(GRPOTrainer):
        calls = []

        def _generate(self, prompts):
            columns = super()._generate(prompts)
            self.calls.append(("_generate", prompts, columns))
            return columns

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            self.calls.append(("_calculate_rewards", inputs, rewards))
            return rewards

        def _generate_and_score_completions(self, inputs):
            self.calls.append(("start", inputs))
            output = super()._generate_and_score_completions(inputs)
            self.calls.append(("end", output, {k: list(v) for k, v in self._metrics["train"].items()}))
            return output

    args = GRPOConfig(str(tmp_path_factory.mktemp("contract")), **QUICK | {"num_generations": 4, "max_steps": 1})
    trainer = Recorder(tiny_model(), even_reward, args, prompt_dataset(), processing_class=tiny_tokenizer())
    trainer.train()
    return trainer


def test_generation_and_rewards_are_called_once_each_in_this_order(recorded):
    assert [call[0] for call in recorded.calls] == ["start", "_generate", "_calculate_rewards", "end"]


def test_rows_of_a_prompt_are_contiguous(recorded):
    prompts = recorded.calls[1][1]
    assert [prompt for prompt in prompts[::4] for _ in range(4)] == prompts
    assert [row["prompt"] for row in recorded.calls[0][1]] == prompts


def test_generation_returns_eight_columns(recorded):
    columns = recorded.calls[1][2]
    assert len(columns) == 8, (
        "prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, images, tool_images"
    )
    prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images = columns
    assert [len(column) for column in (prompt_ids, completion_ids, completions)] == [8, 8, 8]
    assert (tool_mask, logprobs, extra_fields, images, tool_images) == (None, None, {}, None, [])
    empty = tuple(none for none, column in zip(_EMPTY_COLUMNS, columns, strict=True) if not column)
    assert empty == (None, None, {}, None, []), "A column without values is not what it was."


def test_output_and_metrics_that_are_corrected_exist(recorded):
    _, output, metrics = recorded.calls[3]
    assert output["advantages"].shape == (8,)
    assert output["num_items_in_batch"] == output["completion_mask"].sum()
    for name in ("reward", "reward_std", "frac_reward_zero_std", "rewards/even_reward/mean", "num_tokens"):
        assert len(metrics[name]) == 1, f"{name} is no longer logged once per generation."
    assert len(recorded._logs["advantages"]) == 8


PUBLIC_STATE = ["environment_factories", "environments", "eos_token_ids", "loss_type", "reward_func_names"]
PUBLIC_STATE += ["reward_funcs", "reward_weights", "tools", "use_vllm", "vllm_mode"]


@pytest.mark.parametrize("name", TRAINER_STATE + CARD + PUBLIC_STATE)
def test_state_exists(name, recorded):
    assert hasattr(recorded, name), f"GRPOTrainer.{name} is gone."


class Left(Exception):
    pass


def leave(prompts):
    raise Left


def test_no_gather_and_no_metric_before_the_generation(recorded):
    """The rows of a round are prepared by a call that is left in `_generate`, on each process separately."""
    before, called = {k: len(v) for k, v in recorded._metrics["train"].items()}, []

    def generate(prompts):
        called.append(prompts)
        leave(prompts)

    def gather(tensor):
        raise AssertionError("GRPOTrainer gathers before it calls `_generate`: rounds would wait for each other.")

    recorded._generate, recorded.accelerator.gather = generate, gather
    try:
        with pytest.raises(Left):
            GRPOTrainer._generate_and_score_completions(recorded, [{"prompt": "1+2="}] * 3)
    finally:
        del recorded._generate, recorded.accelerator.gather
    assert called == [["1+2="] * 3], "GRPOTrainer generates for other rows than it was given."
    assert {k: len(v) for k, v in recorded._metrics["train"].items()} == before


def test_gathers_of_generation_and_rewards_can_be_made_local(recorded, monkeypatch):
    """All of them go through `accelerator.gather` or the module's `gather`."""
    calls = []

    def local(tensor):
        calls.append(tensor)
        return tensor

    monkeypatch.setattr(grpo_trainer, "gather", local)
    monkeypatch.setattr(recorded.accelerator, "gather", local)
    for name in ("all_gather_object", "all_gather", "broadcast_object_list", "all_reduce", "all_gather_into_tensor"):
        monkeypatch.setattr(torch.distributed, name, None)
    recorded.model.train()
    columns = GRPOTrainer._generate(recorded, ["1+2="] * 3)
    rewards = GRPOTrainer._calculate_rewards(recorded, [{"prompt": "1+2="}] * 3, ["1+2="] * 3, columns[3], columns[1])
    assert len(calls) == 4, "Lengths of prompts and completions, truncation, rewards."
    assert rewards.shape == (3, 1)


def environment_trainer(tmp_path):
    args = GRPOConfig(str(tmp_path), **QUICK | {"num_generations": 4, "max_completion_length": 64})
    tokenizer = chat_tokenizer()
    given = {"train_dataset": NUMBERS, "processing_class": tokenizer, "environment_factory": Counting}
    return GRPOTrainer(tiny_chat_model(tokenizer), args=args, **given)


def test_environments_come_from_the_front_of_a_pool_that_can_be_replaced(tmp_path):
    trainer = environment_trainer(tmp_path)
    assert set(trainer._environment_pool) == {None}
    assert isinstance(trainer._environment_pool[None][0], Counting)
    trainer._generate = leave
    pool = trainer._environment_pool = {None: [Counting() for _ in range(3)]}
    first = pool[None][0]
    with pytest.raises(Left):
        trainer._generate_and_score_completions([trainer.train_dataset[0]] * 2)
    assert trainer.environments == pool[None][:2] and trainer.environments[0] is first
    assert trainer._batch_environments == [None, None]


def test_the_tool_loop_returns_its_counts_before_the_images(tmp_path):
    trainer = environment_trainer(tmp_path)
    prompts, generated = [[{"role": "user", "content": "Hello."}]] * 2, iter([["Well.<|im_end|>"], []])
    trainer._batch_environments = [None] * 2
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"add": lambda a: a}] * 2, [{}] * 2
    trainer._generate_single_turn = lambda ids, *_, **__: (trainer._tokenizer(next(generated))["input_ids"], None)
    call = {"type": "function", "function": {"name": "unknown", "arguments": {}}}
    completions = [
        [{"role": "assistant", "content": "", "tool_calls": [call]}],
        [{"role": "assistant", "content": "No."}],
    ]
    ids = trainer._tokenizer(["A.<|im_end|>", "No.<|im_end|>"])["input_ids"]
    results = GRPOTrainer._tool_call_loop(trainer, prompts, [[1], [1]], ids, completions, None, None, {})
    assert len(results) == 7 and results[4:6] == (1, 1), "One call, which failed."
    assert results[6] == [[], []], "A list per row, so that a column without values can be recognized."


def test_globals_of_trls_module_are_replaced_only_while_they_are_needed():
    trainer = SimpleNamespace(accelerator=SimpleNamespace(gather=gather))
    assert grpo_trainer.gather is gather and grpo_trainer.VLLMGeneration is VLLMGeneration
    with rank_local_collectives(trainer), vllm_generation_class(SimpleNamespace(use_vllm=True)):
        assert grpo_trainer.gather is not gather and grpo_trainer.VLLMGeneration is not VLLMGeneration
    assert grpo_trainer.gather is gather and grpo_trainer.VLLMGeneration is VLLMGeneration
    names = {node.id for node in ast.walk(ast.parse(inspect.getsource(grpo_trainer))) if isinstance(node, ast.Name)}
    assert {"gather", "VLLMGeneration"} <= names, "GRPOTrainer looks them up elsewhere now."


class Engine:
    def __init__(self, **kwargs):
        self.kwargs = kwargs

    def sleep(self, level):
        assert level == 2


def test_state_of_the_engine(monkeypatch):
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", Engine, raising=False)
    monkeypatch.setattr(vllm_generation, "ensure_master_addr_port", lambda: None)
    with mock.patch.dict(os.environ):  # TRL sets RANK and the like
        engine = VLLMGeneration(tiny_model(), Accelerator(cpu=True), tiny_tokenizer(), enable_sleep_mode=True)
    assert engine.enable_sleep_mode and isinstance(engine.llm, Engine)
    with engine._dist.gather_params([torch.nn.Parameter(torch.zeros(1))]):
        pass
    names = [name for name, _ in engine._iter_named_params()]
    assert names == [name for name, _ in tiny_model().named_parameters()]
    for name in ("server_base_url", "server_host", "server_port", "server_timeout", "group_port", "mode", "logprobs"):
        assert hasattr(engine, name), f"VLLMGeneration.{name} is gone."


def test_all_requests_of_the_client_go_through_its_session():
    """
    `check_server` is overridden and replaces the session, before the first request,
    by an object with `get` and `post`.
    """
    source = inspect.getsource(vllm_client)
    assert len(re.findall(r"\brequests\.(get|post|request)\(", source)) == 1, (
        "More than `check_server` sends requests without the session."
    )
    assert set(re.findall(r"self\.session\.(\w+)", source)) == {"get", "post", "mount"}
    start = inspect.getsource(VLLMClient.__init__)
    assert re.search(r"self\.session = .*self\.session\.mount.*self\.check_server.*self\._get", start, re.DOTALL)


@pytest.mark.parametrize("features", [None, {"mm_hashes": {}}], ids=["text", "images"])
def test_requests_for_completions_are_those_of_trls_client(features):
    sent = []

    def post(url, json):
        sent.append((url, json))
        logprobs = {"content": [{"token": "token_id:3", "logprob": -1.0, "top_logprobs": []}]}
        return {"choices": [{"prompt_token_ids": [1], "token_ids": [3], "logprobs": logprobs}] * 2}

    client = object.__new__(VLLMClient)
    client.base_url, client.model, client._post = "http://server", "model", post
    params = {"n": 2, "temperature": 0.9, "top_p": 0.8, "top_k": 7, "min_p": 0.1, "max_tokens": 5, "logprobs": 0}
    params |= {
        "repetition_penalty": 1.1,
        "structured_outputs_regex": "a|b",
        "generation_kwargs": {"seed": 1, "min_p": 0},
    }
    one = completion_request("model", [[1, 2]], features, params | {"generation_kwargs": {"n": 1}})[1]
    assert one.get("sampling_params", one)["n"] == 2, "The number of rollouts is that of the mode."
    client.generate([[1, 2]], None if features is None else [features], **params)
    path, request = completion_request("model", [[1, 2]], features, params)
    ((url, theirs),) = sent
    assert url == "http://server" + path
    if features is not None:
        assert request.pop("request_id") != theirs.pop("request_id")
    assert request == theirs


def test_standard_deviation_has_bessels_correction():
    torch.testing.assert_close(nanstd(torch.tensor([1.0, 2.0, torch.nan, 4.0])), torch.tensor([1.0, 2.0, 4.0]).std())


def test_sampler_shuffles_anew_each_epoch_and_a_new_one_starts_over(recorded):
    sampler = recorded._get_train_sampler()
    first, second = list(sampler), list(sampler)
    assert first != second, "AdaGRPOTrainer takes each iteration of the sampler to be one epoch's shuffle."
    assert list(recorded._get_train_sampler()) == first and not hasattr(sampler, "set_epoch"), (
        "TRL resumes the order of later epochs itself now: AdaGRPOTrainer._load_optimizer_and_scheduler must not."
    )
