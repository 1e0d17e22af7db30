"""The prefix index has exactly the blocks that a worker reported, or none; routed blocks are a bounded estimate."""

import random

import pytest

from cluster.errors import MalformedMessage
from cluster.messages import CacheEvents, MemberId
from cluster.protocol import report_wire
from engine.kv.eviction import LeastRecentlyUsed
from engine.kv.prefix_cache import PrefixCache
from router.policies.prefix_index import ReportedBlocks, RoutedBlocks
from tandem.internal.v1 import worker_pb2

_A, _B = MemberId("a", "1"), MemberId("b", "1")
_CHAIN = (b"1", b"12", b"123")
_P, _D = MemberId("prefill", "1"), MemberId("decode", "1")
_LONG = [b"a", b"ab", b"abc", b"abcd"]


def _reported(worker: MemberId, *hashes: bytes, next_number: int = 10) -> ReportedBlocks:
    index = ReportedBlocks()
    _apply(index, worker, CacheEvents(0, next_number, hashes, cleared=True))
    return index


def _apply(index: ReportedBlocks, worker: MemberId, events: CacheEvents, max_blocks: int = 100) -> bool:
    applied = index.apply(worker, events, max_blocks=max_blocks)
    index.check()
    return applied


def test_only_leading_blocks_without_a_gap_count() -> None:
    index = _reported(_A, *_CHAIN)
    _apply(index, _B, CacheEvents(0, 2, (_CHAIN[0], _CHAIN[2]), cleared=True))
    assert index.leading_blocks(_CHAIN) == {_A: 3, _B: 1}
    assert index.leading_blocks((b"other", *_CHAIN)) == {}


def test_events_are_applied_in_order() -> None:
    index = _reported(_A, *_CHAIN)
    assert _apply(index, _A, CacheEvents(10, 12, (b"new",), (_CHAIN[2],)))
    assert (index.leading_blocks(_CHAIN), index.leading_blocks([b"new"])) == ({_A: 2}, {_A: 1})
    assert index.next_number(_A) == 12


def test_repeated_events_do_not_change_the_prefix_index() -> None:
    index = _reported(_A, *_CHAIN)
    assert _apply(index, _A, CacheEvents(8, 10, (), (_CHAIN[0],)))
    assert index.leading_blocks(_CHAIN) == {_A: 3}


@pytest.mark.parametrize("first", [11, 9])
def test_missing_or_overlapping_events_drop_the_worker_until_a_snapshot(first: int) -> None:
    index = _reported(_A, *_CHAIN)
    assert not _apply(index, _A, CacheEvents(first, 13, (b"new",)))
    assert (index.leading_blocks(_CHAIN), index.next_number(_A), len(index)) == ({}, None, 0)
    assert not _apply(index, _A, CacheEvents(13, 14, (b"newer",)))

    assert _apply(index, _A, CacheEvents(0, 20, _CHAIN[:1], cleared=True))
    assert index.leading_blocks(_CHAIN) == {_A: 1}


def test_a_snapshot_of_a_new_incarnation_drops_the_blocks_of_the_old_one() -> None:
    index, again = _reported(_A, *_CHAIN), MemberId("a", "2")
    assert not _apply(index, again, CacheEvents(10, 11, (b"new",)))
    assert _apply(index, again, CacheEvents(0, 1, _CHAIN[:1], cleared=True))
    assert index.leading_blocks(_CHAIN) == {again: 1}
    assert not _apply(index, _A, CacheEvents(10, 11, (b"late",)))
    assert index.leading_blocks([b"late"]) == {}


def test_a_snapshot_in_several_messages_is_followed_by_events() -> None:
    hashes = tuple(number.to_bytes(16, "big") for number in range(70_000))
    index = ReportedBlocks()
    messages = list(report_wire.cache_events_to_wire(CacheEvents(0, 99, hashes, cleared=True)))
    for message in messages:
        assert index.apply(_A, report_wire.cache_events_from_wire(message), max_blocks=70_000)
    assert index.apply(_A, CacheEvents(99, 100, (), (hashes[0],)), max_blocks=70_000)
    assert (len(messages), len(index)) == (2, 69_999)


def test_a_worker_that_reports_more_blocks_than_its_capacity_is_dropped() -> None:
    index = _reported(_B, *_CHAIN)
    assert not _apply(index, _A, CacheEvents(0, 5, _CHAIN, cleared=True), max_blocks=2)
    assert index.leading_blocks(_CHAIN) == {_B: 3}


