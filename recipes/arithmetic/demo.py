"""
GRPO, Reinforce-Ada and one rollout per prompt on the arithmetic task, from the same base model with the same seed.

`python -m recipes.arithmetic.demo` in a clone trains with the configurations of this folder, prints a table and writes
`report.md`, `curves.png` and `results.json` to `outputs/demo/`.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

from transformers import PrinterCallback, ProgressCallback

from ada_trl.commands.options import parse_args
from ada_trl.commands.run_setup import build_trainer
from ada_trl.utils.console import replace_unknown_characters
from ada_trl.utils.tables import markdown_table
from ada_trl.utils.threads import bounded_threads
from benchmarks import plotting

from .task import prepare


RECIPES = Path(__file__).parent
STEPS = 60  # fewer than in the recipes, so that the demo takes three minutes
LABELS = {
    "grpo-n4": "GRPO n=4",
    "grpo-n8": "GRPO n=8",
    "grpo-n16": "GRPO n=16",
    "seq-pos": "Seq-pos",
    "seq-balance": "Seq-balance",
    "est-ema": "Est-EMA",
    "est-value": "Est-value",
    "batch": "batch baseline, n=1, 2 retries",
    "maxrl": "MaxRL n=8",
}
# The recipe has the paper's rounds; these are the defaults.
DEFAULT_ROUNDS = ["--samples_per_round=4", "--max_rounds=8", "--min_positives=1", "--min_negatives=1"]


class CompactProgress(ProgressCallback):
    """Progress bar with two metrics instead of a line for each log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None and "reward" in logs:
            self.training_bar.set_postfix(
                reward=f"{logs['reward']:.2f}", zero_advantage=f"{logs['ada/frac_zero_advantage_groups']:.2f}"
            )


def run(method: str, task_dir: Path, overrides: list[str]) -> dict:
    """Train one method and return its summary and curves."""
    print(f"\n{LABELS[method]}", flush=True)
    paths = [f"--model_name_or_path={task_dir / 'base'}", f"--dataset_name={task_dir / 'data'}"]
    paths += [f"--output_dir={task_dir / method}", f"--max_steps={STEPS}"]
    paths += DEFAULT_ROUNDS if method == "seq-balance" else []
    trainer = build_trainer(*parse_args(["--config", str(RECIPES / f"{method}.yaml"), *paths, *overrides]))
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    if sys.stderr.isatty():
        trainer.add_callback(CompactProgress)
    started = time.perf_counter()
    with bounded_threads(trainer.model):
        trainer.train()
    return {
        "method": LABELS[method],
        **summarize(trainer.state.log_history),
        "wall_seconds": time.perf_counter() - started,
        "log_history": trainer.state.log_history,
    }


def summarize(log_history: list[dict]) -> dict:
    """Read curves and means of a run from its logs."""
    evaluations = plotting.curve(log_history, "eval_reward")
    return {
        "steps": evaluations.steps.tolist(),
        "accuracy": evaluations.values.tolist(),
        "tokens": plotting.against(log_history, "eval_reward", plotting.TOKENS)[0].tolist(),
        "frac_zero_advantage_groups": plotting.curve(log_history, "ada/frac_zero_advantage_groups").values.mean(),
        "rollouts_per_prompt": plotting.curve(log_history, "ada/samples_per_prompt/mean").values.mean(),
        "step_seconds": plotting.total(log_history, "step_time").values[-1],
    }


def table(results: list[dict]) -> str:
    header = [
        "Method",
        "Accuracy before",
        "Accuracy after",
        "Groups without a gradient",
        "Rollouts per visit of a prompt",
        "Generated tokens",
        "Training seconds",
    ]
    rows = [
        [
            result["method"],
            f"{result['accuracy'][0]:.3f}",
            f"{result['accuracy'][-1]:.3f}",
            f"{result['frac_zero_advantage_groups']:.1%}",
            f"{result['rollouts_per_prompt']:.1f}",
            f"{result['tokens'][-1]:,.0f}",
            f"{result['step_seconds']:.0f}",
        ]
        for result in results
    ]
    return markdown_table(header, rows)


REPORT = """\
# Arithmetic demo

Integer addition, 1 to 4 digits; every method starts from the same base model with the same seed and takes {steps}
optimizer steps on 128 rollouts: 4 of each of 32 prompts, or 1 of each of 128 (batch baseline). Accuracy is measured by
sampling 4 completions for each of 256 held-out problems; its standard error is about 0.015. This is a demonstration
with one seed, not a comparison of the methods.

{table}

*Groups without a gradient*: fraction of groups whose rollouts all have advantage 0, mean over the run. *Training
seconds* do not include evaluation.

![Accuracy against steps, generated tokens and time](curves.png)
"""


def main() -> None:
    replace_unknown_characters()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=LABELS, default=["grpo-n4", "seq-balance", "batch"])
    parser.add_argument(
        "--task_dir", type=Path, default=Path("outputs/arithmetic"), help="Cached base model and data."
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    args, overrides = parser.parse_known_args()  # others override the recipes

    prepare(args.task_dir)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    results = [run(method, args.task_dir, overrides) for method in args.methods]
    report = table(results)
    (args.output_dir / "results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    text = REPORT.format(steps=results[0]["steps"][-1], table=report)
    (args.output_dir / "report.md").write_text(text, encoding="utf-8")
    print(f"\n{report}\n\nWrote {args.output_dir / 'report.md'}.")
    if importlib.util.find_spec("matplotlib") is not None:  # the extra `plots`
        logs = {result["method"]: result["log_history"] for result in results}
        figure = plotting.learning_figure(logs, {"eval_reward": "Held-out accuracy (sampled)"})
        figure.suptitle("One seed: a demonstration, not a comparison of the methods", fontsize="medium")
        figure.savefig(args.output_dir / "curves.png", dpi=150)
        print(f"Wrote {args.output_dir / 'curves.png'}.")


if __name__ == "__main__":
    main()
