"""One of several processes that train against servers, run after run; writes how each ended to `<output_dir>/rank<i>.json`."""

import gc
import json
import sys
import threading
import time
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer

from ..helpers import PROMPTS, QUICK, config, tiny_model, tiny_tokenizer
from .fake import reward


class Recorder(AdaGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        prompts = self.processing_class.batch_decode(output["prompt_ids"], skip_special_tokens=True)
        completions = self.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
        self.batches.append(list(zip(prompts, completions, output["advantages"].tolist(), strict=True)))
        return output


def run(output_dir: str, options: dict) -> dict:
    """One training, as `options` say: the server's `url`, fields of the configuration, who fails."""
    options = dict(options)
    failing_rank, lora = options.pop("failing_rank", None), options.pop("lora", False)
    model = options.pop("model", None) or tiny_model()
    defaults = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": options.pop("url"), "max_steps": 1}
    defaults |= {"vllm_weight_sync": "disk", "vllm_request_timeout": 30.0}
    args = config(output_dir, **QUICK | defaults | options)

    def reward_or_failure(completions, **kwargs):
        if args.process_index == failing_rank:
            raise ZeroDivisionError("my bug")
        return reward(completions)

    trainer = Recorder(
        model,
        reward_or_failure,
        args,
        Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    trainer.batches = []
    started, error = time.monotonic(), None
    try:
        trainer.train()
    except Exception as caught:
        error = [type(caught).__name__, str(caught)]
    return {
        "error": error,
        "seconds": time.monotonic() - started,
        "threads": [t.name for t in threading.enumerate() if "vLLM" in t.name],
        "batches": trainer.batches,
        "logs": [logs for logs in trainer.state.log_history if "reward" in logs],
        "weights": sum(p.detach().double().sum().item() for p in trainer.model.parameters()),
    }


def main(output_dir: str, runs: str) -> None:
    outcomes = [run(f"{output_dir}/{i}", options) for i, options in enumerate(json.loads(runs))]
    rank = AdaGRPOConfig(output_dir, **QUICK).process_index
    (Path(output_dir) / f"rank{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    gc.freeze()  # as in conftest.py
    main(*sys.argv[1:])
