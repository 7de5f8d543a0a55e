"""The verifier, compared with human judgement, and with adversarial completions."""

import csv
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from math_verify import parse, verify

from ada_trl.recipes.math import verifier
from ada_trl.recipes.math.rewards import boxed_format_reward, get_math_accuracy_reward, math_accuracy_reward
from ada_trl.recipes.math.verification import extract_answer, verify_answers
from ada_trl.recipes.math.verifier_worker import compare


PAIRS = Path(__file__).parent / "answer_pairs.tsv"
TIMEOUT = 2.0

# Too big for any time limit, too deep for the stack, too long, or no text at all.
HOSTILE = {
    "power tower": r"\boxed{9^{9^{9^{9}}}}",
    "factorials": r"\boxed{((((9!)!)!)!)!}",
    "huge power": r"\boxed{(x+1)^{99999}-(x-1)^{99999}}",
    "nested braces": r"\boxed{" + "{" * 20000 + "5" + "}" * 20000 + "}",
    "nested fractions": r"\boxed{" + r"\frac{1}{1+" * 3000 + "1" + "}" * 3000 + "}",
    "open boxes": r"\boxed{" * 20000,
    "boxes in boxes": r"\boxed{" * 20000 + "}" * 20000,
    "garbage": "".join(chr(33 + (i * i * 7919) % 90) for i in range(200_000)),
    "boxed garbage": r"\boxed{" + "".join(chr(33 + (i * i * 7919) % 90) for i in range(200_000)) + "}",
    "dollars": "$" * 200_000,
    "half a surrogate pair": "\ud800 \\boxed{\udfff}",
    "null bytes": "\0" * 1000 + "\n",
    "empty": "",
}
NESTED = HOSTILE["nested fractions"].removeprefix(r"\boxed{").removesuffix("}")


def pairs() -> list[dict[str, str]]:
    with PAIRS.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


# Judgement


def test_agreement_with_human_judgement():
    rows = pairs()
    assert len(rows) >= 150 and len({row["topic"] for row in rows}) >= 12
    texts = [row["answer"] if row["topic"] == "completion" else f"So $\\boxed{{{row['answer']}}}$." for row in rows]
    scores = verify_answers(texts, [row["reference"] for row in rows], timeout=60)
    assert None not in scores
    disagree = {
        (row["reference"], row["answer"]) for row, s in zip(rows, scores, strict=True) if s != int(row["equal"])
    }
    known = {(row["reference"], row["answer"]) for row in rows if row["disagreement"]}
    assert disagree - known == set(), "new disagreements"
    assert known - disagree == set(), "agree now: empty their last column"
    assert len(disagree) / len(rows) < 0.04


def test_several_references_and_unparsable_ones():
    completions = [r"\boxed{2}"] * 5
    references = [["1", "2"], ["1", "3"], ["", "2"], ["", " "], []]
    assert verify_answers(completions, references) == [1.0, 0.0, 1.0, None, None]
    assert verify_answers(completions, [2, 2.0, None, [None, 2], [None]]) == [1.0, 1.0, None, 1.0, None]
    assert verify_answers([], []) == []
    with pytest.raises(ValueError, match="There are 1 completions but 2 references"):
        verify_answers(["1"], ["1", "2"])
    with pytest.raises(ValueError, match=r"num_workers \(0\) must be at least 1"):
        verify_answers(["1"], ["1"], num_workers=0)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{1}, later \boxed{\frac{1}{2}}!", r"\boxed{\frac{1}{2}}"),
        (r"$\boxed{1}$ and $\boxed{2}$", r"\boxed{1, 2}"),
        ("\\boxed{(1,2)}\n\\boxed{(1,2)}", r"\boxed{(1,2)}"),
        (r"\boxed{\boxed{1}}", r"\boxed{\boxed{1}}"),
        (r"\boxed{\left\{1,2\right\}}", r"\boxed{\left\{1,2\right\}}"),
        (r"\boxed{3} and \boxed{4", r"\boxed{3}"),
        (r"\boxed{ 1 + \boxed{5}", r"\boxed{5}"),
        ("x" * 3000 + " It is 7. ", "x" * 1990 + " It is 7."),
    ],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


