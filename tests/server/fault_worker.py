"""One of several processes that train against a server with a fault, run after run; writes the outcome of each run."""

import faulthandler
import gc
import json
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import requests
import torch

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer

from ..helpers import prompt_dataset
from .fake import fingerprint
from .faults import call_number
from .helpers import build, our_threads


class Recorder(AdaGRPOTrainer):
    """Records the requests of the rows of each generation, and the weights that were trained then."""

    def _generate_and_score_completions(self, inputs):
        in_adapter = "lora_" if self.args.vllm_weight_sync == "lora" else ""
        self.weights.append(fingerprint(p for name, p in self.model.named_parameters() if in_adapter in name))
        output = super()._generate_and_score_completions(inputs)
        first = output["sampling_per_token_logps"][:, 0].tolist()
        steps_before = int((self._metrics["train"].get("ada/staleness") or [0])[-1])
        ours = self.weights[-1 - steps_before]  # those that the rows should come from
        self.rows += [(call_number(logprob), ours) for logprob in first]
        return output


def run(url: str, directory: Path, rank: int, options: dict) -> dict:
    """A training from the same weights as the others."""
    started, error, trainer = time.monotonic(), None, None
    Recorder.rows, Recorder.weights = [], []
    try:
        server = SimpleNamespace(url=url)
        trainer = build(directory, server, dataset=prompt_dataset(2), trainer_class=Recorder, **options)
        trainer.train()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {
        "error": error,
        "seconds": time.monotonic() - started,
        "ended": time.time(),
        "rows": Recorder.rows,
        # The main process removes the directory, perhaps after this rank has ended.
        "left": our_threads() + [str(path) for path in directory.glob("vllm_weight_sync*") if rank == 0],
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
