"""`AdaVLLMGeneration.generate`, and batches whose requests are sent before `generate` needs the completions."""

import asyncio
import threading
import time

import pytest
from aiohttp import web

from .fake import TOKENIZER, FakeServer, answer
from .helpers import becomes_idle, build, fails, our_threads


def tokens(*texts):
    return [TOKENIZER(text)["input_ids"] for text in texts]


ROWS = tokens("1+2=", "1+2=", "31+4=", "5+55=", "5+55=", "5+55=", "1+2=")
OTHER_ROWS = tokens("7+8=", "7+8=")


async def numbered(call):
    """Each completion names its prompt's first digit, its position among the prompt's copies, and the request's round."""
    return answer(call, [f"{call.prompt[0]}{copy}{call.round}" for copy in range(call.n)])


def texts(completion_ids):
    return TOKENIZER.batch_decode(completion_ids, skip_special_tokens=True)


@pytest.fixture
def generation(tmp_path):
    with FakeServer(numbered) as server:
        vllm = build(tmp_path, server).vllm_generation
        vllm.server = server
        yield vllm
        vllm.close()
        assert becomes_idle(server)
    assert our_threads() == []


def held(server):
    """Lets requests wait until the event is set."""
    release = threading.Event()

    async def behave(call):
        while not release.is_set():
            await asyncio.sleep(0.01)
        return await numbered(call)

    server.behave = behave
    return release


def wait_for_requests(server, number):
    deadline = time.monotonic() + 20
    while len(server.completions) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_equal_neighbouring_rows_share_a_request_and_results_keep_the_order_of_the_rows(generation):
    prompts, completion_ids, logprobs, token_ids = generation.generate(ROWS, None, 4)
    sent = sorted((call.prompt, call.n) for call in generation.server.completions)
    assert sent == [("1+2=", 1), ("1+2=", 2), ("31+4=", 1), ("5+55=", 3)]
    assert prompts == ROWS and token_ids is None
    first_digits = [text[:2] for text in texts(completion_ids)]
    assert first_digits == ["10", "11", "30", "50", "51", "52", "10"]
    assert [len(sequence) for sequence in logprobs] == [len(ids) for ids in completion_ids]
    assert {top[0] for sequence in logprobs for top in sequence} == {-1.0}


def take_prefetched(generation, rows=ROWS):
    with generation.returning_prefetched():
        return generation.generate(rows, None, 4)


def test_prefetched_rows_are_returned_without_being_sent_again(generation):
    generation.prefetch(ROWS)
    generation.wait_for_prefetch()
    sent = len(generation.server.completions)
    _, completion_ids, _, _ = take_prefetched(generation, [list(ids) for ids in ROWS])
    assert len(generation.server.completions) == sent
    assert [text[:2] for text in texts(completion_ids)] == ["10", "11", "30", "50", "51", "52", "10"]
    with pytest.raises(RuntimeError, match="one step ahead"):  # a prefetched batch is returned once
        take_prefetched(generation)


def test_generate_awaits_what_is_still_in_flight(generation):
    release = held(generation.server)
    generation.prefetch(ROWS)
    wait_for_requests(generation.server, 4)
    threading.Timer(0.2, release.set).start()
    _, completion_ids, _, _ = take_prefetched(generation)
    assert len(completion_ids) == len(ROWS) and len(generation.server.completions) == 4


@pytest.mark.parametrize("rows", [OTHER_ROWS, ROWS[:1]], ids=["other rows", "a prefetched row"])
def test_an_evaluation_is_generated_and_leaves_the_prefetch(rows, generation):
    server = generation.server
    release = threading.Event()

    async def behave(call):
        while call.number < 4 and not release.is_set():
            await asyncio.sleep(0.01)
        return await numbered(call)

    server.behave = behave
    generation.prefetch(ROWS)
    wait_for_requests(server, 4)
    _, completion_ids, _, _ = generation.generate(rows, None, 2)
    assert len(completion_ids) == len(rows)
    assert server.in_flight == 4, "The prefetched requests are in flight as before."
    release.set()
    take_prefetched(generation)
    assert len(server.completions) == 5


def test_prefetched_completions_are_not_returned_for_other_rows(generation):
    generation.prefetch(ROWS)
    with pytest.raises(RuntimeError, match="one step ahead"):
        take_prefetched(generation, OTHER_ROWS)
    assert len(take_prefetched(generation)[1]) == len(ROWS)


def test_rows_with_other_images_are_other_rows(generation):
    batch = generation._send(ROWS, None)
    with batch:
        assert batch.has_rows(ROWS, None)
        assert not batch.has_rows(ROWS, [["an image"]] + [None] * (len(ROWS) - 1))


def test_cancelled_prefetch_ends_on_the_server(generation):
    held(generation.server)
    generation.prefetch(ROWS)
    wait_for_requests(generation.server, 4)
    generation.cancel_prefetch()
    assert becomes_idle(generation.server)
    generation.server.behave = numbered
    generation.generate(ROWS, None, 4)
    assert len(generation.server.completions) == 8


def test_a_second_prefetch_is_rejected(generation):
    generation.prefetch(ROWS)
    with pytest.raises(RuntimeError, match="cancel_prefetch"):
        generation.prefetch(OTHER_ROWS)


def test_a_prefetch_that_failed_raises_in_generate_only_and_is_discarded(generation):
    async def refuse(call):
        return web.json_response({"error": {"message": "too long"}}, status=400)

    generation.server.behave = refuse
    generation.prefetch(ROWS)
    generation.wait_for_prefetch()
    with fails("rollouts are missing.*400.*too long"):
        take_prefetched(generation)
    generation.server.behave = numbered
    assert len(generation.generate(ROWS, None, 4)[1]) == len(ROWS)


def test_weights_are_not_sent_while_a_prefetched_request_is_in_flight(generation):
    server, seen = generation.server, []
    release = held(server)

    async def control(request, payload):
        seen.append(server.in_flight)

    server.control = control
    generation.prefetch(ROWS)
    wait_for_requests(server, 4)
    threading.Timer(0.3, release.set).start()
    generation.sync_weights()
    assert seen and set(seen) == {0}


def test_closing_cancels_the_prefetch(generation):
    held(generation.server)
    generation.prefetch(ROWS)
    wait_for_requests(generation.server, 4)
    generation.close()
    assert becomes_idle(generation.server)
