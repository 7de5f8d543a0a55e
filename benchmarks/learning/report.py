"""
The tables and figures of `docs/benchmarks.md`, from stored results only: `python -m benchmarks.learning.report`.

They come from `benchmarks.learning.equal_tokens` (equal tokens and equal steps, learning rates tuned), `one_rollout` and
`language_model`. `benchmarks.learning.run` (the same prompts per step, as in the paper, one learning rate) is for `docs/reproducing_the_paper.md`. `--runs outputs/learning/runs` first
stores the records of the latter as two parquet files in `benchmarks/results`.
"""

import argparse
import math
from pathlib import Path

import pandas as pd

from ..common import FIGURES, RESULTS, ROOT, fill, interval, load_rows, markdown
from . import equal_tokens, figures, one_rollout
from .figures import CHEAP
from .prompt_sets import BIN_EDGES, PROMPT_SETS
from .run import METHODS, PROMPTS_PER_STEP
from .statistics import by_seed, collect, cost_to_reach, paired_difference


DOCUMENT, PAPER, RECIPES = (
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "reproducing_the_paper.md",
    ROOT / "recipes" / "README.md",
)
FILES = ("learning_steps.parquet", "learning_evaluations.parquet")
DEFAULT, POSTERIOR, BATCH = "Seq-balance, 1/√p, corrected", "Posterior n=1", "Batch n=1"
TWICE, CHEAP_TWICE = "Posterior n=1, 2 iterations", "GRPO n=4, 2 iterations"
CHOOSING, ROUNDS = "Posterior n=1, 1 of 3", "Rounds across steps"
STRONG = "GRPO n=8"  # beside CHEAP what methods are compared with
NO_SEED, NOT_REACHED = "–", "not reached"
SPENT = "CPU s per step, fastest seed"  # the others tell what else ran on the machine
PILOT_SEED = 0  # of the language model's short runs
MAIN_SET, HARD_SET = "mixture", "hard"  # of the language model's; the first leads
LANGUAGE = (  # methods on the language model, in the order of the table
    "GRPO n=4",
    "GRPO n=8",
    "DAPO n=4",
    "Seq-balance",
    BATCH,
    POSTERIOR,
    TWICE,
    CHOOSING,
    ROUNDS,
)
LANGUAGE_KS = (4, 16, 64)
DIVERSITY = ("hard", "large")
FIRST_SCREEN = {  # method: its name on the first screen
    "GRPO n=4": "GRPO n=4",
    "GRPO n=8": "GRPO n=8",
    "DAPO n=4": "DAPO n=4",
    DEFAULT: "Seq-balance, the default",
    POSTERIOR: "**Posterior, n=1**",
    CHEAP_TWICE: "GRPO n=4, 2 iterations",
    TWICE: "**Posterior, n=1, 2 iterations**",
}
SHOWN = (*FIRST_SCREEN, ROUNDS, CHOOSING)  # the others are in the tables of parts
ABLATION = {  # method: what it has beside the one above it, or (indented) beside the posterior with one rollout
    "GRPO n=4": "GRPO n=4",
    CHEAP_TWICE: "2 optimizer iterations",
    "GRPO n=4, not scaled": "no division by the standard deviation",
    "Posterior n=4": "posterior baseline",
    POSTERIOR: "1 rollout of 4 times the prompts",
    "Posterior n=1, counts": "… its counts only",
    "Posterior n=1, value": "… its value head only",
    equal_tokens.KNOWN: "… if the pass rates were known",
    "Posterior n=1, 1/√p": "… with weight 1/√p",
    TWICE: "… with 2 optimizer iterations",
    ROUNDS: "… with rounds across steps",
    CHOOSING: "… with the best of 3 prompts",
}
WHICH_PROMPTS = {  # the posterior that asks in the data's order: what differs from it in the prompts that are asked
    POSTERIOR: (
        ROUNDS,
        "Rounds across steps, at most 4",
        "Rounds across steps, at most 2",
        "Posterior n=1, 1 of 2",
        CHOOSING,
        "Posterior n=1, 1 of 4",
        equal_tokens.BEST_KNOWN,
    ),
    TWICE: ("Rounds across steps, 2 iterations", "Posterior n=1, 1 of 3, 2 iterations"),
}
ARITHMETIC_RECIPES = {  # of recipes/arithmetic: the method of the comparison that each is
    "grpo-n4": "GRPO n=4",
    "grpo-n8": "GRPO n=8",
    "grpo-n16": "GRPO n=16",
    "seq-pos": "Seq-pos",
    "seq-balance": "Seq-balance, corrected",
    "est-ema": "Est-EMA n=4",
    "est-value": "Est-value n=4",
    "posterior": POSTERIOR,
    "rounds": ROUNDS,
}
REASONING_RECIPES = {  # and what else is on the command line: method
    "reasoning/grpo-n4.yaml": CHEAP,
    "reasoning/batch.yaml": BATCH,
    "reasoning/posterior.yaml": POSTERIOR,
    "reasoning/posterior.yaml --prompt_oversampling 3": CHOOSING,
    "reasoning/posterior.yaml --adaptive_sampling seq-pos --num_generations 1 --max_rounds 8": ROUNDS,
}
SORTING_RECIPES = {  # of recipes/sorting: set and method
    "grpo-n4": ("sorting", CHEAP),
    "posterior": ("sorting", POSTERIOR),
    "posterior-graded": ("sorting-graded", f"{POSTERIOR}, scaled"),
}