def test_removing_one_worker_from_the_index_keeps_the_others() -> None:
    index = _reported(_A, *_CHAIN)
    _apply(index, _B, CacheEvents(0, 2, _CHAIN[:1], cleared=True))
    index.forget(_A)
    index.check()
    assert index.leading_blocks(_CHAIN) == {_B: 1}


def test_a_truncated_hash_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="multiple of 16"):
        report_wire.cache_events_from_wire(worker_pb2.CacheEvents(stored=b"x" * 17))


@pytest.mark.parametrize("seed", range(3))
def test_with_lost_repeated_or_reordered_events_the_index_equals_the_cache_or_is_empty(seed: int) -> None:
    dice, cache, index = random.Random(seed), PrefixCache(LeastRecentlyUsed()), ReportedBlocks()
    sent: list[CacheEvents] = []
    number, num_right = 0, 0
    for block_id in range(400):
        cache.add(block_id, b"%d" % block_id, b"root")
        cache.park(block_id)
        while cache.num_idle > 20:
            cache.evict()
        if dice.random() < 0.5:
            sent.append(cache.changes_since(number))
            number = cache.next_number
        fate = dice.random()
        if sent and fate < 0.05:
            sent.pop(dice.randrange(len(sent)))
        elif sent and fate < 0.1:
            sent.append(sent[0])
        elif len(sent) > 1 and fate < 0.15:
            sent[0], sent[1] = sent[1], sent[0]
        while sent and dice.random() < 0.7:
            if not _apply(index, _A, sent.pop(0)):
                sent, number = [cache.changes_since(None)], cache.next_number
        if index.next_number(_A) == cache.next_number:
            num_right += 1
            stored = cache.changes_since(None).stored
            assert {h for h in stored if index.leading_blocks([h])} == set(stored)
            assert len(index) == len(stored)
    assert num_right > 50


def test_routed_blocks_count_up_to_the_first_gap() -> None:
    routed = RoutedBlocks()
    routed.add(_LONG[:2], _P)
    routed.add(_LONG[:3], _D)
    routed.add(_LONG[3:], _P)

    assert routed.leading_blocks(_LONG) == {_D: 3, _P: 2}
    assert routed.leading_blocks([b"x", *_LONG]) == {}
    assert routed.leading_blocks([]) == {}


def test_a_restarted_worker_replaces_its_previous_incarnation() -> None:
    routed = RoutedBlocks()
    routed.add(_LONG, _P)
    routed.add(_LONG[:1], MemberId("prefill", "2"))

    assert routed.leading_blocks(_LONG) == {MemberId("prefill", "2"): 1}


def test_several_workers_of_a_chain_are_recorded_as_one_after_the_other() -> None:
    together, apart = RoutedBlocks(), RoutedBlocks()
    for routed in (together, apart):
        for number in range(3):
            routed.add(_LONG[: number + 1], MemberId(f"other{number}", "1"))
        routed.add(_LONG[1:2], MemberId("prefill", "0"))
    together.add(_LONG, _P, _D)
    for worker in (_P, _D):
        apart.add(_LONG, worker)

    for start in range(len(_LONG)):
        chain = _LONG[start:]
        assert list(together.leading_blocks(chain).items()) == list(apart.leading_blocks(chain).items())


def test_the_least_recently_used_routed_blocks_are_dropped_from_the_end_of_a_chain() -> None:
    routed = RoutedBlocks(max_blocks=5)
    routed.add([b"x"], _P)
    routed.add(_LONG, _P)
    routed.add([b"x"], _P)
    routed.add([b"y", b"yz"], _D)

    assert len(routed) == 5
    assert routed.leading_blocks(_LONG) == {_P: 2}
    assert routed.leading_blocks([b"x"]) == {_P: 1}
    assert routed.leading_blocks([b"y", b"yz"]) == {_D: 2}


def test_a_routed_block_keeps_the_latest_four_workers() -> None:
    routed = RoutedBlocks()
    for number in range(9):
        routed.add([b"a"], MemberId(f"prefill{number}", "1"))

    assert [member.id for member in routed.leading_blocks([b"a"])] == ["prefill8", "prefill7", "prefill6", "prefill5"]
