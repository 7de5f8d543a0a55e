"""`python -m ada_trl.plan`: what it reads, what it promises, what it recommends."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from ada_trl.cli import start
from ada_trl.core import EMAPassRate, ExitCondition, Rollout, eliminate, group_advantages, select_group
from ada_trl.pass_rates.store import save_pass_rates
from ada_trl.plan import main
from ada_trl.planning.observed import read_prompts
from ada_trl.planning.report import report
from ada_trl.planning.settings import TIE, most_gradients, recommend, settings


@pytest.fixture(scope="module")
def truth():
    return np.random.default_rng(0).beta(0.4, 1.2, size=3000)


@pytest.fixture(scope="module")
def counts_file(truth, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "counts.parquet"
    positives = np.random.default_rng(1).binomial(16, truth)
    pq.write_table(pa.table({"positives": positives, "draws": np.full(len(truth), 16)}), path)
    return path


def plan(path, **kwargs):
    return settings(read_prompts(path), **{"num_generations": 4, "budget": 16, "max_samples": 32} | kwargs)


def simulated(fields, truth, seed=0):
    """Share of the prompts with a gradient, and rollouts per prompt, through the real scheduler."""
    rng = np.random.default_rng(seed)
    n = fields["num_generations"]
    exit_condition = ExitCondition(fields.get("min_positives", 0), fields.get("min_negatives", 0))

    def draw(rows):
        rewards = (rng.random(len(rows)) < truth[[prompt for prompt, _ in rows]]).astype(float).tolist()
        return [Rollout(draw, reward, reward) for (_, draw), reward in zip(rows, rewards, strict=True)]

    pools = eliminate(
        len(truth),
        draw,
        exit_condition,
        samples_per_round=fields.get("samples_per_round", n),
        max_rounds=fields.get("max_rounds", 1),
        positive_threshold=0.7,
    )
    teach = [any(group_advantages(pool, select_group(pool, n, (i,)))) for i, pool in enumerate(pools)]
    return np.mean(teach), np.mean([len(pool) for pool in pools])


@pytest.mark.parametrize("method", ["GRPO", "Seq-pos", "Seq-balance"])
def test_the_plan_from_noisy_counts_foretells_the_run(truth, counts_file, method):
    """
    16 draws determine what up to 16 rollouts do. The plan is estimated from 3000 prompts and the run simulated on the
    same ones, so each is off by at most √(1/4 / 3000) per standard error: five of both. Rollouts lie in [4, 16].
    """
    for setting in [s for s in plan(counts_file, max_samples=16) if s.method == method]:
        teach, rollouts = simulated(setting.fields, truth)
        tolerance = 5 * np.sqrt(2 * 0.25 / len(truth))
        assert setting.with_gradient == pytest.approx(teach, abs=tolerance)
        assert setting.rollouts == pytest.approx(rollouts, abs=12 * tolerance)
        assert setting.per_gradient == pytest.approx(setting.rollouts / setting.with_gradient)


def test_exact_pass_rates_are_taken_as_they_are(tmp_path):
    path = tmp_path / "rates.csv"
    pa.csv.write_csv(pa.table({"rate": [0.5, 0.5, 0.0, 0.1]}), path)
    found = settings(read_prompts(path, column="rate"), num_generations=4, budget=4, max_samples=32)
    lost = (2 * 2 * 0.5**4 + 1 + 0.1**4 + 0.9**4) / 4
    assert found[0].with_gradient == pytest.approx(1 - lost)
    assert found[0].recovered == 0
    balance = next(s for s in found if describe_fields(s) == ("seq-balance", 8, 4, 2, 2))
    left = (2 * 2 * 0.5**32 + 1 + 0.1**32 + 0.9**32) / 4
    assert balance.with_gradient == pytest.approx(1 - left)
    assert balance.recovered == pytest.approx((lost - left) / lost)
    refill = next(s for s in found if s.method == "DAPO")
    assert refill.rollouts == pytest.approx(4 * (1 - lost**10) / (1 - lost))
    noisy = read_prompts(path, column="rate", draws=10)
    assert len(noisy.distribution.pass_rates) > 3  # with draws, the rates are estimates


def describe_fields(setting):
    names = ("adaptive_sampling", "samples_per_round", "max_rounds", "min_positives", "min_negatives")
    return tuple(setting.fields.get(name) for name in names)


def test_estimates_pay_only_where_they_tell_prompts_apart(tmp_path, counts_file):
    by_method = {(s.method, round(s.rollouts)): s for s in plan(counts_file)}
    assert by_method["Est", 8].with_gradient != pytest.approx(by_method["GRPO", 8].with_gradient, abs=1e-3)
    path = tmp_path / "same.csv"
    pa.csv.write_csv(pa.table({"pass_rate": [0.2] * 50}), path)
    same = {(s.method, round(s.rollouts)): s for s in plan(path)}
    assert same["Est", 8].with_gradient == pytest.approx(same["GRPO", 8].with_gradient)


def test_the_recommendation_has_nothing_in_its_table_ahead_of_it(counts_file):
    found = plan(counts_file)
    for budget in (1, 4, 16):
        affordable = [s for s in found if s.rollouts <= budget + 1e-9]
        best, shown = recommend(found, budget), most_gradients(found, budget)
        assert all(best.noise <= TIE * s.noise for s in affordable) and all(s in affordable for s in shown)
    assert {s.method for s in shown} == {
        "GRPO",
        "DAPO",
        "Seq-pos",
        "Seq-balance",
        "Est",
        "Posterior",
        "Batch",
        "Rounds",
    }
    balance = [s for s in affordable if s.method == "Seq-balance"]
    assert next(s for s in shown if s.method == "Seq-balance").with_gradient == max(s.with_gradient for s in balance)
    with pytest.raises(ValueError, match="budget of 0.5 .* cheapest setting's 1"):
        recommend(found, 0.5)


@pytest.mark.parametrize(("positives", "word"), [(0, "never"), (16, "always")])
def test_where_there_is_nothing_to_learn_it_says_so(positives, word, tmp_path, capsys):
    path = tmp_path / "counts.csv"
    pa.csv.write_csv(pa.table({"positives": [positives] * 50, "draws": [16] * 50}), path)
    main(["--pass_rates", str(path)])
    assert f"All of the 50 prompts {word} passed. There is nothing to learn" in capsys.readouterr().out


def test_against_the_mean_of_all_others_a_prompt_is_as_noisy_as_it_is_far_from_it(tmp_path):
    """E[(r − b)²] = p (1 − p) + (p − b)² with b the mean of all; the unit is GRPO with 4, whose noise is 4 / 3 of p (1 − p)."""
    path = tmp_path / "rates.csv"
    rates = np.array([0.5, 0.5, 0.1, 0.9])
    pa.csv.write_csv(pa.table({"pass_rate": rates}), path)
    (batch,) = (s for s in plan(path) if s.method == "Batch")
    own = (rates * (1 - rates)).mean()
    assert batch.noise == pytest.approx((own + rates.var()) / own / (4 / 3))


def test_the_posterior_is_compared_by_its_noise(tmp_path, counts_file):
    """Pass rates that are exact are a right prior: n / (n − 1) of GRPO's rollouts are saved; 16 draws say a little less."""
    path = tmp_path / "rates.csv"
    pa.csv.write_csv(pa.table({"pass_rate": [0.5, 0.5, 0.1, 0.9]}), path)
    exact = {s.fields.get("num_generations", 1): s for s in plan(path) if s.method == "Posterior"}
    assert sorted(exact) == [1, 2, 4]
    assert [exact[n].rollouts for n in (1, 2, 4)] == [1, 2, 4] and exact[1].with_gradient == 1
    assert exact[1].noise == pytest.approx(3 / 4, abs=1e-6)
    found = plan(counts_file)
    assert found[0].noise == 1  # GRPO with num_generations is the unit
    one = next(s for s in found if s.method == "Posterior" and s.rollouts == 1)
    assert 3 / 4 < one.noise < 1
    assert recommend(found, 16).fields == recommend(found, 1).fields == {"baseline": "posterior"}
    grpo = {s.fields["num_generations"]: s.noise for s in found if s.method == "GRPO"}
    assert [grpo[n] for n in (8, 16)] == pytest.approx([(8 / 7) / (4 / 3), (16 / 15) / (4 / 3)])


