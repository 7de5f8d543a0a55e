"""
examples/agent.py on one of several processes, with a scripted policy (binary search);
writes its results to `rank<i>.json`.
"""

import json
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

from accelerate import PartialState

from ada_trl import AdaGRPOTrainer

from ..helpers import QUICK_ARGUMENTS, chat_tokenizer, logs_of, tiny_chat_model


EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"


def next_turn(text: str, plays: bool) -> str:
    """Guess the middle of the remaining range, or give up."""
    low, high = 1, 100
    for number, reply in re.findall(r'"number": (\d+).*?<tool_response>\n(\w+)', text, flags=re.DOTALL):
        if reply == "found":
            return "It is found."
        low, high = (int(number) + 1, high) if reply == "higher" else (low, int(number) - 1)
    call = json.dumps({"name": "guess", "arguments": {"number": (low + high) // 2}})
    return f"<tool_call>\n{call}\n</tool_call>" if plays else "I give up."


def halving(trainer, prompt_ids, *args, **kwargs):
    texts = trainer._tokenizer.batch_decode(prompt_ids)
    played = [next_turn(text, "<tool_response>" in text or i % 2 == 0) for i, text in enumerate(texts)]
    return [trainer._tokenizer(text + "<|im_end|>")["input_ids"] for text in played], None


def play(output_dir: Path, *options: str, policy=halving) -> AdaGRPOTrainer:
    """Run the example for two steps with completions of `policy`."""
    tokenizer = chat_tokenizer()
    with PartialState(cpu=True).main_process_first():
        tokenizer.save_pretrained(output_dir / "model")
        tiny_chat_model(tokenizer).save_pretrained(output_dir / "model")
    arguments = [
        *QUICK_ARGUMENTS,
        "--max_steps=2",
        "--max_completion_length=1024",
        f"--output_dir={output_dir}",
        *options,
    ]
    with mock.patch.object(AdaGRPOTrainer, "_generate_single_turn", policy):
        return runpy.run_path(str(EXAMPLE))["main"](arguments, str(output_dir / "model"), processing_class=tokenizer)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    trainer = play(directory, *sys.argv[2:])
    won = [environment.get_reward() for environment in trainer.environments]
    weights = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
    seen = {"logs": logs_of(trainer), "won": won, "weights": weights}
    (directory / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))
