"""
Completions scored per second by `verify_answers` with 1 and 2 processes, and by TRL's serial `accuracy_reward`.

`python -m benchmarks.speed.verifier [--prompts 32] [--rollouts 8] [--workers 1 2]`. Two loads: one
completion per prompt, so that no comparison is shared between rows, and `--rollouts` completions per prompt, as in training. Four
answers in nine are integers. The methods alternate, each with new texts, and the best of `--repeats` is reported. All methods first
parse a few hundred texts, because the parser is slow at first.
"""

import argparse
import logging
import random
import time
from collections.abc import Callable

import psutil
from trl.rewards import accuracy_reward

from ada_trl.recipes.math.verification import verify_answers


FILLER = "We rewrite the sum, cancel the common factor of both sides and check that $x = {}$ is not a root. "


def answers(rng: random.Random) -> tuple[str, list[str]]:
    """A reference and possible answers: the same, equivalent forms, and incorrect ones."""
    a, b, c = (rng.randrange(2, 99) for _ in range(3))
    kind = rng.choice(["integer"] * 4 + ["fraction", "radical", "polynomial", "set", "interval"])
    if kind == "integer":
        return str(a * b), [str(a * b), f"{a} \\cdot {b}", str(a * b + 1), str(a)]
    if kind == "fraction":
        return f"\\frac{{{a}}}{{{b}}}", [
            f"\\frac{{{a}}}{{{b}}}",
            f"{a * c}/{b * c}",
            f"\\frac{{{b}}}{{{a}}}",
            f"{a / b:.2f}",
        ]
    if kind == "radical":
        return f"{a}\\sqrt{{{b}}}", [
            f"\\sqrt{{{a * a * b}}}",
            f"{a}\\sqrt{{{b}}}",
            f"{b}\\sqrt{{{a}}}",
            f"\\sqrt{{{b}}}",
        ]
    if kind == "polynomial":
        return f"(x+{a})(x+{b})", [f"x^2+{a + b}x+{a * b}", f"(x+{b})(x+{a})", f"x^2+{a}x+{b}", f"(x-{a})(x+{b})"]
    if kind == "set":
        return f"{a}, {a + b}", [f"\\{{{a + b}, {a}\\}}", f"{a}, {a + b}", f"{a}", f"{a}, {b}, {a + b}"]
    return f"({a}, {a + b}]", [f"({a}, {a + b}]", f"\\left({a}, {a + b}\\right]", f"[{a}, {a + b}]", f"({a}, {a + b})"]


def completions(prompts: int, rollouts: int, seed: int) -> tuple[list[str], list[str]]:
    """Distinct completions of about 1,000 to 6,000 characters, and their references."""
    rng = random.Random(seed)
    texts, references = [], []
    for _ in range(prompts):
        reference, forms = answers(rng)
        for _ in range(rollouts):
            filler = "".join(FILLER.format(rng.randrange(10**6)) for _ in range(rng.randrange(10, 60)))
            texts.append(f"{filler}\nThe final answer is $\\boxed{{{rng.choice(forms)}}}$.")
            references.append(f"${reference}$")
    return texts, references


def cpu_seconds() -> float:
    """CPU seconds used so far by this process and its children."""
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [this, *this.children(recursive=True)])


def measure(score: Callable, texts: list[str], references: list[str]) -> tuple[float, float, list]:
    """Seconds and CPU seconds per completion, and the scores."""
    start, cpu_start = time.perf_counter(), cpu_seconds()
    scores = score(texts, references)
    return (time.perf_counter() - start) / len(texts), (cpu_seconds() - cpu_start) / len(texts), scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def trl(texts: list[str], references: list[str]) -> list:
        return accuracy_reward([[{"content": text}] for text in texts], references)

    methods = {"TRL's accuracy_reward": trl} | {
        f"verify_answers, {n} process{'es' * (n > 1)}": lambda t, r, n=n: verify_answers(t, r, num_workers=n)
        for n in args.workers
    }
    for i, score in enumerate(methods.values()):
        score(*completions(256, 1, seed=hash((args.seed, i))))
    for rollouts in (1, args.rollouts):
        compare(methods, args.prompts * args.rollouts // rollouts, rollouts, args.repeats, args.seed + rollouts)


def compare(methods: dict[str, Callable], prompts: int, rollouts: int, repeats: int, seed: int) -> None:
    """Print the best time of each method, its ratio to the first method's, and how often their scores agree."""
    times = {name: [] for name in methods}
    for repeat in range(repeats):
        for i, (name, score) in enumerate(methods.items()):
            times[name].append(measure(score, *completions(prompts, rollouts, seed=hash((seed, repeat, i))))[:2])
    same_texts = completions(prompts, rollouts, seed)
    first, *others = (measure(score, *same_texts)[2] for score in methods.values())
    print(f"{repeats} × {prompts * rollouts} completions, {rollouts} per prompt")
    base = [min(column) for column in zip(*next(iter(times.values())), strict=True)]
    for (name, values), scores in zip(times.items(), [first, *others], strict=True):
        wall, cpu = (min(column) for column in zip(*values, strict=True))
        agreement = sum(a == b for a, b in zip(scores, first, strict=True)) / len(first)
        print(
            f"  {name:30} {1 / wall:6.0f} per second (ratio {base[0] / wall:5.2f}), {1000 * cpu:6.2f} ms of CPU each "
            f"(ratio {cpu / base[1]:5.2f}), same score {agreement:.1%}"
        )


if __name__ == "__main__":
    main()
