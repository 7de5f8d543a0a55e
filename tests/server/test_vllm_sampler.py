"""The sampler of `recipes/math` with vLLM in this process, on the CPU."""

import json

from ada_trl.recipes.math.evaluate import EvaluateArguments, run


OPTIONS = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 2**26, "enforce_eager": True}


def test_vllm_and_transformers_agree(task_dir, tmp_path, monkeypatch):
    """Pass rates differ by at most 4 standard errors: 20 problems, 32 completions each."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)  # of `make test-vllm`; users do not have it
    averages = {}
    for backend, options in (("vllm", OPTIONS), ("transformers", {"dtype": "float32"})):
        args = EvaluateArguments(
            models=[str(task_dir / "base")],
            datasets=[str(task_dir / "data" / "train.jsonl")],
            output_dir=str(tmp_path / backend),
            backend=backend,
            model_kwargs=json.dumps(options),
            prompt_format="plain",
            max_new_tokens=6,
            max_problems=20,
        )
        averages[backend] = run(args).set_index("metric")["value"]["average@32"]
    assert abs(averages["vllm"] - averages["transformers"]) < 4 * (2 * 0.25 / (20 * 32)) ** 0.5
    assert 0.1 < averages["vllm"] < 0.9
