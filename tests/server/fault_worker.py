"""One of the processes that train again and again against a server with a fault; writes how each run ended."""

import faulthandler
import gc
import json
import logging
import sys
import threading
import time
from pathlib import Path

import requests
import torch
from peft import LoraConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.trainer.trl_hooks import latest_metric

from ..helpers import QUICK, config, prompt_dataset, tiny_model, tiny_tokenizer
from .fake import fingerprint, reward
from .faults import call_number


class Witness(AdaGRPOTrainer):
    """Remembers by which requests the rows of each generation were sampled, and which weights were trained then."""

    def _generate_and_score_completions(self, inputs):
        in_adapter = "lora_" if self.args.vllm_weight_sync == "lora" else ""
        self.weights.append(fingerprint(p for name, p in self.model.named_parameters() if in_adapter in name))
        output = super()._generate_and_score_completions(inputs)
        first = output["sampling_per_token_logps"][:, 0].tolist()
        steps_before = int(latest_metric(self, "ada/staleness") or 0)
        ours = self.weights[-1 - steps_before]  # from which they were to be sampled
        self.rows += [(call_number(logprob), ours) for logprob in first]
        return output


def run(url: str, directory: Path, rank: int, options: dict) -> dict:
    """A training of two steps from the same weights as the others."""
    started, error, trainer = time.monotonic(), None, None
    lora = options["vllm_weight_sync"] == "lora"
    defaults = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 0}
    Witness.rows, Witness.weights = [], []
    try:
        trainer = Witness(
            tiny_model(),
            reward,
            config(directory, **QUICK | defaults | options),
            prompt_dataset(2),
            processing_class=tiny_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
        )
        trainer.train()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {
        "error": error,
        "seconds": time.monotonic() - started,
        "ended": time.time(),
        "rows": Witness.rows,
        "left": [t.name for t in threading.enumerate() if "vLLM" in t.name]
        + [
            str(path) for path in directory.glob("vllm_weight_sync*") if rank == 0
        ],  # which removes it, in its own time
    }


def main(output_dir: str, script: str) -> None:
    url, runs, limit = (json.loads(script)[name] for name in ("url", "runs", "limit"))
    rank = AdaGRPOConfig(output_dir, use_cpu=True, bf16=False).process_index
    logging.disable(logging.WARNING)
    outcomes = []
    for number, options in enumerate(runs):
        faulthandler.dump_traceback_later(limit, exit=True)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if rank == 0:
            requests.post(f"{url}/next", json={"run": number}, timeout=60)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        outcomes.append(run(url, Path(output_dir) / "run", rank, options))
        (Path(output_dir) / f"rank{rank}.json").write_text(json.dumps(outcomes))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    gc.freeze()  # as in conftest.py
    main(*sys.argv[1:])
