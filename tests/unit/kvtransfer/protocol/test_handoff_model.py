"""The exploration's own pool of blocks reserves and frees as the decode worker's does."""

import random
from dataclasses import replace

import pytest

from cluster.fair_queue import FairQueue
from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.reservations import Reservations, block_request_of
from engine.scheduling.commands import Reserve
from kvtransfer.protocol import import_state
from tests.unit.kvtransfer.handoff_model.machines import Do, Post
from tests.unit.kvtransfer.handoff_model.model import Model
from tests.unit.kvtransfer.handoff_model.scenario import DECODED, FREE, Scenario, World
from tests.unit.kvtransfer.handoff_model.world import Draft

_SCENARIO = Scenario(
    "walk", blocks=(2, 2), prefill_pool=4, decode_pool=4, watermark=1, kinds=frozenset({"loss", "cancel", "expiry"})
)
_CACHED = replace(_SCENARIO, decode_pool=2, cached=True)


class _Twin:
    """The production pool and reservations, driven by the actions of the model's machines."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.num_shared = 2 if scenario.cached else 0  # each prompt's first block, which another user keeps
        self.pool = BlockPool(scenario.decode_pool + self.num_shared)
        shared = self.pool.reserve(self.num_shared) or ()
        for ticket, block_id in enumerate(shared):
            self.pool.keep([block_id], [bytes([ticket])], b"root")
        self._reservations = Reservations(self.pool, FairQueue(), num_longest=0, num_watermark=0)
        self._ours: dict[int, tuple[int, ...]] = {}  # by hand-off: our ids of the blocks that were granted
        self._model_ids: dict[int, tuple[int, ...]] = {}
        self._decoding: dict[int, tuple[int, ...]] = {}

    def apply(self, handoff: int, action: Do) -> None:
        match action:
            case import_state.Reserve(num_blocks):
                command = Reserve(handoff, num_blocks, (bytes([handoff]),), is_announced=True)
                self._reservations.add(block_request_of(command, handoff, 0.0, 1, None))
            case import_state.Discard(quarantined):
                self._reservations.discard(handoff, frozenset(self._translated(handoff, quarantined)))
            case import_state.ReleaseQuarantined(block_ids):
                self.pool.end_quarantine(self._translated(handoff, block_ids))
            case import_state.Deliver():
                grant = self._reservations.pop_grant(handoff)
                assert grant is not None
                self._decoding[handoff] = grant.block_ids
            case _:
                pass

    def decoded(self, handoff: int) -> None:
        self.pool.drop_references(self._decoding.pop(handoff))

    def grant(self, world: Draft) -> None:
        for grant in self._reservations.grant(lambda claim: self._scenario.watermark):
            handoff = grant.request.handoff_id
            self._ours[handoff] = grant.block_ids
            self._model_ids[handoff] = world.granted[handoff]
            assert len(grant.block_ids) == len(world.granted[handoff]), "the model has not granted it"
            assert grant.num_cached == int(self._scenario.cached)

    def _translated(self, handoff: int, block_ids: frozenset[int]) -> list[int]:
        ours = dict(zip(self._model_ids.get(handoff, ()), self._ours.get(handoff, ()), strict=True))
        return [ours[block_id] for block_id in sorted(block_ids)]


@pytest.mark.parametrize("scenario", [_SCENARIO, _CACHED], ids=["nothing cached", "first blocks cached"])
@pytest.mark.parametrize("seed", range(40))
def test_the_model_reserves_and_frees_blocks_as_the_decode_worker_does(
    seed: int, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[tuple[int, Do]] = []
    perform = Draft.perform

    def record(self: Draft, handoff: int, actions: tuple[Do, ...]) -> None:
        wanted.extend((handoff, action) for action in actions if not isinstance(action, Post))
        perform(self, handoff, actions)

    monkeypatch.setattr(Draft, "perform", record)
    rng, model, twin = random.Random(seed), Model(scenario), _Twin(scenario)
    world, faults_left = model.first(), scenario.faults
    while True:
        choices: list[tuple[bool, World, list[tuple[int, Do]]]] = []
        wanted.clear()
        for _, is_fault, next_world in model.steps(world, with_faults=faults_left > 0):
            if next_world != world:
                choices.append((is_fault, next_world, wanted.copy()))
            wanted.clear()
        if not choices:
            break
        is_fault, next_world, actions = rng.choice(choices)
        faults_left -= is_fault
        _follow(twin, Draft(model.machines, world), Draft(model.machines, next_world), actions)
        world = next_world

    assert model.is_good_end(world)
    assert twin.pool.num_free == scenario.decode_pool


def _follow(twin: _Twin, before: Draft, after: Draft, actions: list[tuple[int, Do]]) -> None:
    for handoff, action in actions:
        twin.apply(handoff, action)
    for handoff in (0, 1):
        if after.imports[handoff] == DECODED != before.imports[handoff]:
            twin.decoded(handoff)
    twin.grant(after)
    twin.pool.check()
    owners = after.owners[0]
    counts = twin.pool.counts()
    assert counts["free"] == owners.count(FREE)
    assert counts["quarantined"] == sum(owner >= 20 for owner in owners)
    assert counts["held"] == sum(0 <= owner < 20 for owner in owners) + twin.num_shared
