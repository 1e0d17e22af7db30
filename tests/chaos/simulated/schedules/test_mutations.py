"""Schedules in which members send messages with a field outside its bounds: each costs at most an attempt."""

from collections import Counter
from dataclasses import replace

import pytest

from cluster.errors import MalformedMessage
from cluster.protocol.received import checked
from tandem.internal.v1 import worker_pb2
from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.mutations import Mutation, Mutations
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import run_schedule
from tests.unit.cluster.protocol.member_messages import examples

_EVERY_RUN_SENDS = (
    "PrefillRequest",
    "PrefillEvent.accepted",
    "PrefillEvent.first_tokens",
    "WorkerMessage.heartbeat",
    "StartRequest",
    "RouterMessage.hello",
    "WorkerMessage.hello",
    "WorkerMessage.step",
    "WorkerMessage.started",
    "SubscribeCacheEventsRequest",
    "ImporterMessage.attach",
    "ImporterMessage.settle",
    "ExporterMessage.accepted",
    "ExporterMessage.settled",
)


def malformed(seed: int, message: str) -> Schedule:
    """Mutate the first message of its kind, in a cluster with one member of each role, so that no other member can
    replace it."""
    asks = tuple(Ask(0.0, 0, 0, 0, num_tokens=30, max_tokens=6) for _ in range(2))
    only = replace(plain_schedule(seed), num_routers=1, num_prefills=1, num_decodes=1, asks=asks)
    return replace(only, mutations=(Mutation(message, occurrence=0, draw=seed),))


def test_a_malformed_message_of_each_kind_fails_no_request() -> None:
    reached, outcomes = Counter[str](), Counter[str]()
    with simulated_machine():
        for seed, message in enumerate(_EVERY_RUN_SENDS):
            result = run_schedule(malformed(seed, message))
            assert not result.violations, message
            assert result.reached[f"malformed: {message}"] == 1, message
            reached.update(result.reached)
            outcomes.update(result.outcomes)
    assert outcomes == {"ok": 2 * len(_EVERY_RUN_SENDS)}
    assert reached["error: malformed_message"] > len(_EVERY_RUN_SENDS) / 2


def test_only_the_chosen_message_is_malformed_and_its_receiver_refuses_it() -> None:
    message = next(examples(worker_pb2.PrefillRequest))
    for draw in range(20):
        mutations = Mutations([Mutation("PrefillRequest", occurrence=1, draw=draw)])
        assert mutations.of(message) is None
        assert mutations.of(next(examples(worker_pb2.PrefillEvent))) is None
        changed = mutations.of(message)
        assert changed is not None
        with pytest.raises(MalformedMessage):
            checked(changed[2])
        assert mutations.of(message) is None
