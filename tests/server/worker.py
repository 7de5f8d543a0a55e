"""One of several processes that train against a server; writes how it ended to `<output_dir>/rank<i>.json`."""

import json
import sys
import threading
import time
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer

from ..helpers import PROMPTS, QUICK, tiny_model, tiny_tokenizer
from .fake import reward


class Recorder(AdaGRPOTrainer):
    batches = []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        prompts = self.processing_class.batch_decode(output["prompt_ids"], skip_special_tokens=True)
        completions = self.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
        self.batches.append(list(zip(prompts, completions, output["advantages"].tolist(), strict=True)))
        return output


def main(url: str, output_dir: str, options: str) -> None:
    options = json.loads(options)
    failing_rank, lora = options.pop("failing_rank", None), options.pop("lora", False)
    model = options.pop("model", None) or tiny_model()
    defaults = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_weight_sync": "disk"}
    args = AdaGRPOConfig(output_dir, **QUICK | defaults | options)

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
    started, error = time.monotonic(), None
    try:
        trainer.train()
    except Exception as caught:
        error = caught
    outcome = {
        "error": error and [type(error).__name__, str(error)],
        "seconds": time.monotonic() - started,
        "threads": [t.name for t in threading.enumerate() if "vLLM" in t.name],
        "batches": trainer.batches,
        "logs": [logs for logs in trainer.state.log_history if "reward" in logs],
        "weights": sum(p.detach().double().sum().item() for p in trainer.model.parameters()),
    }
    (Path(output_dir) / f"rank{args.process_index}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
