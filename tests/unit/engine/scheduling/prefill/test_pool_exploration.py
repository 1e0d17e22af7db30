"""Tests that hand-offs never wait for each other's blocks, in whatever order their messages arrive.

All orders of a few hand-offs are tried, and random orders of more. Pools have room for two of the longest sequences;
a smaller one may wait until a lease ends.
"""

from collections.abc import Callable
from random import Random

import pytest

from cluster.messages import Role
from engine.scheduling.batching.batch import Batch
from engine.scheduling.batching.reservations import BlockRequest, Reservations
from tests.unit.kvtransfer.handoff_model.pools import Moved, PoolScenario, Stuck, explore_pools, walk_pools

_OUT, _BACK = Moved(0, 1), Moved(1, 0)
SCENARIOS = (
    PoolScenario("three in one direction, room for one", (1, 1), (_OUT,) * 3),
    PoolScenario("one in each direction and a prompt decoded where it is computed", (2, 2), (_OUT, _BACK, Moved(0, 0))),
)
LONG_SCENARIOS = (
    PoolScenario("three in one direction, room for two", (2, 2), (_OUT,) * 3),
    PoolScenario("four in one direction, room for two", (2, 2), (_OUT,) * 4),
    PoolScenario("two in each direction, room for two", (2, 2), (_OUT, _OUT, _BACK, _BACK)),
    PoolScenario("a ring of three workers, room for two", (2, 2, 2), (_OUT, Moved(1, 2), Moved(2, 0))),
)


def drawn(dice: Random) -> PoolScenario:
    """Return hand-offs between two or three workers: in both directions, or from the first one to the others."""
    num_workers, num_longest = dice.choice((2, 2, 3)), dice.choice((1, 2))
    places = range(num_workers)
    ways = [(exporter, importer) for exporter in places for importer in places if exporter != importer]
    if dice.random() < 0.3:
        ways = [way for way in ways if way[0] == 0]
    moved = []
    for _ in range(dice.randint(6, 16)):
        exporter, importer = dice.choice(ways)
        num_prompt = dice.randint(1, 2 * num_longest - 1)
        num_output = dice.randint(1, 2 * num_longest - num_prompt)
        is_local = dice.random() < 0.1
        moved.append(Moved(exporter, exporter if is_local else importer, num_prompt, num_output))
    num_blocks = tuple(dice.randint(2 * num_longest, 3 * num_longest) for _ in places)
    return PoolScenario("drawn", num_blocks, tuple(moved), num_longest, watermark=dice.choice((0.0, 0.0, 0.2)))


def walk(seeds: range) -> None:
    for dice in map(Random, seeds):
        walk_pools(drawn(dice), dice)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_in_no_order_of_messages_do_hand_offs_wait_for_each_other(scenario: PoolScenario) -> None:
    assert explore_pools(scenario) > 50


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LONG_SCENARIOS, ids=lambda scenario: scenario.name)
def test_in_no_order_of_more_messages_do_hand_offs_wait_for_each_other(scenario: PoolScenario) -> None:
    assert explore_pools(scenario) > 300


def test_in_random_orders_hand_offs_do_not_wait_for_each_other() -> None:
    walk(range(40))


@pytest.mark.slow
def test_in_many_random_orders_hand_offs_do_not_wait_for_each_other() -> None:
    walk(range(40, 2000))


def _without_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(reservations: Reservations) -> BlockRequest | None:
        return next(iter(reservations._requests.values()), None)

    monkeypatch.setattr(Reservations, "first", property(first))


def _without_room_for_hand_offs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "set_role", lambda batch, role: None)


def _without_room_for_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_for_hand_offs(batch: Batch, role: Role) -> None:
        batch.export_room.expects_imports = role.decodes

    monkeypatch.setattr(Batch, "set_role", only_for_hand_offs)


@pytest.mark.parametrize(
    "remove",
    [_without_announcements, _without_room_for_hand_offs, _without_room_for_an_export],
    ids=lambda r: r.__name__,
)
def test_without_any_one_of_the_rules_hand_offs_wait_for_each_other(
    remove: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(monkeypatch)
    with pytest.raises(Stuck):
        walk(range(60))