# Processes


@pytest.mark.slow
def test_hostile_completions_affect_no_other_row():
    completions = [*HOSTILE.values(), r"\boxed{5}", "It is $5$."]
    scores = verify_answers(completions, ["5"] * len(completions), timeout=TIMEOUT, num_workers=2)
    assert scores == [0.0] * len(HOSTILE) + [1.0, 1.0]


def score_a_hang() -> list[float | None]:
    return verify_answers([HOSTILE["power tower"], r"\boxed{5}"], ["5", "5"], timeout=TIMEOUT, num_workers=1)


def worker_pids() -> set[int]:
    return {worker.process.pid for worker in verifier.shared_pool()._workers if worker.process is not None}


def _in_child(queue):
    queue.put((score_a_hang(), worker_pids()))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_in_a_daemon_process_of_multiprocessing(method):
    assert verify_answers([r"\boxed{5}"], ["5"]) == [1.0]  # the parent's workers are there when it forks
    ours = worker_pids()
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_in_child, args=(queue,), daemon=True)
    with verifier.shared_pool()._lock:  # as if another thread were scoring at this moment
        process.start()
    scores, theirs = queue.get(timeout=300)
    process.join()
    assert scores == [0.0, 1.0] and theirs and not ours & theirs
    assert verify_answers([r"\boxed{6}"], ["6"]) == [1.0] and worker_pids() & ours


@pytest.fixture
def requests(monkeypatch):
    """Tasks of the workers."""
    tasks, ask = [], verifier._Worker._ask
    monkeypatch.setattr(
        verifier._Worker, "_ask", lambda self, seconds, *task: tasks.append(task) or ask(self, seconds, *task)
    )
    return tasks


def test_a_reference_that_times_out_is_unparsable_and_parsed_once(requests):
    completions = [f"\\boxed{{{i}}}" for i in range(8)]
    assert verify_answers(completions, [NESTED] * 7 + ["7"], timeout=TIMEOUT) == [None] * 7 + [1.0]
    assert requests.count(("parse", NESTED)) == 1 and len(requests) == 3


def test_workers_that_died_in_between_are_replaced():
    assert verify_answers([r"\boxed{5}"], ["5"]) == [1.0]
    for worker in verifier.shared_pool()._workers:
        if worker.process is not None:
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
    assert verify_answers([r"\boxed{5}", r"\boxed{6}"], ["5", "5"]) == [1.0, 0.0]


def test_an_interrupt_does_not_wait_for_a_comparison():
    assert verify_answers([r"\boxed{5}"], ["5"], num_workers=1) == [1.0]
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):  # long before the time limit, which the test would not survive
        verify_answers([HOSTILE["power tower"]] * 3, ["5", "6", "7"], timeout=100_000, num_workers=2)
    assert verify_answers([r"\boxed{5}"], ["5"]) == [1.0]


