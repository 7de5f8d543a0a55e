"""The backends without a server: transformers with a tiny model, vLLM's engine scripted."""

import sys
import types
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ada_trl.recipes.math.problems import Problem
from ada_trl.recipes.math.prompts import INSTRUCTION, SYSTEM_PROMPT
from ada_trl.measurement.arguments import SamplingArguments
from ada_trl.measurement.measure import fingerprint, render
from ada_trl.measurement.samplers import Request, TransformersSampler, VLLMSampler

from ..helpers import chat_tokenizer, tiny_model, tiny_tokenizer


TOKENIZER = tiny_tokenizer()
PROMPT = TOKENIZER("1+2=")["input_ids"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    model = tiny_model()
    # What a model's own generation_config would do to sampling that asks for the plain distribution.
    model.generation_config.update(top_k=2, repetition_penalty=2.0, temperature=0.1, top_p=0.5, do_sample=True)
    model.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def arguments(**overrides):
    return SamplingArguments(**{"num_samples": 5, "max_new_tokens": 4, "backend": "transformers"} | overrides)


def requests(*indices):
    return [Request(i, [*PROMPT, *[2 + i] * i], seed=100 + i) for i in indices]


def sample(model_dir, *indices, **overrides):
    return dict(TransformersSampler(str(model_dir), TOKENIZER, arguments(**overrides)).sample(requests(*indices)))


def test_number_and_end_of_completions(model_dir):
    completions = sample(model_dir, 0, num_samples=64, batch_size=24)[0]
    assert len(completions) == 64
    ended = [ids for ids in completions if ids[-1] == TOKENIZER.eos_token_id]
    assert 0 < len(ended) < 64
    assert all(len(ids) == 4 for ids in completions if ids not in ended)
    assert all(TOKENIZER.eos_token_id not in ids[:-1] for ids in completions)


def test_a_problems_seed_decides_alone(model_dir):
    together = sample(model_dir, 0, 1, 2)
    assert together == sample(model_dir, 2, 1, 0)
    assert together[1] == sample(model_dir, 1)[1]
    assert len({str(completions) for completions in together.values()}) == 3


def test_the_distribution_is_the_models(model_dir):
    """
    First tokens against the softmax, whatever the model's generation_config says: 4000 draws, a chi-square with 13
    degrees of freedom, below its 0.9999 quantile (40.9).
    """
    model = tiny_model()
    with torch.no_grad():
        p = model(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    drawn = sample(model_dir, 0, num_samples=4000, batch_size=4000, max_new_tokens=1)[0]
    counts = torch.bincount(torch.tensor([ids[0] for ids in drawn]), minlength=len(p))
    assert (((counts - 4000 * p) ** 2) / (4000 * p)).sum() < 40.9
    assert (counts > 0).sum() > 2


def test_temperature_zero_is_greedy(model_dir):
    completions = sample(model_dir, 0, temperature=0.0)[0]
    assert len({tuple(ids) for ids in completions}) == 1
    with torch.no_grad():
        best = tiny_model()(torch.tensor([PROMPT])).logits[0, -1].argmax()
    assert completions[0][0] == best


def test_lora_adapters_are_models_too(model_dir, tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = str(model_dir)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert sample(tmp_path, 0) != sample(model_dir, 0)
    assert fingerprint(str(tmp_path)) is not None


def test_fingerprints_follow_the_weights(model_dir, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    before = fingerprint(str(tmp_path))
    assert before == fingerprint(str(model_dir))  # a copy
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3
    model.save_pretrained(tmp_path)
    assert fingerprint(str(tmp_path)) != before
    assert fingerprint("organisation/model") is None


def test_prompts():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    text = f"system{SYSTEM_PROMPT}user1+2= {INSTRUCTION}="
    assert render(Problem("1+2=", "3", {}), tokenizer, "chat") == tokenizer(text)["input_ids"]
    assert render(Problem("1+2=", "3", {}), tokenizer, "plain") == tokenizer("1+2=")["input_ids"]


def test_the_date_of_a_chat_template_can_be_fixed():
    tokenizer = chat_tokenizer("llama3_2")
    args = SamplingArguments(num_samples=1, chat_template_kwargs='{"date_string": "26 Jul 2024"}')
    text = tokenizer.decode(render(Problem("1+2=", "3", {}), tokenizer, "chat", args.chat_template_kwargs))
    assert "Today Date: 26 Jul 2024" in text


# vLLM in this process, with its engine scripted: what is asked of it, and when


class ScriptedEngine:
    """Finishes the request that came last."""

    def __init__(self):
        self.waiting, self.asked, self.most = [], [], 0
        self.engine_core = types.SimpleNamespace(shutdown=lambda: setattr(self, "closed", True))

    def add_request(self, request_id, prompt, params, lora_request=None):
        self.asked.append((request_id, prompt, params, lora_request))
        self.waiting.append((request_id, params["n"]))
        self.most = max(self.most, len(self.waiting))

    def step(self):
        request_id, n = self.waiting.pop()
        outputs = [types.SimpleNamespace(token_ids=(int(request_id), i)) for i in range(n)]
        unfinished = types.SimpleNamespace(request_id="other", finished=False)
        return [unfinished, types.SimpleNamespace(request_id=request_id, finished=True, outputs=outputs)]


@pytest.fixture
def engine(monkeypatch):
    engine = ScriptedEngine()

    def from_engine_args(options):
        engine.options = options
        return engine

    vllm = types.ModuleType("vllm")
    vllm.EngineArgs, vllm.SamplingParams = dict, dict
    vllm.LLMEngine = types.SimpleNamespace(from_engine_args=from_engine_args)
    modules = {
        "vllm": vllm,
        "vllm.lora": types.ModuleType("vllm.lora"),
        "vllm.lora.request": types.SimpleNamespace(LoRARequest=lambda *args: args),
        "vllm.sampling_params": types.SimpleNamespace(RequestOutputKind=types.SimpleNamespace(FINAL_ONLY="final")),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return engine


def test_the_engine_is_kept_busy_and_told_the_settings(engine, model_dir):
    args = arguments(backend="vllm", vllm_max_concurrent_requests=3, top_p=0.9, vllm_max_model_length=64)
    sampler = VLLMSampler(str(model_dir), TOKENIZER, args)
    finished = list(sampler.sample(iter(requests(*range(7)))))
    assert Counter(index for index, _ in finished) == Counter(range(7))
    assert all(completions == [[index, i] for i in range(5)] for index, completions in finished)
    assert engine.most == 3
    assert finished[0][0] == 2  # none waits for another
    _, prompt, params, lora = engine.asked[1]
    assert prompt == {"prompt_token_ids": requests(1)[0].prompt_ids} and lora is None
    assert params["seed"] == 101 and params["top_p"] == 0.9 and params["max_tokens"] == 4 and params["n"] == 5
    assert params["stop_token_ids"] == [TOKENIZER.eos_token_id]
    assert engine.options["model"] == str(model_dir) and engine.options["max_model_len"] == 64
    sampler.close()
    assert engine.closed


def test_an_adapter_is_served_on_its_base_model(engine, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "r": 32}')
    sampler = VLLMSampler(str(tmp_path), TOKENIZER, arguments(backend="vllm"))
    list(sampler.sample(iter(requests(0))))
    assert engine.options["model"] == "org/base" and engine.options["max_lora_rank"] == 32
    assert engine.asked[0][3] == ("adapter", 1, str(tmp_path))


def test_without_vllm_the_remedy_is_named(monkeypatch, model_dir):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="--backend transformers"):
        VLLMSampler(str(model_dir), TOKENIZER, arguments(backend="vllm"))
