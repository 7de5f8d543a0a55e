"""
Generation time with a simulated GPU server, compared with TRL's client, which sends a batch in one request.

`python -m benchmarks.speed.in_flight` alternates between both clients, which receive the same completions (see `simulated_gpu`):

- batch: one rollout per row, all rows different (`baseline="batch"`, `num_generations=1`);
- GRPO: four rollouts per prompt;
- Seq-balance: rounds of four rollouts until two are correct and two incorrect, at most four rounds. Rounds are asynchronous;
  with TRL's client each round is one request;
- dynamic sampling: four rollouts per prompt; a prompt with a zero-variance group is replaced by another one, at most three times.
  Requests as for Seq-balance;
- one step ahead: three steps of one rollout per row (`max_staleness=1`), each followed by 5 s of training. TRL's client generates
  and trains in turn.

It prints seconds, CPU seconds of the client per 1,000 rollouts, and their ratios. CPU time includes the conversion of
log-probabilities that `GRPOTrainer` makes afterwards.

`--rounds` compares the default rounds of Seq-balance (four rollouts, at most eight rounds, until one is correct and one
incorrect) with those of the paper (eight, four rounds, two and two): seconds, rollouts and generated tokens of both clients, for
pass rates that are uniformly distributed and for the fourth power of such rates (hard prompts). The third client fills synchronous
rounds up to 8 rollouts per prompt, as the trainer does without a server on a GPU; the rounds of the paper, too.

`--flood` measures one batch of 8,192 completions of 500 tokens that arrive at once, each client in a separate process: peak
memory, and how long the main thread stalls while responses are parsed: in wall-clock time, and in CPU time of the process, which
other load on the machine affects less. The third client is ours after `gc.freeze()`: then garbage collections do not visit the
objects of the imported libraries.
"""

import argparse
import functools
import gc
import itertools
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from statistics import mean

import numpy as np
import requests
import torch
from accelerate import Accelerator
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.generation.vllm_client import VLLMClient

from ada_trl.core import Candidate, Slot, SlotRule, sample_slots
from ada_trl.sampling.asynchronous import AsyncVLLMSampler
from ada_trl.sampling.synchronous import SynchronousSampler
from ada_trl.vllm.generation import AdaVLLMGeneration
from recipes.arithmetic.task import build_tokenizer

from ..common import BALANCE, BINARY, DEFAULT, ratio_of_repeats
from .simulated_gpu import ROOT, VOCABULARY, running


MAX_TOKENS = 400
ROUND, MAX_ROUNDS = 4, 4
STEPS, TRAINING_SECONDS = 3, 5
FLOOD_ROWS, FLOOD_TOKENS = 8192, 500
FLOOD_CLIENTS = ["TRL", "ours", "ours, frozen"]


