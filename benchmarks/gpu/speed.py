"""Step time and memory at equal rows, and of skipping zero-variance groups, with generation by `transformers`."""

from pathlib import Path
from statistics import mean

from .. import names
from ..common import markdown
from .modes import GRPO
from .training import SMOKE, Size, measure
from .units import Unit, run, succeeded


STEPS = 3  # the first one is not counted
METHODS = {
    names.BATCH: {"baseline": "batch"},
    names.GRPO_4: GRPO,
    names.SEQ_BALANCE: {"adaptive_sampling": "seq-balance"},
}
FRAC_CERTAIN = 0.75  # of the prompts get the same reward for all completions in the comparison of skip and keep


def units(smoke: bool) -> list[Unit]:
    """In the order of their importance, because the last ones may not fit into the limit."""
    size = SMOKE if smoke else Size(tokens=256)
    first, *others = [size._replace(rows=rows) for rows in ((8, 16) if smoke else (256, 1024, 64))]

    def unit(name: str, size: Size, options: dict, **more) -> Unit:
        return Unit(f"{name}, {size.rows} rows", measure, {"size": size, "steps": STEPS, "options": options} | more)

    batching = unit(
        f"{names.GRPO_4}, continuous batching", first, GRPO | {"use_transformers_continuous_batching": True}
    )
    return [
        *(unit(method, first, options) for method, options in METHODS.items()),
        *(
            unit(
                f"{names.GRPO_4}, {choice}", first, GRPO | {"zero_variance_groups": choice}, frac_certain=FRAC_CERTAIN
            )
            for choice in ("keep", "skip")
        ),
        *(unit(method, size, options) for size in others for method, options in METHODS.items()),
        *([] if smoke else [batching]),  # takes a minute on a CPU
    ]


def main(output_dir: Path, limit: float, smoke: bool) -> bool:
    """Returns whether all units have succeeded."""
    all_units = units(smoke)
    results = run(all_units, output_dir / "speed.json", limit)

    def average(row: dict, name: str) -> float:
        return mean(step[name] for step in row["logs"][1:])

    rows = [results[unit.name] | {"method": unit.name} for unit in all_units if "logs" in results.get(unit.name, {})]
    columns = {
        "Method": lambda row: row["method"],
        "Step, s": lambda row: f"{mean(row['step_seconds'][1:]):.2f}",
        "Generation, s": lambda row: f"{average(row, 'ada/time/generate'):.2f}",
        "Rollouts per prompt": lambda row: f"{average(row, 'ada/samples_per_prompt/mean'):.1f}",
        "Zero-variance groups": lambda row: f"{average(row, 'ada/frac_zero_advantage_groups'):.0%}",
        "Memory, GiB": lambda row: f"{row['memory_gib']:.1f}" if row["memory_gib"] else "–",
    }
    print(markdown(rows, columns))
    return succeeded(all_units, results)
