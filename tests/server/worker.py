"""
One of several processes that train against servers, run after run; writes the outcomes to `<output_dir>/rank<i>.json`.
"""

import gc
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.sampling.asynchronous import AsyncVLLMSampler

from ..conversations import add, image_dataset, says_the_sum
from ..conversations import build as build_conversations
from ..helpers import QUICK, chat_tokenizer, tiny_vision_language_model
from .fake import RIGHT, reward
from .helpers import ONE_ROUND, build, served_by


class Recorder(AdaGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        prompts = self.processing_class.batch_decode(output["prompt_ids"], skip_special_tokens=True)
        completions = self.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
        self.batches.append(list(zip(prompts, completions, output["advantages"].tolist(), strict=True)))
        return output


def is_right(completions, **kwargs):
    return [float(completion[-1]["content"].startswith(RIGHT)) for completion in completions]


def run(output_dir: str, options: dict) -> dict:
    """
    One training. `options` are the server's `url`, fields of the configuration, the rank that fails, and with
    `feature` conversations with tools or images.
    """
    options = dict(options)
    server, failing_rank = SimpleNamespace(url=options.pop("url")), options.pop("failing_rank", None)

    def reward_or_failure(completions, **kwargs):
        if trainer.args.process_index == failing_rank:
            raise ZeroDivisionError("my bug")
        return reward(completions)

    feature = options.pop("feature", None)
    served = served_by(server.url) | options
    if feature == "tools":
        trainer = build_conversations(Recorder, output_dir, says_the_sum, tools=[add], **served)
    elif feature == "images":
        model, processor = tiny_vision_language_model(chat_tokenizer())
        model_and_data = {"model": model, "tokenizer": processor, "dataset": image_dataset()}
        trainer = build_conversations(Recorder, output_dir, is_right, **model_and_data, **served)
    else:
        trainer = build(output_dir, server, reward_or_failure, trainer_class=Recorder, **ONE_ROUND | options)
    trainer.batches = []
    started, error = time.monotonic(), None
    try:
        trainer.train()
        if feature == "tools":
            trainer.evaluate(trainer.train_dataset)
    except Exception as caught:
        error = [type(caught).__name__, str(caught)]
    return {
        "error": error,
        "seconds": time.monotonic() - started,
        "threads": [t.name for t in threading.enumerate() if "vLLM" in t.name],
        "batches": trainer.batches,
        "logs": [logs for logs in trainer.state.log_history if "reward" in logs],
        "evaluations": [logs["eval_reward"] for logs in trainer.state.log_history if "eval_reward" in logs],
        "weights": sum(p.detach().double().sum().item() for p in trainer.model.parameters()),
    }


def main(output_dir: str, runs: str) -> None:
    AsyncVLLMSampler.rollouts_in_flight = 0  # as the fixture `no_speculation`
    outcomes = [run(f"{output_dir}/{i}", options) for i, options in enumerate(json.loads(runs))]
    rank = AdaGRPOConfig(output_dir, **QUICK).process_index
    (Path(output_dir) / f"rank{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    gc.freeze()  # as in conftest.py
    main(*sys.argv[1:])
