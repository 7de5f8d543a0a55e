"""The samplers: transformers with a tiny model, vLLM with a scripted stand-in."""

import sys
import types
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ada_trl.recipes.math.problems import Problem
from ada_trl.recipes.math.prompts import INSTRUCTION, SYSTEM_PROMPT
from ada_trl.recipes.math.samplers import TransformersSampler, VLLMSampler
from ada_trl.recipes.math.sampling import Model, SamplingArguments, fingerprint
from tests.helpers import chat_tokenizer, tiny_model, tiny_tokenizer


TOKENIZER = tiny_tokenizer()
PROMPT = TOKENIZER("1+2=")["input_ids"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    model = tiny_model()
    # A generation_config that would change the distribution.
    model.generation_config.update(top_k=2, repetition_penalty=2.0, temperature=0.1, top_p=0.5, do_sample=True)
    model.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def arguments(**overrides):
    options = {"output_dir": "unused", "num_samples": 5, "max_new_tokens": 4, "backend": "transformers"}
    return SamplingArguments(**options | overrides)


def requests(*indices):
    return [[*PROMPT, *[2 + i] * i] for i in indices], [100 + i for i in indices]


def sample(model_dir, *indices, **overrides):
    sampler = TransformersSampler(str(model_dir), TOKENIZER, arguments(**overrides))
    return dict(zip(indices, sampler.generate(*requests(*indices)), strict=True))


def test_number_and_end_of_completions(model_dir):
    completions = sample(model_dir, 0, num_samples=64, batch_size=24)[0]
    assert len(completions) == 64
    ended = [ids for ids in completions if ids[-1] == TOKENIZER.eos_token_id]
    assert 0 < len(ended) < 64
    assert all(len(ids) == 4 for ids in completions if ids not in ended)
    assert all(TOKENIZER.eos_token_id not in ids[:-1] for ids in completions)


def test_completions_depend_on_the_seed_only(model_dir):
    together = sample(model_dir, 0, 1, 2)
    assert together == sample(model_dir, 2, 1, 0)
    assert together[1] == sample(model_dir, 1)[1]
    assert len({str(completions) for completions in together.values()}) == 3


def test_samples_have_the_distribution_of_the_model(model_dir):
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


def test_lora_adapters(model_dir, tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = str(model_dir)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert sample(tmp_path, 0) != sample(model_dir, 0)


def test_fingerprints_depend_on_the_weights(model_dir, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    before = fingerprint(str(tmp_path))
    assert before == fingerprint(str(model_dir))  # a copy
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1e-3
    model.save_pretrained(tmp_path)
    assert fingerprint(str(tmp_path)) != before


def test_fingerprint_of_a_model_on_the_hub_is_its_commit(tmp_path, monkeypatch):
    """Read from the cache, as after the tokenizer was loaded; also of an adapter, which has no `config.json`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder, commit = tmp_path / "models--me--adapter", "0123456789abcdef0123456789abcdef01234567"
    for path, text in {"refs/main": commit, f"snapshots/{commit}/tokenizer_config.json": "{}"}.items():
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
    assert fingerprint("me/adapter") == commit


def test_prompts(model_dir, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    text = f"system{SYSTEM_PROMPT}user1+2= {INSTRUCTION}="
    for prompt_format, expected in (("chat", text), ("plain", "1+2=")):
        model = Model(str(tmp_path), arguments(prompt_format=prompt_format))
        assert model.render(Problem("1+2=", {})) == tokenizer(expected)["input_ids"]


def test_the_date_of_a_chat_template_can_be_fixed(tmp_path):
    chat_tokenizer("llama3_2").save_pretrained(tmp_path)
    model = Model(str(tmp_path), arguments(chat_template_kwargs='{"date_string": "26 Jul 2024"}'))
    assert "Today Date: 26 Jul 2024" in model.tokenizer.decode(model.render(Problem("1+2=", {})))


# vLLM: arguments of a scripted stand-in


class ScriptedLLM:
    def __init__(self, **options):
        self.options = options
        self.llm_engine = types.SimpleNamespace(
            engine_core=types.SimpleNamespace(shutdown=lambda: setattr(self, "closed", True))
        )

    def generate(self, prompts, params, lora_request, use_tqdm):
        self.given = prompts, params, lora_request
        return [
            types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=(p["seed"], i)) for i in range(p["n"])])
            for p in params
        ]


@pytest.fixture
def vllm(monkeypatch):
    vllm = types.ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = ScriptedLLM, dict
    modules = {
        "vllm": vllm,
        "vllm.lora": types.ModuleType("vllm.lora"),
        "vllm.lora.request": types.SimpleNamespace(LoRARequest=lambda *args: args),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_vllm_receives_prompts_seeds_and_settings(vllm, model_dir):
    args = arguments(backend="vllm", top_p=0.9, model_kwargs='{"max_model_len": 64}')
    sampler = VLLMSampler(str(model_dir), TOKENIZER, args)
    prompts, seeds = requests(0, 1)
    assert sampler.generate(prompts, seeds) == [[[seed, i] for i in range(5)] for seed in seeds]
    given, params, lora = sampler.llm.given
    assert given == [{"prompt_token_ids": prompt} for prompt in prompts] and lora is None
    expected = {"n": 5, "temperature": 1.0, "top_p": 0.9, "max_tokens": 4, "detokenize": False}
    expected |= {"stop_token_ids": [TOKENIZER.eos_token_id]}
    assert params == [expected | {"seed": seed} for seed in seeds]
    assert sampler.llm.options == {"model": str(model_dir), "max_model_len": 64}
    sampler.close()
    assert sampler.llm.closed


def test_vllm_serves_an_adapter_on_its_base_model(vllm, tmp_path):
    Path(tmp_path, "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "r": 32}')
    sampler = VLLMSampler(str(tmp_path), TOKENIZER, arguments(backend="vllm"))
    sampler.generate(*requests(0))
    assert sampler.llm.options["model"] == "org/base" and sampler.llm.options["max_lora_rank"] == 32
    assert sampler.llm.given[2] == ("adapter", 1, str(tmp_path))


def test_the_error_without_vllm_contains_the_fix(monkeypatch, model_dir):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="--backend transformers"):
        VLLMSampler(str(model_dir), TOKENIZER, arguments(backend="vllm"))