def store(runs: Path, directory: Path = RESULTS) -> None:
    """Write the records in `runs` as two tables."""
    directory.mkdir(parents=True, exist_ok=True)
    for table, name in zip(collect(runs.glob("*.json")), FILES, strict=True):
        floats = table.select_dtypes("float64").columns
        table.astype(dict.fromkeys(floats, "float32")).to_parquet(directory / name, index=False, compression="zstd")


def show(mean_and_half: tuple[float, float], digits: int = 3, sign: bool = False) -> str:
    mean, half = mean_and_half
    if math.isnan(mean):
        return NO_SEED
    mean = round(mean, digits) + 0.0  # no "-0.000"
    text = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
    return text if math.isnan(half) else f"{text} ± {half:.{digits}f}"


def final(runs: dict[int, pd.DataFrame], column: str = "accuracy") -> dict[int, float]:
    """By seed, what the last evaluation says."""
    return {seed: float(run[column].iloc[-1]) for seed, run in runs.items()}


def half_way(runs: dict[int, pd.DataFrame]) -> dict[int, float]:
    """By seed, the accuracy after half of the steps."""
    return {seed: float(run[run["step"] <= run["step"].max() / 2]["accuracy"].iloc[-1]) for seed, run in runs.items()}


def mean_of(values: dict[int, float]) -> tuple[float, float]:
    return interval(list(values.values()))


def against(own: dict[int, float], other: dict[int, float]) -> str:
    """Paired difference, bold where its interval leaves out 0. An interval of two seeds says nothing, and is left out."""
    mean, half = paired_difference(own, other)
    if len(own.keys() & other.keys()) < 3:
        return show((mean, math.nan), sign=True)
    text = show((mean, half), sign=True)
    return f"**{text}**" if abs(mean) > half else text


def with_difference(own: dict[int, float], cheap: dict[int, float], shown: bool) -> str:
    """The mean, and in brackets the difference to `cheap` if it is to be shown."""
    if not own:
        return NO_SEED
    return f"{mean_of(own)[0]:.3f}" + (f" ({against(own, cheap)})" if shown else "")


def as_table(rows: list[dict[str, str]]) -> str:
    """Rows of text, whose keys are the headers."""
    return markdown(rows, {name: lambda row, name=name: row[name] for name in rows[0]})


