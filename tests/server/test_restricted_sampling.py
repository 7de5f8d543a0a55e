"""`top_p`, `top_k`, `min_p`: the server's log-probabilities are those of the kept tokens, renormalised."""

import math
from types import SimpleNamespace

import pytest
from aiohttp import web

from ada_trl.vllm.generation import sampling_restrictions

from ..helpers import logs_of
from .fake import RIGHT, WRONG, FakeServer, choices_of
from .helpers import UNIFORM, build, fails


KEPT = 0.5  # probability mass, of every token


async def restricted(call):
    """Completions of two tokens, each of which is reported to be as much likelier as less is kept."""
    choices = choices_of(call, [RIGHT, WRONG] * (call.n // 2))
    for choice in choices:
        logprobs = choice["logprobs"]
        logprobs["token_logprobs"] = [value - math.log(KEPT) for value in logprobs["token_logprobs"]]
    return web.json_response({"choices": choices})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"top_k": -1, "min_p": 0.0}, []),
        ({"top_p": 0.8, "top_k": 20}, ["top_p=0.8", "top_k=20"]),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, ["min_p=0.1", "repetition_penalty=1.1"]),
    ],
)
def test_restrictions_are_named_with_their_values(options, expected):
    unrestricted = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    assert sampling_restrictions(SimpleNamespace(**unrestricted | options)) == expected


@pytest.mark.parametrize(
    ("mode", "ratio", "warns"),
    [
        ("sequence_mask", KEPT**2, True),
        ("sequence_truncate", KEPT**2, True),
        ("token_truncate", KEPT, False),
        ("token_mask", KEPT, False),
    ],
)
def test_sequence_ratios_shrink_with_length_which_is_warned_of(mode, ratio, warns, tmp_path, caplog):
    with FakeServer(restricted, truthful=True) as server:
        trainer = build(tmp_path, server, top_p=0.8, vllm_importance_sampling_mode=mode, **UNIFORM)
        assert ("Set vllm_importance_sampling_mode='token_truncate'" in caplog.text) == warns
        trainer.train()
    (logs,) = logs_of(trainer)
    assert logs["sampling/importance_sampling_ratio/mean"] == pytest.approx(ratio, rel=1e-4)
    assert logs["sampling/sampling_logp_difference/mean"] == pytest.approx(-math.log(KEPT), rel=1e-4)
    assert "weights" not in caplog.text, "They are the right ones."


def test_nothing_is_said_of_unrestricted_sampling_or_without_a_correction(tmp_path, caplog):
    with FakeServer() as server:
        build(tmp_path, server, **UNIFORM).vllm_generation.close()
        options = UNIFORM | {"top_p": 0.8, "vllm_importance_sampling_correction": False}
        build(tmp_path, server, **options).vllm_generation.close()
    assert "vllm_importance_sampling_mode" not in caplog.text


def test_log_probabilities_cannot_confirm_weights_if_sampling_is_restricted(tmp_path):
    async def dead(request):
        return web.json_response({"error": {"message": "engine dead"}}, status=500)

    async def dies(call):
        server.read = dead
        return await restricted(call)

    with FakeServer(truthful=True) as server:
        trainer = build(tmp_path, server, top_p=0.8, **UNIFORM)
        server.behave = dies
        with fails("with top_p=0.8 the rollouts' log-probabilities cannot be compared"):
            trainer.train()
