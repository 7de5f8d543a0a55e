"""`AdaVLLMGeneration.generate`, and batches that are requested before `generate` needs the completions."""

import asyncio
import threading
import time
from concurrent.futures import wait

import pytest

from .fake import TOKENIZER, FakeServer, answer
from .helpers import becomes_idle, build, fails, reject


def tokens(*texts):
    return [TOKENIZER(text)["input_ids"] for text in texts]


ROWS = tokens("1+2=", "1+2=", "31+4=", "5+55=", "5+55=", "5+55=", "1+2=")
OTHER_ROWS = tokens("7+8=", "7+8=")


async def numbered(call):
    """
    Each completion names its prompt's first digit, its position among the prompt's copies, and the request's round.
    """
    return answer(call, [f"{call.prompt[0]}{copy}{call.round}" for copy in range(call.n)])


def check_completions_of_rows(completion_ids):
    texts = TOKENIZER.batch_decode(completion_ids, skip_special_tokens=True)
    assert [text[:2] for text in texts] == ["10", "11", "30", "50", "51", "52", "10"]


@pytest.fixture
def generation(tmp_path):
    with FakeServer(numbered) as server:
        vllm = build(tmp_path, server).vllm_generation
        vllm.server = server
        yield vllm
        vllm.close()
        assert becomes_idle(server)


def take_prefetched(generation, rows=ROWS, images=None):
    with generation.weights.used_for("returning"):
        return generation.generate(rows, images, 4)


def test_equal_neighbouring_rows_share_a_request_and_results_keep_the_order_of_the_rows(generation):
    prompts, completion_ids, logprobs, token_ids = generation.generate(ROWS, None, 4)
    sent = sorted((call.prompt, call.n) for call in generation.server.completions)
    assert sent == [("1+2=", 1), ("1+2=", 2), ("31+4=", 1), ("5+55=", 3)]
    assert prompts == ROWS and token_ids is None
    check_completions_of_rows(completion_ids)
    assert [len(sequence) for sequence in logprobs] == [len(ids) for ids in completion_ids]
    assert {top[0] for sequence in logprobs for top in sequence} == {-1.0}


def test_an_evaluation_is_generated_while_a_prefetch_is_in_flight(generation):
    server, release = generation.server, threading.Event()

    async def hold_prefetch(call):
        while call.number < 4 and not release.is_set():
            await asyncio.sleep(0.01)
        return await numbered(call)

    server.behave = hold_prefetch
    generation.prefetch(ROWS)
    while len(server.completions) < 4:
        time.sleep(0.01)
    for rows in (OTHER_ROWS, ROWS[:1]):  # a prefetched row is generated again, too
        assert len(generation.generate(rows, None, 2)[1]) == len(rows)
    assert server.in_flight == 4  # those of the prefetch
    threading.Timer(0.2, release.set).start()
    _, completion_ids, _, _ = take_prefetched(generation, [list(ids) for ids in ROWS])
    check_completions_of_rows(completion_ids)
    assert len(server.completions) == 4 + 2
    with pytest.raises(RuntimeError, match="one step ahead"):  # a prefetched batch is returned once
        take_prefetched(generation)


def test_prefetched_completions_are_returned_for_their_rows_only(generation):
    generation.prefetch(ROWS)
    with pytest.raises(RuntimeError, match="one step ahead"):
        take_prefetched(generation, OTHER_ROWS)
    assert len(take_prefetched(generation)[1]) == len(ROWS)
    generation.prefetch(ROWS)
    with pytest.raises(RuntimeError, match="one step ahead"):
        take_prefetched(generation, images=[["an image"]] + [None] * (len(ROWS) - 1))


def test_a_failed_prefetch_raises_in_generate_only_and_is_discarded(generation):
    generation.server.behave = reject
    generation.prefetch(ROWS)
    wait(generation.prefetched.futures)
    with fails("rollouts are missing.*400.*too long"):
        take_prefetched(generation)
    generation.server.behave = numbered
    assert len(generation.generate(ROWS, None, 4)[1]) == len(ROWS)
