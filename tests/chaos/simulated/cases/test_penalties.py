"""Tests that the four choices of a request with penalties have the same tokens as without faults if, at any token, its
decode worker is killed or drained, it is moved, or its router is killed. The cluster is simulated, and its workers
compute with the demo model.
"""

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest

from cluster.messages import LogitRules, Sampling
from engine.kv.pool import KvPool
from engine.sampling.logit_state import LogitState
from engine.scheduling.step import Chunk, Sample, StepPlan
from tandem.v1 import inference_pb2
from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.members.clients import Client
from tests.chaos.simulated.members.real_engine import BLOCK_SIZE, tiny_engine, tiny_model, tiny_runner
from tests.chaos.simulated.schedules.disturbances import DISTURBANCES, disturb_after_every_token
from tests.chaos.simulated.schedules.mishaps import Kind, Mishap, Phase
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import Result, run_schedule

NUM_TOKENS, NUM_PROMPT = 12, 22
RULES = LogitRules(
    repetition_penalty=1.1,
    frequency_penalty=1.0,
    presence_penalty=1.0,
    bad_words=((271,), (316,)),  # "self", and " self"
)
SAMPLING = inference_pb2.SamplingParams(
    temperature=1, repetition_penalty=1.1, frequency_penalty=1, presence_penalty=1, bad_words=["self"]
)


@cache
def _tokens_alone(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Return the tokens of one choice that runs alone, step by step."""
    pool = KvPool(tiny_model().layout, (NUM_PROMPT + NUM_TOKENS) // BLOCK_SIZE + 1)
    runner, known, start = tiny_runner(pool), list(prompt), 0
    state = LogitState(RULES, known, len(prompt))
    for _ in range(NUM_TOKENS):
        sample = Sample(seed, len(known), Sampling(1.0, rules=RULES), frozenset(), state)
        blocks = tuple(range(-(-len(known) // BLOCK_SIZE)))
        chunk = Chunk(0, tuple(known[start:]), start, blocks, (sample,))
        start = len(known)
        known.append(runner.run(StepPlan((chunk,))).tokens[0][0].token_id)
    return tuple(known[len(prompt) :])


class PenalizedClient(Client):
    def _request(self, request_id: str) -> inference_pb2.GenerateRequest:
        request = super()._request(request_id)
        request.sampling.MergeFrom(SAMPLING)
        return request

    def _alone(self, seed: int) -> tuple[int, ...]:
        return _tokens_alone(self._prompt, seed)


def _schedule(*mishaps: Mishap) -> Schedule:
    ask = Ask(0.0, 0, 0, 0, NUM_PROMPT, NUM_TOKENS, n=4)
    return replace(plain_schedule(1), num_routers=2, num_prefills=1, num_decodes=2, asks=(ask,), mishaps=mishaps)


def _run(*mishaps: Mishap) -> Result:
    with (
        mock.patch("worker.app.build_engine", tiny_engine),
        mock.patch("tests.chaos.simulated.world.Client", PenalizedClient),
    ):
        return run_schedule(_schedule(*mishaps))


EVERY_PLACE = [
    *((phase, 0) for phase in (Phase.FIRST_TOKEN, Phase.PULLING, Phase.SETTLING)),
    *((Phase.DECODING, index) for index in range(NUM_TOKENS - 1)),
]


@pytest.mark.parametrize(
    "places", [[(Phase.DECODING, 6)], pytest.param(EVERY_PLACE, marks=pytest.mark.slow)], ids=["one", "every"]
)
def test_a_decode_worker_killed_at_any_token_changes_no_token_of_four_choices_with_penalties(
    places: list[tuple[Phase, int]],
) -> None:
    """Each step of the victim sends one message with a token of each choice; the victim is killed after each of them,
    and before the first one, in one run each.
    """
    with simulated_machine():
        for phase, occurrence in places:
            result = _run(Mishap(Kind.KILL, "decode", 0, 0.0, 1.0, phase, occurrence))

            assert not result.violations, f"{phase}, {occurrence}: {result.violations}"
            assert result.outcomes["ok"] == 1
            assert result.hit, f"{phase}, {occurrence}: no worker was killed"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # one simulated run per token, on a busy machine
@pytest.mark.parametrize("disturbance", DISTURBANCES[1:])
def test_a_disturbance_after_any_token_changes_no_token_of_four_choices_with_penalties(disturbance: str) -> None:
    with simulated_machine():
        assert disturb_after_every_token(disturbance, _run) >= NUM_TOKENS - 2


def test_a_state_without_the_committed_tokens_is_detected() -> None:
    def forgetful(rules: LogitRules, token_ids: list[int], _: int) -> LogitState:
        return LogitState(rules, token_ids, len(token_ids))

    kill = Mishap(Kind.KILL, "decode", 0, 0.0, 1.0, Phase.DECODING, 5)
    with simulated_machine(), mock.patch("engine.scheduling.batching.chunks.LogitState", forgetful):
        result = _run(kill)
    assert any("where a run without faults says" in violation for violation in result.violations)
