"""Sentences and tables of the pages, on made-up runs whose differences are known."""

import pandas as pd
import pytest

from benchmarks import names, verdicts
from benchmarks.learning.confirmation import PARTS
from benchmarks.statistics import BETTER, SAME, WORSE, holm

from .test_report import RATE, RETRIES, planned


ON_PAGES = ("confirmation", "group size", "number of retries", "longer answers", "passes over the data", "paper")
ON_PAGES += ("repeated problems", "longer answers, 2 retries")  # of the third plan
ONE, TWO = names.BATCH, names.batch_retries(2)


def stored(noise: float = 0.001, also: tuple[str, ...] = (), **gains: dict) -> pd.DataFrame:
    """
    All parts on the pages, and those in `also`; gains in accuracy and pass@16 over 0.3 and 0.5 by the part's first
    word and the method.
    """
    rows = []
    for part in ON_PAGES + also:
        own = {(method, RATE): gain for method, gain in gains.get(part.split()[0], {}).items()}
        rows += planned(part, own, noise)
    return pd.DataFrame(rows)


def test_holm_by_hand():
    assert holm({"a": 0.016, "b": 0.04, "c": 0.03}) == ["a"], "0.03 is above 0.05 / 2"
    assert holm({"a": 0.016, "b": 0.04, "c": 0.02}) == ["a", "c", "b"]
    assert holm({"a": 0.02, "b": 0.021, "c": 0.022}) == [], "0.02 is above 0.05 / 3"


def test_a_gain_is_attributed_to_the_number_of_prompts_only_if_the_baseline_has_none():
    claim = "**The gain comes from more distinct prompts**"
    of_prompts = {"confirmation": {ONE: (0.05, 0)}}
    text = verdicts.why(stored(**of_prompts))
    assert text.startswith(claim) and "has no significant gain" in text and "add one (+0.03" in text
    of_both = verdicts.why(stored(**of_prompts, group={names.BATCH_4: (0.02, 0)}))
    assert not of_both.startswith(claim) and "has a significant gain" in of_both
    assert "four times as many add none" in verdicts.why(stored())


def test_short_answers_are_compared_with_the_better_grpo_in_each_metric():
    rows = stored(number={TWO: (0.05, -0.05), names.GRPO_8: (0.02, -0.06)}, noise=0.01)
    text = verdicts.short_answers(rows)
    assert f"are {BETTER} the better GRPO (n=8) in accuracy: +0.030" in text
    assert f"; pass@16: {WORSE.removesuffix(' than')} (-0.0" in text, "than GRPO n=4, whose pass@16 is higher"
    assert "survive" not in text and "the only one" not in text, "other planned tests are significant as well"
    table = verdicts.readme_table(rows).splitlines()
    short = [line.split(" | ")[1] for line in table[2:] if line.split(" | ")[1] != ""]
    assert short[:3] == [names.GRPO_8, names.GRPO_4, "2 retries"]


def test_the_correction_of_the_planned_tests():
    rows = stored(number={TWO: (0.05, 0)}, noise=0)
    p_values = verdicts.planned_p_values(rows)
    assert len(p_values) == 12
    test = ("number of retries", TWO, "accuracy")
    assert p_values[test] < 1e-6 and p_values["number of retries", TWO, "pass@16"] == 1
    assert verdicts.corrected(rows, test) == "the only one of twelve planned tests to survive Holm's correction"
    assert verdicts.corrected(rows, ("longer answers", RETRIES, "accuracy")).startswith("not significant after")
    assert verdicts.correction(rows).count("p = ") == 1


def test_families_share_the_gain():
    rows = stored(number={TWO: (0.05, 0)}, noise=0)
    other = rows[rows["family"] == "clock"].copy()
    is_retried = other["method"] == TWO
    for family, gain in (("backward", 0.0), ("products", 0.01), ("decimals", 0.04), ("terms", 0.0)):
        own = other.assign(family=family)
        own.loc[is_retried, "accuracy"] = 0.3 + gain
        own.loc[own["step"] == 0, "accuracy"] = 0.1 if family == "backward" else 0.2
        rows = pd.concat([rows, own])
    found = verdicts.stored_part("number of retries", rows)
    # 0.05 of the clock, 0.04 and 0.01: all of the gain is in three of five families.
    assert verdicts.families(found, rows) == "Three of 5 families have 100% of the gain, the hardest none."


def test_a_change_since_the_start_is_said_with_its_significance():
    gains = {ONE: (0, -0.15), TWO: (0, -0.04), RETRIES: (0, -0.04), names.GRPO_4: (0, -0.08)}
    text = verdicts.repeated_problems(stored(repeated=gains))
    assert "2.3 visits each with GRPO n=4, 9.4 with one rollout. " in text
    assert (
        "pass@16 is significantly lower with GRPO n=4, one rollout, 2 retries, 3 retries. Use retries there." in text
    )
    without = verdicts.repeated_problems(stored(repeated={TWO: (0, -0.2), RETRIES: (0, -0.2)}))
    assert "lower with 2 retries, 3 retries; not significantly changed with GRPO n=4, one rollout." in without
    assert "Use retries" not in without


@pytest.mark.parametrize(
    ("gains", "chosen"), [((0.0, 0.0), TWO), ((0.0, 0.1), RETRIES), ((-0.1, 0.1), TWO), ((-0.1, 0.0), TWO)]
)
def test_three_retries_take_the_place_of_two_if_they_are_better(gains, chosen):
    rows = stored(repeated={RETRIES: gains}, noise=0)
    assert verdicts.with_retries(verdicts.stored_part("repeated problems", rows)) == chosen


