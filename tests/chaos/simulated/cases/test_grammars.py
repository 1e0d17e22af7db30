"""Tests that answers under a schema and forced calls of tools have the same tokens as without faults if, at any token,
their decode worker is killed or drained, they are moved, or their router is killed. The cluster is simulated, and its
workers compute with the demo model.
"""

from dataclasses import replace
from functools import cache, partial
from unittest import mock

import pytest

from cluster.messages import Grammar, Sampling
from engine.grammar.compiled_grammars import StepMasks
from engine.kv.pool import KvPool
from engine.sampling.logit_state import GrammarState
from engine.scheduling.step import Chunk, Sample, StepPlan
from tandem.enum_words import GRAMMAR_KINDS
from tandem.v1 import inference_pb2
from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.members.clients import Client
from tests.chaos.simulated.members.grammars import END, GRAMMARS, compiled_grammars
from tests.chaos.simulated.members.real_engine import BLOCK_SIZE, tiny_engine, tiny_model, tiny_runner
from tests.chaos.simulated.schedules.disturbances import DISTURBANCES, after_token, disturb_after_every_token
from tests.chaos.simulated.schedules.mishaps import Mishap
from tests.chaos.simulated.schedules.schedule import MAX_MODEL_LEN, Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import Result, run_schedule

NUM_PROMPT = 6
NUM_TOKENS = MAX_MODEL_LEN - NUM_PROMPT
NAMES = ("schema", "call")


@cache
def _tokens_alone(prompt: tuple[int, ...], seed: int, name: str) -> tuple[int, ...]:
    """Return the tokens of one choice that runs alone, step by step."""
    pool = KvPool(tiny_model().layout, MAX_MODEL_LEN // BLOCK_SIZE + 1)
    runner, known, start = tiny_runner(pool), list(prompt), 0
    runner.masks = StepMasks(compiled_grammars())
    state = GrammarState(GRAMMARS[name], known, len(prompt))
    while len(known) < MAX_MODEL_LEN and known[-1] != END:
        sample = Sample(seed, len(known), Sampling(1.0), frozenset(), grammar_state=state)
        blocks = tuple(range(-(-len(known) // BLOCK_SIZE)))
        chunk = Chunk(0, tuple(known[start:]), start, blocks, (sample,))
        start = len(known)
        known.append(runner.run(StepPlan((chunk,))).tokens[0][0].token_id)
    assert known[-1] == END, "the answer is whole"
    return tuple(known[len(prompt) :])


def _client(name: str) -> type[Client]:
    class ConstrainedClient(Client):
        def _request(self, request_id: str) -> inference_pb2.GenerateRequest:
            request = super()._request(request_id)
            request.sampling.temperature = 1
            request.stop.ignore_eos = False
            grammar = GRAMMARS[name]
            request.grammar.CopyFrom(inference_pb2.Grammar(kind=GRAMMAR_KINDS.number(grammar.kind), text=grammar.text))
            return request

        def _alone(self, seed: int) -> tuple[int, ...]:
            return _tokens_alone(self._prompt, seed, name)

    return ConstrainedClient


def _schedule(*mishaps: Mishap) -> Schedule:
    ask = Ask(0.0, 0, 0, 0, NUM_PROMPT, NUM_TOKENS, n=1)
    return replace(plain_schedule(1), num_routers=2, num_prefills=1, num_decodes=2, asks=(ask,), mishaps=mishaps)


def _run(name: str, *mishaps: Mishap) -> Result:
    with (
        mock.patch("worker.app.build_engine", tiny_engine),
        mock.patch("tests.chaos.simulated.world.Client", _client(name)),
    ):
        return run_schedule(_schedule(*mishaps))


def test_a_forced_call_goes_on_after_its_decode_worker_is_killed() -> None:
    with simulated_machine():
        result = _run("call", after_token("decode worker killed", 9))
    assert not result.violations, result.violations
    assert result.hit and result.outcomes["ok"] == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)  # one simulated run per token, on a busy machine
@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("name", NAMES)
def test_a_disturbance_after_any_token_changes_no_token_of_a_constrained_answer(name: str, disturbance: str) -> None:
    with simulated_machine():
        num_hit = disturb_after_every_token(disturbance, partial(_run, name))
    assert num_hit > 12, "the answer has more tokens than that"


def test_a_worker_without_the_grammars_tokens_is_detected() -> None:
    def forgetful(grammar: Grammar, token_ids: list[int], _: int) -> GrammarState:
        return GrammarState(grammar, token_ids, len(token_ids))

    with simulated_machine(), mock.patch("engine.scheduling.batching.chunks.GrammarState", forgetful):
        result = _run("schema", after_token("decode worker killed", 6))
    assert result.violations
