"""Tests of the order in which hand-offs get their blocks, and that two full pools never wait for each other."""

from cluster.fair_queue import FairQueue
from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.reservations import Reservations, block_request_of
from engine.scheduling.commands import Reserve


def reservations(num_blocks: int, *, num_longest: int = 4, num_watermark: int = 0) -> Reservations:
    return Reservations(BlockPool(num_blocks), FairQueue(), num_longest=num_longest, num_watermark=num_watermark)


def add(waiting: Reservations, handoff_id: int, num_blocks: int, *, is_announced: bool = False) -> None:
    command = Reserve(handoff_id, num_blocks, is_announced=is_announced)
    waiting.add(block_request_of(command, handoff_id, 0.0, 4, None))


def granted(waiting: Reservations, *, watermark: int = 0) -> list[int]:
    return [grant.request.handoff_id for grant in waiting.grant(lambda _: watermark)]


def test_hand_offs_whose_prompt_is_not_computed_yet_leave_room_for_the_longest_sequence() -> None:
    waiting = reservations(10)
    for handoff_id in range(4):
        add(waiting, handoff_id, 3)
    assert granted(waiting) == [0, 1] and waiting.num_waiting == 2


def test_an_announced_hand_off_overtakes_those_that_wait_for_their_announcement() -> None:
    waiting = reservations(10)
    for handoff_id in range(4):
        add(waiting, handoff_id, 3)
    assert granted(waiting) == [0, 1]
    waiting.announce(3)
    assert granted(waiting) == [3]
    waiting.discard(3, frozenset())
    assert granted(waiting) == []  # 2 still waits for its announcement, or for the end of 0 or 1
    waiting.announce(2)
    assert granted(waiting) == [2]


def test_nothing_overtakes_an_announced_hand_off_that_waits_for_blocks() -> None:
    waiting = reservations(10, num_longest=8)
    add(waiting, 0, 8, is_announced=True)
    add(waiting, 1, 6, is_announced=True)
    add(waiting, 2, 1)
    assert granted(waiting) == [0] and granted(waiting) == []
    waiting.discard(0, frozenset())
    assert granted(waiting) == [1, 2]


def test_room_is_kept_for_a_waiting_hand_off_larger_than_the_longest_sequence() -> None:
    """Choices of one prompt have a last block each."""
    waiting = reservations(10, num_longest=2, num_watermark=1)
    add(waiting, 0, 2)
    add(waiting, 1, 8)
    add(waiting, 2, 2)
    assert granted(waiting, watermark=1) == []
    waiting.announce(1)
    assert granted(waiting, watermark=1) == [1]


def test_an_announcement_of_a_hand_off_that_does_not_wait_has_no_effect() -> None:
    waiting = reservations(10)
    waiting.announce(7)
    add(waiting, 0, 3)
    assert granted(waiting) == [0]
    waiting.announce(0)
    assert waiting.num_waiting == 0