def share_to_reach(runs: dict[int, pd.DataFrame], reference: dict[int, pd.DataFrame]) -> str:
    """Tokens until the reference's mean final accuracy, in those that the reference spends; the median over seeds."""
    if not reference:
        return NO_SEED
    target = mean_of(final(reference))[0]
    spent = mean_of(final(reference, "generated_tokens"))[0]
    costs = sorted(cost_to_reach(run, "generated_tokens", target) for run in runs.values())
    median = costs[len(costs) // 2]  # of an even number of seeds the worse one
    return NOT_REACHED if math.isinf(median) else f"{median / spent:.2f}×"


def of_set(evaluations: pd.DataFrame, prompt_set: str, methods) -> dict[str, dict[int, pd.DataFrame]]:
    found = {method: by_seed(evaluations, prompt_set, method) for method in methods}
    return {method: runs for method, runs in found.items() if runs}


def sets_of(equal: pd.DataFrame) -> list[str]:
    """Those that methods can be compared on."""
    return [name for name in equal_tokens.SETS if by_seed(equal, name, CHEAP)]


def first_table(equal: pd.DataFrame) -> str:
    """Final accuracy on every set, and the difference to GRPO n=4."""
    sets, rows = sets_of(equal), []
    for method in FIRST_SCREEN:
        row = {"Method": FIRST_SCREEN[method]}
        for name in sets:
            runs, cheap = by_seed(equal, name, method), by_seed(equal, name, CHEAP)
            row[equal_tokens.title(name).capitalize()] = with_difference(final(runs), final(cheap), method != CHEAP)
        rows.append(row)
    return as_table(rows)


def verdict(equal: pd.DataFrame, single: pd.DataFrame) -> str:
    """What a token buys on the small models, whoever wins."""
    lines = {
        "`batch`, one rollout per prompt": differences(single, BATCH),
        "`posterior` beside it": differences(single, POSTERIOR, BATCH, "`batch`"),
        "Seq-balance, the paper's mode and our default": differences(equal, DEFAULT),
    }
    return "\n".join(f"- **{name}**: {text}." for name, text in lines.items() if text)


def standing(mean: float, half: float) -> str:
    """What a paired difference says, whose 95 % interval is ± `half`."""
    return "level with" if not abs(mean) > half else "ahead of" if mean > 0 else "behind"


def differences(equal: pd.DataFrame, method: str, reference: str = CHEAP, called: str = CHEAP) -> str:
    """Paired differences from a reference, the sets grouped by what they say."""
    said = {"ahead of": [], "level with": [], "behind": []}
    for name in sets_of(equal):
        runs, others = by_seed(equal, name, method), by_seed(equal, name, reference)
        if runs and others:
            mean, half = paired_difference(final(runs), final(others))
            said[standing(mean, half)].append(f"{equal_tokens.title(name)} ({show((mean, half), sign=True)})")
    return "; ".join(f"{word} {called} on {', '.join(sets)}" for word, sets in said.items() if sets)


def tokens_table(equal: pd.DataFrame, prompt_set: str) -> str:
    """Every method at its best rate, at equal tokens and steps."""
    found = of_set(equal, prompt_set, SHOWN)
    cheap, strong = (final(found[method]) if method in found else {} for method in (CHEAP, STRONG))

    def row(method: str, runs: dict[int, pd.DataFrame]) -> dict[str, str]:
        own = final(runs)
        return {
            "Method": method,
            "Rate": f"{next(iter(runs.values()))['rate'].iloc[-1]:g}",
            "Seeds": str(len(runs)),
            "Accuracy": show(mean_of(own)) if len(own) > 2 else f"{mean_of(own)[0]:.3f}",
            f"against {CHEAP}": against(own, cheap) if method != CHEAP and cheap else "",
            f"against {STRONG}": against(own, strong) if method != STRONG and strong else "",
            f"{STRONG}'s accuracy after": share_to_reach(runs, found.get(STRONG, {})),
            "1k tokens": f"{mean_of(final(runs, 'generated_tokens'))[0] / 1e3:.0f}",
            "CPU s": f"{mean_of(final(runs, 'cpu_seconds'))[0]:.0f}",
        }

    rows = [row(method, runs) for method, runs in found.items()]
    return as_table(rows)


def one_rollout_table(runs: pd.DataFrame) -> str:
    """What one rollout per prompt is compared with: share right, and mean graded reward where rewards are graded."""
    rows = []
    for method in one_rollout.METHODS:
        row = {"Method": method}
        for name in sets_of(runs):
            own, cheap = (by_seed(runs, name, m) for m in (method, CHEAP))
            row[equal_tokens.title(name).capitalize()] = with_difference(final(own), final(cheap), method != CHEAP)
            if name == "sorting-graded":
                own, cheap = final(own, "graded"), final(cheap, "graded")
                row["its mean reward"] = with_difference(own, cheap, method != CHEAP)
        rows.append(row)
    return as_table(rows)


def more_tokens_table(equal: pd.DataFrame) -> str:
    """As many steps with a quarter of the rollouts: accuracy, and the difference to GRPO n=16."""
    sets = [name for name in sets_of(equal) if by_seed(equal, name, equal_tokens.MORE_TOKENS)]
    rows = []
    for method, rollouts in ((equal_tokens.MORE_TOKENS, 4), (CHEAP, 1), (POSTERIOR, 1), (TWICE, 1)):
        row = {
            "Method": method.split(", 4 times")[0],
            "Rollouts per step": str(rollouts * equal_tokens.ROLLOUTS_PER_STEP),
        }
        for name in sets:
            own, most = (final(by_seed(equal, name, m)) for m in (method, equal_tokens.MORE_TOKENS))
            row[equal_tokens.title(name).capitalize()] = with_difference(own, most, method != equal_tokens.MORE_TOKENS)
        rows.append(row)
    return as_table(rows)


def before_training(evaluations: pd.DataFrame, prompt_set: str) -> pd.Series:
    """Means over the seeds, since those of the language model do not all start from the same weights."""
    start = evaluations[(evaluations["prompt_set"] == prompt_set) & (evaluations["step"] == 0)]
    return start.groupby("seed").mean(numeric_only=True).mean()


def start_row(evaluations: pd.DataFrame, prompt_set: str, columns: dict[str, str]) -> dict[str, str]:
    """A table's first row: `columns` maps a header to the column before training."""
    before = before_training(evaluations, prompt_set)
    return {"Method": "before training"} | {label: show((before[name], math.nan)) for label, name in columns.items()}


def pass_table(runs: pd.DataFrame, prompt_set: str, ks=(1, 8, 64, 256), methods=SHOWN) -> str:
    """pass@k and entropy before and after training."""
    found = of_set(runs, prompt_set, methods)
    columns = [f"pass@{k}" for k in ks] + ["entropy"]
    rows = [start_row(runs, prompt_set, {name: name for name in columns})]
    for method, runs in found.items():
        if len(runs) > 2:
            rows.append({"Method": method} | {name: show(mean_of(final(runs, name))) for name in columns})
    return as_table(rows)


def parts_table(equal: pd.DataFrame, parts: list[tuple[str, str, str]], sets=("hard", "large")) -> str:
    """Final accuracy and pass@16 of `(name, method, reference)`, and how far they are from the reference's."""
    rows = []
    for part, method, reference in parts:
        row = {"": part}
        for name in sets:
            runs, others = by_seed(equal, name, method), by_seed(equal, name, reference)
            for column, label in (("accuracy", name.capitalize()), ("pass@16", f"{name.capitalize()}, pass@16")):
                row[label] = with_difference(final(runs, column), final(others, column), method != reference)
        rows.append(row)
    return as_table(rows)


def ablation_table(equal: pd.DataFrame) -> str:
    """What each part adds to GRPO."""
    return parts_table(equal, [(part, method, CHEAP) for method, part in ABLATION.items()])


def which_prompts_table(equal: pd.DataFrame) -> str:
    """What rounds across steps, and choosing, add to the posterior."""
    return parts_table(
        equal,
        [
            (method, method, reference)
            for reference, methods in WHICH_PROMPTS.items()
            for method in (reference, *methods)
        ],
    )


def steps_table(steps: pd.DataFrame, evaluations: pd.DataFrame, prompt_set: str) -> str:
    """The same prompts in every step, as in the paper: accuracy after all steps, and what the steps cost."""
    found = of_set(evaluations, prompt_set, METHODS)
    means = steps[steps["prompt_set"] == prompt_set].groupby("method").mean(numeric_only=True)
    strong = final(found[STRONG])

    def row(method: str, runs: dict[int, pd.DataFrame]) -> dict[str, str]:
        own, of_steps = final(runs), means.loc[method]
        return {
            "Method": method,
            "Accuracy": show(mean_of(own)),
            f"against {STRONG}": against(own, strong) if method != STRONG else "",
            "pass@8": show(mean_of(final(runs, "pass@8"))),
            "Rollouts per prompt": f"{of_steps['rollouts'] / PROMPTS_PER_STEP:.1f}",
            "trained on": f"{of_steps['trained_tokens'] / of_steps['generated_tokens']:.0%}",
            "Zero-gradient prompts": f"{of_steps['frac_zero_advantage_groups']:.0%}",
            "1k tokens": f"{mean_of(final(runs, 'generated_tokens'))[0] / 1e3:.0f}",
            "CPU s": f"{mean_of(final(runs, 'cpu_seconds'))[0]:.0f}",
        }

    rows = [row(method, runs) for method, runs in found.items()]
    return as_table(rows)


def difficulty_table(evaluations: pd.DataFrame, prompt_set: str) -> str:
    """Accuracy on unselected problems, by the pass rate that the base model has on them."""
    bins = list(range(len(BIN_EDGES) - 1))
    rows = []
    for method, runs in of_set(evaluations, prompt_set, METHODS).items():
        if not rows:
            before = next(iter(runs.values())).iloc[0]
            rows.append({"method": "before training"} | {i: (float(before[f"bin_{i}"]), math.nan) for i in bins})
        rows.append({"method": method} | {i: mean_of(final(runs, f"bin_{i}")) for i in bins})
    columns = {"Method": lambda row: row["method"]}
    for i in bins:
        columns[f"{BIN_EDGES[i]:g}–{BIN_EDGES[i + 1]:g}"] = lambda row, i=i: show(row[i])
    return markdown(rows, columns)


def expect_arithmetic(equal: pd.DataFrame, evaluations: pd.DataFrame) -> str:
    """
    What the recipes end with on the comparison's sets, against GRPO n=4 of the same comparison: their base models differ.
    """
    rows = []
    for recipe, method in ARITHMETIC_RECIPES.items():
        if method == CHEAP:
            continue
        table = evaluations if method in METHODS else equal
        row, tokens = {"Recipe": f"`arithmetic/{recipe}.yaml`"}, []
        for name in PROMPT_SETS:
            runs, cheap = by_seed(table, name, method), by_seed(table, name, CHEAP)
            row[f"Accuracy minus `grpo-n4`'s, {name}"] = against(final(runs), final(cheap))
            times = mean_of(final(runs, "generated_tokens"))[0] / mean_of(final(cheap, "generated_tokens"))[0]
            tokens.append(NO_SEED if math.isnan(times) else f"{times:.1f}×")
        rows.append(row | {"its tokens": " / ".join(tokens)})
    return as_table(rows)


def expect_sorting(single: pd.DataFrame) -> str:
    rows = []
    for recipe, (name, method) in SORTING_RECIPES.items():
        runs = by_seed(single, name, method)
        row = {"Recipe": f"`sorting/{recipe}.yaml`", "Accuracy": show((mean_of(final(runs))[0], math.nan))}
        rows.append(row | {"1k tokens": f"{mean_of(final(runs, 'generated_tokens'))[0] / 1e3:.0f}"})
    return as_table(rows)


def expect_reasoning(language: pd.DataFrame) -> str:
    whole, rows = language[language["family"] == "all"], []
    for recipe, method in REASONING_RECIPES.items():
        runs = by_seed(whole, MAIN_SET, method)
        row = {"Recipe": f"`{recipe}`", "Accuracy": f"{mean_of(final(runs))[0]:.3f}"}
        rows.append(row | {"pass@16": f"{mean_of(final(runs, 'pass@16'))[0]:.3f}"})
    return as_table(rows)


def language_table(runs: pd.DataFrame, prompt_set: str, brief: bool = False) -> str:
    """The language model after training. `brief`: without the steps' own numbers, and methods from three seeds on."""
    runs = runs[runs["family"] == "all"]
    found = {method: by_seed(runs, prompt_set, method) for method in LANGUAGE}
    found = {method: own for method, own in found.items() if len(own) > (2 if brief else 0)}
    cheap, strong = found.get(CHEAP, {}), found.get(STRONG, {})
    rows = [start_row(runs, prompt_set, {"Accuracy": "accuracy", "pass@16": "pass@16"})]
    for method, own in found.items():
        row = {"Method": method, "Seeds": str(len(own)), "Accuracy": f"{mean_of(final(own))[0]:.3f}"}
        for other, reference in ((CHEAP, cheap), (STRONG, strong)):
            row[f"against {other}"] = against(final(own), final(reference)) if method != other and reference else ""
        row[f"{STRONG}'s accuracy after"] = share_to_reach(own, strong)
        row["pass@16"] = with_difference(
            final(own, "pass@16"), final(cheap, "pass@16"), method != CHEAP and bool(cheap)
        )
        for column, label in (("zero_variance", "Zero-variance groups"), ("explained_variance", "Variance explained")):
            mean = mean_of(final(own, column))[0]
            own_kind = (column == "zero_variance") == ("n=1" not in method and "Rounds" not in method)
            own_kind &= method != BATCH  # whose share is a function of the number of rollouts
            row[label] = f"{mean:.2f}" if own_kind and not math.isnan(mean) else NO_SEED
        row[SPENT] = f"{min(float((run['cpu_seconds'] / run['step']).iloc[-1]) for run in own.values()):.1f}"
        rows.append(row)
    left_out = ("Seeds", "Zero-variance groups", "Variance explained", SPENT) if brief else ()
    columns = [name for name in rows[-1] if name not in left_out]
    return as_table([{name: row.get(name, "") for name in columns} for row in rows])


def pilot_table(pilots: pd.DataFrame) -> str:
    """The language model's short runs on a seed of their own, by which the rate was chosen and methods were left out."""
    whole = pilots[pilots["family"] == "all"]
    ends = whole[whole["step"] == whole["step"].max()]
    ends = ends.assign(generating=ends["generating_seconds"] * ends["step"] / ends["cpu_seconds"]).to_dict("records")
    rows = [start_row(whole, MAIN_SET, {"Accuracy": "accuracy", "pass@16": "pass@16"})]
    rows += [
        {
            "Method": run["method"],
            "Rate": f"{run['rate']:.0e}".replace("e-0", "e-"),
            "Accuracy": f"{run['accuracy']:.3f}",
            "pass@16": f"{run['pass@16']:.3f}",
            "Time generating": NO_SEED if math.isnan(run["generating"]) else f"{run['generating']:.0%}",
        }
        for run in sorted(ends, key=lambda run: (run["rate"], LANGUAGE.index(run["method"])))
    ]
    return as_table([{name: row.get(name, "") for name in rows[-1]} for row in rows])


def is_zero_variance(runs: pd.DataFrame, prompt_set: str) -> float:
    """Share of GRPO n=4's groups whose rollouts would all score the same before training."""
    whole = runs[(runs["family"] == "all") & (runs["prompt_set"] == prompt_set)]
    return float(whole[whole["step"] == 0]["alike"].mean())


def language_verdict(runs: pd.DataFrame, prompt_set: str) -> str:
    """What the language model says, in sentences, whoever wins; of methods and references from three seeds on."""
    whole = runs[runs["family"] == "all"]
    found = {method: by_seed(whole, prompt_set, method) for method in LANGUAGE}
    lines = [
        f"Before training, {is_zero_variance(runs, prompt_set):.0%} of GRPO n=4's groups have no contrast (exact)."
    ]
    references = [CHEAP, STRONG]
    for method in (BATCH, POSTERIOR, CHOOSING, ROUNDS):
        said: dict[str, list[str]] = {}
        tails: dict[str, list[str]] = {}
        for reference in references:
            ours, theirs = found[method], found[reference]
            if len(ours.keys() & theirs.keys()) > 2:
                difference = paired_difference(final(ours), final(theirs))
                shown = "" if reference in (CHEAP, STRONG) else f" ({show(difference, sign=True)})"  # the table has it
                said.setdefault(standing(*difference), []).append(reference + shown)
                tail = paired_difference(final(ours, "pass@16"), final(theirs, "pass@16"))
                if standing(*tail) != "level with":
                    tails.setdefault(f"pass@16 {standing(*tail)}", []).append(f"{reference} ({show(tail, sign=True)})")
        references.append(method)
        if said:
            parts = [f"{how} {', '.join(named)}" for how, named in (said | tails).items()]
            early = paired_difference(half_way(found[method]), final(found[STRONG]))
            if not math.isnan(early[0]):
                parts.append(f"at half of the steps {show(early, sign=True)} against {STRONG} at the end")
            lines.append(f"**{method}**: {'; '.join(parts)}.")
    return "\n".join(f"- {line}" for line in lines)


def family_table(runs: pd.DataFrame, prompt_set: str) -> str:
    """Family by family: accuracy, and the share of GRPO n=4's groups whose rollouts would all score the same, exact."""
    runs = runs[(runs["prompt_set"] == prompt_set) & (runs["family"] != "all")]
    rows = []
    for family, own in sorted(runs.groupby("family"), key=lambda item: -item[1][item[1]["step"] == 0]["alike"].mean()):
        start, end = own[own["step"] == 0], own[own["step"] == own["step"].max()]
        row = {"Family": family, f"{CHEAP}: groups without contrast": f"{start['alike'].mean():.0%}"}
        row["Accuracy before"] = f"{start['accuracy'].mean():.3f}"
        means = end.groupby("method")["accuracy"].mean()
        rows.append(row | {f"after, {method}": f"{means[method]:.3f}" for method in LANGUAGE if method in means})
    return as_table(rows)


def tables(
    equal: pd.DataFrame, steps: pd.DataFrame, evaluations: pd.DataFrame, single: pd.DataFrame
) -> dict[str, str]:
    """Every table by the name of its place in the document."""
    filled = {"first": first_table(equal), "ablation": ablation_table(equal), "one-rollout": one_rollout_table(single)}
    filled |= {"more-tokens": more_tokens_table(equal), "which-prompts": which_prompts_table(equal)}
    for name in equal["prompt_set"].unique():
        filled[f"tokens-{name}"] = tokens_table(equal, name)
        if name in DIVERSITY:
            filled[f"pass-{name}"] = pass_table(equal, name)
    for name in PROMPT_SETS:
        filled[f"steps-{name}"] = steps_table(steps, evaluations, name)
        filled[f"difficulty-{name}"] = difficulty_table(evaluations, name)
    return filled


def stored(results: Path = RESULTS) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Evaluations at equal tokens; steps and evaluations at the same prompts per step; evaluations with one rollout."""
    steps, evaluations = (pd.read_parquet(results / name) for name in FILES)
    return equal_tokens.reported(load_rows("equal_tokens")), steps, evaluations, one_rollout.stored()


def stored_language(pilots: bool = False) -> pd.DataFrame:
    """The language model's evaluations; `pilots`: those of the seed that is not reported."""
    rows = pd.DataFrame(load_rows("language_model"))
    rows = rows.astype(dict.fromkeys(("explained_variance", "alike", "generating_seconds"), float))
    return rows[(rows["seed"] == PILOT_SEED) == pilots]


def build(
    data: tuple[pd.DataFrame, ...],
    document: Path = DOCUMENT,
    paper: Path = PAPER,
    recipes: Path = RECIPES,
    pictures: Path = FIGURES,
) -> None:
    """Fill the tables of the documents, draw their figures, and say in that of the recipes what to expect of them."""
    for name, table in tables(*data).items():
        fill(name, table, paper if name.startswith(("steps-", "difficulty-")) else document)
    equal, _, evaluations, single = data
    fill("expect-arithmetic", expect_arithmetic(equal, evaluations), recipes)
    fill("expect-sorting", expect_sorting(single), recipes)
    drawn = figures.draw_all(equal, evaluations, ABLATION)
    language = stored_language()
    whole = language[language["family"] == "all"]
    fill("expect-reasoning", expect_reasoning(language), recipes)
    fill("language-pilots", pilot_table(stored_language(pilots=True)), document)
    for name in language["prompt_set"].unique():
        fill(f"language-verdict-{name}", language_verdict(language, name), document)
        fill(f"language-{name}", language_table(language, name), document)
        fill(f"families-{name}", family_table(language, name), document)
        fill(f"passes-{name}", pass_table(whole, name, LANGUAGE_KS, LANGUAGE), document)
        drawn[f"language_{name}"] = figures.language(language, name)
    for name, figure in drawn.items():
        figure.savefig(pictures / f"{name}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="Records of benchmarks.learning.run; default: what is stored.")
    args = parser.parse_args()
    if args.runs is not None:
        store(args.runs)
    build(stored())


if __name__ == "__main__":
    main()