def test_longer_answers_are_significant_or_not():
    text = verdicts.longer_answers(stored())
    assert "2 retries minus GRPO n=4: accuracy +0.000±0.001; pass@16 +0.000±0.001." in text
    text = verdicts.longer_answers(stored(longer={TWO: (0.05, 0)}))
    assert "accuracy +0.050±0.001, significant; pass@16 +0.0" in text


def test_secondary_methods_are_marked():
    cells = [line.split(" | ")[0] for line in verdicts.results_table("passes over the data", stored()).splitlines()]
    methods = [cell.removeprefix("| ") for cell in cells[2:]]
    assert methods == [names.GRPO_4, "one rollout †", "3 retries", "Est (EMA)", "Seq-balance (the default) †"]


def test_verdict_in_words():
    gains = {RETRIES: (0, 0.1), ONE: (0, -0.1)}
    first, second, third = verdicts.verdict(stored(repeated=gains)).splitlines()
    assert first.startswith("- **Rewards of 0 or 1, short answers: 2 retries.** Accuracy: ")
    assert "significantly lower with one rollout;" in second
    assert "significantly higher with 3 retries" in second
    assert SAME in third


def test_numbers_of_retries_by_two_rules():
    one, three = names.batch_retries(1), names.batch_retries(3)
    agree = stored(number={one: (0.05, 0), TWO: (0.02, 0)}, noise=0)
    assert verdicts.numbers_by_rule(agree).endswith("is 1 by the rules of the second and of the third plan.")
    # The first plan has 1 and 3 retries, and its pass@16 with 1 is too low for the second rule.
    differ = stored(number={one: (0.03, 0)}, confirmation={one: (0, -0.1), three: (0.05, 0)}, noise=0)
    text = verdicts.numbers_by_rule(differ)
    assert "second plan picks 1" in text and text.endswith("in addition, 3 with SmolLM2.")


def test_the_second_plan_follows_the_third_on_the_same_task():
    before = stored(repeated={TWO: (0.05, 0.1)})
    third, about, second = verdicts.tables("longer answers, 2 retries", before).split("\n\n")
    assert third == verdicts.results_table("longer answers, 2 retries", before)
    assert about.endswith("seeds 21 to 23:") and second == verdicts.results_table("longer answers", before)
    rows = stored(also=("second model family",), repeated={TWO: (0.05, 0.1)}, second={TWO: (-0.05, 0)}, noise=0)
    assert "higher with 2 retries; not significantly changed with GRPO n=4, " in verdicts.repeated_problems(rows)
    assert "2 retries minus GRPO n=4: accuracy +0.000±0.000; pass@16" in verdicts.longer_answers(rows)
    table = verdicts.readme_table(rows)
    assert "problems, repeated (5 seeds; " in table and "|  | 3 retries † |" in table
    assert ", vocabulary cut: accuracy -0.050±0.000, significant; pass@16 " in verdicts.readme_results(rows, "")
    assert "Gemma" not in verdicts.readme_results(before, "")
    again, second_plan = verdicts.tables("repeated problems", rows).split("seeds 21 to 23:\n\n")
    assert "| 2 retries | 0.350 (**+0.050±0.000**)" in again and "Est (EMA)" in second_plan
    assert "2 retries" not in second_plan and "**+0.050±0.000**, **+0.100±0.000**" in verdicts.retries_table(rows)
    assert len(verdicts.planned_p_values(rows)) == 12, "of the second plan only"
    assert "with Gemma" in verdicts.numbers_by_rule(rows)


def test_the_second_model_family_is_named_when_it_is_finished():
    before, part = stored(), "second model family"
    assert verdicts.another_model(before) == "" and "Gemma" not in verdicts.verdict(before)
    assert verdicts.short_tables(before) == verdicts.results_table("number of retries", before)
    rate = dict(PARTS[part].methods)[TWO]
    rows = pd.concat([before, pd.DataFrame(planned(part, {(TWO, rate): (0.05, 0)}))])
    text = verdicts.short_answers(rows)
    assert " With [Gemma 3 270M](docs/results.md#short-answers), vocabulary cut: accuracy +0.050±0.000, sig" in text
    assert text.endswith("pass@16 +0.000±0.000.")
    _, about, table = verdicts.short_tables(rows).split("\n\n")
    assert about.endswith("seeds 41 to 45 (41 and 42: GRPO n=4 and 2 retries only):")
    methods = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    assert methods == ["| GRPO n=4", "| GRPO n=8", "| 2 retries", "| 3 retries †"]
    assert f"- **The same with Gemma 3 270M.** Accuracy: {BETTER} the better GRPO; " in verdicts.verdict(rows)


def test_gains_by_number_of_retries():
    text = verdicts.retries_table(stored(number={RETRIES: (0.02, -0.02)}))
    none, one, two, three, seven = (line.split(" | ") for line in text.splitlines()[2:7])
    assert none[1] == "–" and one[3] == "–" and seven[1] == seven[3] == "–"
    assert two[2] == "–" and "**+0.02" in three[1] and "**-0.0" in three[1]


@pytest.mark.parametrize("write", [verdicts.paper_sentence, verdicts.correction, verdicts.readme_table])
def test_texts_of_runs_without_any_difference_claim_none(write):
    assert "significantly" not in write(stored(noise=0))