def test_a_run_that_knows_nothing_is_not_promised_anything(tmp_path):
    """Counts of one draw each: the prior of every prompt is almost that of all, and one number for 0.05 and 0.95 is off."""
    path = tmp_path / "counts.csv"
    pa.csv.write_csv(pa.table({"positives": [0, 1] * 50, "draws": [1] * 100}), path)
    known = tmp_path / "rates.csv"
    pa.csv.write_csv(pa.table({"positives": [5, 95] * 50, "draws": [100] * 100}), known)
    noise = [next(s.noise for s in plan(file) if s.method == "Posterior") for file in (path, known)]
    assert noise[0] > noise[1] + 0.05


def test_recommended_fields_are_accepted_by_the_configuration(counts_file, tmp_path):
    from ada_trl import AdaGRPOConfig

    for setting in most_gradients(plan(counts_file), 16):
        if setting.fields:
            size = 8 * setting.fields.get("num_generations", 1)
            AdaGRPOConfig(tmp_path, use_cpu=True, bf16=False, per_device_train_batch_size=size, **setting.fields)


def test_a_difficulty_record_is_read_by_its_discounted_counts(tmp_path):
    estimator = EMAPassRate(decay=0.5)
    for step, positives in enumerate([0, 0, 6]):  # it has just learned the second prompt
        estimator.observe(["a", "b"], [0, positives], [8, 8], step=step)
    save_pass_rates(tmp_path / "ada_pass_rates.parquet", estimator)
    prompts = read_prompts(tmp_path / "ada_pass_rates.parquet")
    assert prompts.observed == pytest.approx([0, 6 / 14])