def test_threads_at_the_same_time():
    """One of them with a comparison that exceeds the time limit, which a signal could not interrupt in a thread."""
    scores = {}

    def score(offset):
        scores[offset] = verify_answers([f"\\boxed{{{i}}}" for i in range(50)], [str(offset)] * 50, num_workers=2)

    threads = [threading.Thread(target=score, args=(offset,)) for offset in range(4)]
    threads.append(threading.Thread(target=lambda: scores.update(hang=score_a_hang())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores.pop("hang") == [0.0, 1.0]
    assert scores == {offset: [float(i == offset) for i in range(50)] for offset in range(4)}


def test_equal_answers_are_compared_once_and_references_are_parsed_once_per_chunk(requests):
    completions = [f"Way {i}: \\boxed{{5}}" for i in range(30)] + [r"\boxed{6}", "", "\n"]
    assert verify_answers(completions, ["5"] * 33, num_workers=1) == [1.0] * 30 + [0.0] * 3
    assert requests == [("parse", "5"), ("compare", "5", r"\boxed{5}"), ("compare", "5", r"\boxed{6}")]
    requests.clear()
    assert verify_answers([f"\\boxed{{{i}}}" for i in range(20)], ["3"] * 20, num_workers=1)[3:5] == [1.0, 0.0]
    assert len(requests) == 23 and requests.count(("parse", "3")) == 3


@pytest.mark.parametrize(
    "pair", [("42", "042"), ("42", "-42"), ("-0", "0"), ("7" * 99, "7" * 99), ("7" * 99, "7" * 98)]
)
def test_comparison_of_integers_agrees_with_math_verify(pair):
    reference, answer = (f"\\boxed{{{number}}}" for number in pair)
    assert compare(reference, answer) == verify(parse(reference), parse(answer))


SCRIPT = r"""
import sys
from ada_trl.recipes.math.verification import verify_answers
from ada_trl.recipes.math.verifier import shared_pool
print(verify_answers(["\\boxed{5}", "\\boxed{6}"], ["5", "5"], num_workers=2))
print(*(w.process.pid for w in shared_pool()._workers if w.process))
sys.stdout.flush()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_unguarded_script_leaves_no_process_and_workers_import_no_torch():
    wait = (
        "print([n for w in shared_pool()._workers if w.process "
        "for n in open(f'/proc/{w.process.pid}/maps') if 'torch' in n])"
    )
    result = subprocess.run([sys.executable, "-c", SCRIPT + wait], capture_output=True, text=True, timeout=300)
    scores, pids, torch_maps = result.stdout.splitlines()
    assert (scores, torch_maps) == ("[1.0, 0.0]", "[]"), result.stderr
    assert pids and all(has_ended(pid) for pid in pids.split())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_workers_end_when_their_parent_is_killed():
    script = SCRIPT + "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "[1.0, 0.0]\n"
        pids = process.stdout.readline().split()
        process.kill()
    assert pids and all(has_ended(pid) for pid in pids)


def has_ended(pid: str) -> bool:
    """Within half a minute; a zombie has."""
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_a_worker_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(verifier.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="verifier process did not start .*math-verify"):
        verifier.VerifierPool().run([("5", [])], timeout=1, num_workers=1)


def test_processes_of_one_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(verifier.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert verifier.available_cores() == 64
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert verifier.available_cores() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert verifier.available_cores() == 1


# Reward functions


def test_math_accuracy_reward_columns_and_forms():
    plain = [r"\boxed{\frac12}", r"\boxed{3}", r"\boxed{3}"]
    chat = [[{"role": "assistant", "content": text}] for text in plain]
    for completions in (plain, chat):
        assert math_accuracy_reward(completions, answer=["0.5", "4", ""], prompts=None) == [1.0, 0.0, None]
        assert math_accuracy_reward(completions, solution=[r"So $\boxed{0.5}$.", "3", "3"]) == [1.0, 1.0, 1.0]
    assert math_accuracy_reward(plain, answer=[["1", "1/2"]] * 3, solution=["9"] * 3) == [1.0, 0.0, 0.0]
    assert math_accuracy_reward([[], [{"role": "assistant", "content": None}]], answer=["1", "1"]) == [0.0, 0.0]
    assert math_accuracy_reward(plain, gt=["1/2"] * 3, solution=["9"] * 3) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="`answer`, `gt` or `solution` .* it has prompts, target"):
        math_accuracy_reward(plain, prompts=plain, target=["1"] * 3)


def test_reward_functions_can_be_pickled_and_are_named():
    reward = pickle.loads(pickle.dumps(get_math_accuracy_reward(timeout=9, num_workers=1)))
    assert reward.__name__ == math_accuracy_reward.__name__ and (reward.timeout, reward.num_workers) == (9, 1)
    assert reward([r"\boxed{1}"], answer=["1"]) == [1.0]


def test_boxed_format_reward():
    texts = [r"so \boxed{1}", "1", r"\boxed{}", r"\boxed{1", r"\boxed{1} \boxed{2}", r"\boxed{\frac{1}{\boxed{2}}}"]
    assert boxed_format_reward(texts) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert boxed_format_reward([[{"role": "assistant", "content": texts[0]}]], answer=["1"]) == [1.0]