def prompts(number: int) -> list[list[int]]:
    return [[2 + i % 100, 2 + i // 100, *range(2, 40)] for i in range(number)]


class Ours:
    def __init__(self, url: str, max_tokens: int):
        config = Qwen2Config(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        config.num_attention_heads = config.num_key_value_heads = 2
        self.directory = tempfile.TemporaryDirectory()
        self.vllm = AdaVLLMGeneration(
            Qwen2ForCausalLM(config),
            Accelerator(cpu=not torch.cuda.is_available()),
            build_tokenizer(),
            mode="server",
            server_base_url=url,
            max_completion_length=max_tokens,
            weight_sync="disk",
            weight_sync_dir=self.directory.name,
        )

    def rows(self, rows: list[list[int]], copies: int) -> tuple[list, list]:
        _, ids, logprobs, _ = self.vllm.generate([row for row in rows for _ in range(copies)], None, copies)
        return ids, [[top[0] for top in sequence] for sequence in logprobs]

    def rounds(self, rows: list[list[int]], slots: list[Slot]) -> None:
        futures: dict[tuple[int, int], Future] = {}
        arrived: queue.SimpleQueue = queue.SimpleQueue()
        with self.vllm.vllm_client.transport.group() as group:

            def submit(slot: int, first_draw: int) -> None:
                row = rows[row_index(slots, slot, first_draw)]
                futures[slot, first_draw] = self.vllm.start_request(group, [row], slots[slot].round_size)
                futures[slot, first_draw].add_done_callback(lambda done: arrived.put((slot, first_draw)))

            def collect() -> list[tuple[int, int, np.ndarray]]:
                answers = [arrived.get()]
                while not arrived.empty():
                    answers.append(arrived.get())
                return [(*key, rewards(futures.pop(key).result()[0])) for key in answers if key in futures]

            def cancel(*key: int) -> None:
                if key in futures:
                    futures.pop(key).cancel()

            speculate_below = AsyncVLLMSampler.requests_in_flight(len(slots), slots[0].round_size)
            sample_slots(slots, submit, collect, speculate_below=speculate_below, cancel=cancel)

    def steps(self, rows: list[list[int]]) -> int:
        self.vllm.prefetch(rows)
        for step in range(STEPS):
            with self.vllm.weights.used_for("returning"):
                self.rows(rows, 1)
            if step < STEPS - 1:
                self.vllm.prefetch(rows)
            time.sleep(TRAINING_SECONDS)
        return STEPS * len(rows)


class TRL:
    fills_rounds = False

    def __init__(self, url: str, max_tokens: int):
        self.client, self.max_tokens = VLLMClient(base_url=url), max_tokens

    def rows(self, rows: list[list[int]], copies: int) -> tuple[list, list]:
        output = self.client.generate(rows, n=copies, max_tokens=self.max_tokens, logprobs=0)
        return output["completion_ids"], [[top[0] for top in sequence] for sequence in output["logprobs"]]

    def rounds(self, rows: list[list[int]], slots: list[Slot]) -> None:
        wanted: list[tuple[int, int]] = []
        size = slots[0].round_size

        def collect() -> list[tuple[int, int, np.ndarray]]:
            ids, _ = self.rows([rows[row_index(slots, *request)] for request in wanted], size)
            received = [(*request, rewards(ids[i * size : (i + 1) * size])) for i, request in enumerate(wanted)]
            wanted.clear()
            return received

        speculate_below = SynchronousSampler.requests_in_flight(len(slots), size) if self.fills_rounds else 0
        sample_slots(slots, lambda *request: wanted.append(request), collect, speculate_below=speculate_below)

    def steps(self, rows: list[list[int]]) -> int:
        for _ in range(STEPS):
            self.rows(rows, 1)
            time.sleep(TRAINING_SECONDS)
        return STEPS * len(rows)


class FilledTRL(TRL):
    """Synchronous rounds that are filled up to 8 rollouts per prompt, as `SynchronousSampler` does on a GPU."""

    fills_rounds = True


def row_index(slots: list[Slot], slot: int, draw: int) -> int:
    """Row of a round: the first candidates of all slots come first, then the second ones."""
    return slot + len(slots) * slots[slot].candidate_at(draw)


def rewards(ids: list[list[int]]) -> np.ndarray:
    return np.array([[float(tokens[0] == 1)] for tokens in ids])


def sample(client: Ours | TRL, num_slots: int, num_candidates: int, rule: SlotRule, size: int = ROUND) -> int:
    candidates = [Candidate(i) for i in range(num_candidates)]
    slots = [Slot(rule, BINARY, candidates, size) for _ in range(num_slots)]
    client.rounds(prompts(num_slots * num_candidates), slots)
    return sum(slot.num_rollouts for slot in slots)


MODES = {  # client and number of rows (of the first round): number of rollouts
    "batch": lambda client, rows: len(client.rows(prompts(rows), 1)[0]),
    "GRPO": lambda client, rows: len(client.rows(prompts(rows // 4), 4)[0]),
    "Seq-balance": lambda client, rows: sample(client, rows // ROUND, 1, SlotRule(2, 2, MAX_ROUNDS)),
    "dynamic sampling": lambda client, rows: sample(client, rows // ROUND, MAX_ROUNDS, SlotRule(0, 0, 1)),
    "one step ahead": lambda client, rows: client.steps(prompts(rows)),
}


def measured(url: str, work: Callable[[], int]) -> tuple[float, float, int, int]:
    """Seconds, CPU seconds of this process, what `work` returns, and tokens that the server has generated."""

    def tokens() -> int:
        return int(requests.get(f"{url}/metrics").text.split()[-1])

    requests.post(f"{url}/reset")
    before, started, cpu = tokens(), time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - started, time.process_time() - cpu, result, tokens() - before


def compare(modes: list[str], sizes: list[int], repeats: int, url: str) -> None:
    clients = {"TRL": TRL(url, MAX_TOKENS), "ours": Ours(url, MAX_TOKENS)}
    print("| | Rows (first round) | Rollouts | Seconds: TRL | ours | ours / TRL (single repeats) "
          "| CPU s per 1,000 rollouts: TRL | ours | ours / TRL |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for mode in modes:
        run = MODES[mode]
        for rows in sizes:
            results: dict[str, list[tuple[float, float, int, int]]] = {name: [] for name in clients}
            for _ in range(repeats):
                for name, client in clients.items():
                    results[name].append(measured(url, lambda: run(client, rows)))  # noqa: B023
            theirs, ours = results["TRL"], results["ours"]
            seconds = [[r[0] for r in result] for result in (theirs, ours)]
            cpu = [1000 * sum(r[1] for r in result) / sum(r[2] for r in result) for result in (theirs, ours)]
            print(
                f"| {mode} | {rows} | {mean(r[2] for r in ours):.0f} | {mean(seconds[0]):.2f} | {mean(seconds[1]):.2f} "
                f"| {ratio_of_repeats(seconds[1], seconds[0])} "
                f"| {cpu[0]:.2f} | {cpu[1]:.2f} | {cpu[1] / cpu[0]:.2f} |",
                flush=True,
            )
    clients["ours"].vllm.close()


def sample_rounds(client: Ours | TRL, num_slots: int, samples_per_round: int, **rule: int) -> int:
    return sample(client, num_slots, 1, SlotRule(**rule), samples_per_round)


def compare_rounds(numbers: list[int], repeats: int) -> None:
    print("| Pass rates | Prompts | Client | Rollouts: paper | default | default / paper | Seconds: paper | default "
          "| default / paper (single repeats) | Generated tokens: paper | default |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for kind, power in {"uniform": 1, "hard": 4}.items():
        with running(power=power) as url:
            trl, filled = TRL(url, MAX_TOKENS), FilledTRL(url, MAX_TOKENS)
            clients = {"TRL": trl, "TRL, filled rounds": filled, "ours": Ours(url, MAX_TOKENS)}
            for number, (name, client) in itertools.product(numbers, clients.items()):
                works = [functools.partial(sample_rounds, client, number, **rounds) for rounds in (BALANCE, DEFAULT)]
                results = [[measured(url, work) for work in works] for _ in range(repeats)]
                seconds, _, rollouts, tokens = np.array(results).transpose(2, 1, 0)  # (paper or default, repeat) each
                (paper, default), (paper_rollouts, default_rollouts) = seconds.mean(axis=1), rollouts.mean(axis=1)
                paper_tokens, default_tokens = tokens.mean(axis=1)
                print(
                    f"| {kind} | {number} | {name} | {paper_rollouts:.0f} | {default_rollouts:.0f} "
                    f"| {default_rollouts / paper_rollouts:.2f} | {paper:.1f} | {default:.1f} "
                    f"| {ratio_of_repeats([*seconds[1]], [*seconds[0]])} | {paper_tokens:.0f} | {default_tokens:.0f} |",
                    flush=True,
                )
            clients["ours"].vllm.close()


def flood(kind: str, url: str, limit: float) -> None:
    """Sends one batch from a second thread and measures what the main thread notices of it."""
    client = (TRL if kind == "TRL" else Ours)(url, FLOOD_TOKENS)
    if kind == "ours, frozen":
        gc.freeze()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    received: list = []
    thread = threading.Thread(target=lambda: received.append(client.rows(prompts(FLOOD_ROWS), 1)))
    gaps, blocked, cpu, started = [], [], time.process_time(), time.perf_counter()
    thread.start()
    while thread.is_alive() and time.perf_counter() - started < limit:
        last, last_cpu = time.perf_counter(), time.process_time()
        time.sleep(0.005)
        gaps.append(time.perf_counter() - last - 0.005)
        blocked.append(time.process_time() - last_cpu)
    ((ids, logprobs),) = received
    assert len(ids) == FLOOD_ROWS and {len(sequence) for sequence in logprobs} == {FLOOD_TOKENS}
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    gaps.sort()
    print(
        f"| {kind} | {time.perf_counter() - started:.1f} | {time.process_time() - cpu:.1f} | {peak:.2f} "
        f"| {1000 * gaps[-1]:.0f} | {1000 * max(blocked):.0f} | {1000 * gaps[int(len(gaps) * 0.99)]:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", action="store_true", help="--rows are the numbers of prompts then")
    parser.add_argument("--flood", action="store_true")
    parser.add_argument("--flood_client", choices=FLOOD_CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.flood_client:
        flood(args.flood_client, args.url, limit=600)
    elif args.rounds:
        compare_rounds(args.rows, args.repeats)
    elif args.flood:
        print(
            "| | Seconds | CPU s | Peak memory beyond the start, GiB | Longest stall, ms | in CPU time | 99th percentile |"
        )
        print("|---|---|---|---|---|---|---|")
        for _ in range(args.repeats):
            for kind in FLOOD_CLIENTS:
                with running(a=0, c=0, max_sequences=FLOOD_ROWS, length=FLOOD_TOKENS) as url:
                    words = [sys.executable, "-m", "benchmarks.speed.in_flight", "--flood_client", kind, "--url", url]
                    subprocess.run(words, check=True, cwd=ROOT)
    else:
        with running() as url:
            compare(args.modes, args.rows, args.repeats, url)


if __name__ == "__main__":
    main()