def test_a_run_a_selection_and_their_draws_are_found(tmp_path):
    """The record of the last checkpoint; a selection by `recipes.math.select`, with the draws behind its pass rates."""
    estimator = EMAPassRate()
    estimator.observe(["a", "b"], [0, 6], [8, 8], step=1)
    for step in (9, 10):  # the numbers' order, not the names'
        save_pass_rates(tmp_path / "run" / f"checkpoint-{step}" / "ada_pass_rates.parquet", estimator)
        estimator.observe(["a", "b"], [8, 8], [8, 8], step=2)
    assert read_prompts(tmp_path / "run").observed == pytest.approx([8 / 15.2, (8 + 5.4) / 15.2])
    (tmp_path / "easy" / "data").mkdir(parents=True)
    rows = {"problem": ["a", "b"], "pass_rate": [0.25, 0.5], "draws": [16, 16]}
    pq.write_table(pa.table(rows), tmp_path / "easy" / "data" / "train-00000-of-00001.parquet")
    selected = read_prompts(tmp_path / "easy")
    assert selected.observed.tolist() == [0.25, 0.5] and len(selected.distribution.pass_rates) > 2  # estimated
    with pytest.raises(FileNotFoundError, match="neither a difficulty record .* nor data/"):
        read_prompts(tmp_path)


def test_both_spellings_of_an_option(counts_file, capsys):
    main(["--pass_rates", str(counts_file), "--num_generations", "2", "--max_samples", "8"])
    first = capsys.readouterr().out
    main(["--pass-rates", str(counts_file), "--num-generations", "2", "--max-samples", "8"])
    assert first == capsys.readouterr().out and "n=2" in first


def test_command_line(counts_file, tmp_path, capsys):
    outputs = [tmp_path / f"plan.{suffix}" for suffix in ("md", "json", "png")]
    main(["--pass-rates", str(counts_file), "--budget", "12", "--write", *map(str, outputs)])
    printed = capsys.readouterr().out
    assert printed == outputs[0].read_text()
    stored = json.loads(outputs[1].read_text())
    for name, value in stored["recommended"].items():
        assert f"{name}: {value}\n" in printed
    assert outputs[2].read_bytes().startswith(b"\x89PNG")
    prompts = read_prompts(counts_file)
    assert report(prompts, settings(prompts, num_generations=4, budget=12, max_samples=32), 12) + "\n" == printed


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a,b\n1,2\n", [], "has columns a, b, neither"),
        ("positives,draws\n3,2\n", [], "3 of 2 as pass rate"),
        ("pass_rate\n1.5\n", [], "1.5 of 1 as pass rate"),
        ("pass_rate\n", [], "no row as pass rate"),
        ("positives,draws\n0,0\n", [], "None of the 1 prompts has any draws"),
        ("pass_rate\n0.5\n", ["--budget", "0.5"], "budget of 0.5 rollouts"),
        ("pass_rate\n0.5\n", ["--write", "plan.pdf"], "plan.pdf: expected"),
        ("pass_rate\n0.5\n", ["--num-generations", "64"], r"\(64\) must be between 2 and --max_samples \(32\)"),
        ("pass_rate\n0.5\nnan\n", [], "1 of 2 rows without a value in 'pass_rate', the first one is row 2. Drop"),
        ("positives,draws\n1,2\n,2\n1,\n", [], "2 of 3 rows without a value in 'positives' or 'draws'.*row 2"),
        ("pass_rate\nhard\n", [], "no numbers in column 'pass_rate'.*--column"),
        ("pass_rate,draws\n0.5,inf\n", [], "inf of inf as pass rate"),
        ("pass_rate\n0.5\n", ["--budget", "nan"], r"--budget \(nan\) must be a positive number"),
        ("pass_rate\n0.5\n", ["--draws", "0"], r"--draws \(0\) must be at least 1"),
        ("", [], "rates.csv cannot be read as csv: it is empty"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(tmp_path, capsys, content, options, message):
    path = tmp_path / "rates.csv"
    path.write_text(content)
    with pytest.raises(SystemExit):
        start("plan", ["--pass-rates", str(path), *options])
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_a_missing_file_is_named(capsys):
    with pytest.raises(SystemExit):
        start("plan", ["--pass-rates", "nowhere.parquet"])
    assert "nowhere.parquet" in capsys.readouterr().err


def test_rounds_ask_a_prompt_until_it_passes(tmp_path):
    path = tmp_path / "rates.csv"
    pa.csv.write_csv(pa.table({"pass_rate": [0.5] * 8}), path)
    rounds = {s.fields["max_rounds"]: s for s in plan(path) if s.method == "Rounds"}
    assert [rounds[most].rollouts for most in (4, 8)] == [2 - 0.5**3, 2 - 0.5**7]
    # Each of the rollouts is worth what one of the posterior with n = 1 is.
    assert rounds[4].noise == pytest.approx(3 / 4, abs=1e-6)
