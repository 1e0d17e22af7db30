"""What a router knows of prefill workers' caches: exactly what they have, or that it does not know."""

import random

import pytest

from cluster.errors import MalformedMessage
from cluster.messages import MemberId, PrefixNews
from cluster.protocol import prefix_news
from engine.kv.eviction import LeastRecentlyUsed
from engine.kv.prefix_cache import PrefixCache
from router.policies.prefix_index import PrefixIndex
from tandem.v1 import worker_pb2

_A, _B = MemberId("a", "1"), MemberId("b", "1")
_CHAIN = (b"1", b"12", b"123")


def _knowing(worker: MemberId, *hashes: bytes, next_number: int = 10) -> PrefixIndex:
    index = PrefixIndex()
    _apply(index, worker, PrefixNews(0, next_number, hashes, is_snapshot=True))
    return index


def _apply(index: PrefixIndex, worker: MemberId, news: PrefixNews, max_blocks: int = 100) -> bool:
    applied = index.apply(worker, news, max_blocks=max_blocks)
    index.check()
    return applied


def test_the_longest_beginning_counts_without_a_hole() -> None:
    index = _knowing(_A, *_CHAIN)
    _apply(index, _B, PrefixNews(0, 2, (_CHAIN[0], _CHAIN[2]), is_snapshot=True))
    assert index.holders(_CHAIN) == {_A: 3, _B: 1}
    assert index.holders((b"other", *_CHAIN)) == {}


def test_events_in_their_order_are_followed() -> None:
    index = _knowing(_A, *_CHAIN)
    assert _apply(index, _A, PrefixNews(10, 12, (b"new",), (_CHAIN[2],)))
    assert (index.holders(_CHAIN), index.holders([b"new"])) == ({_A: 2}, {_A: 1})
    assert index.next_number(_A) == 12


def test_news_that_is_known_already_changes_nothing() -> None:
    index = _knowing(_A, *_CHAIN)
    assert _apply(index, _A, PrefixNews(8, 10, (), (_CHAIN[0],)))
    assert index.holders(_CHAIN) == {_A: 3}


@pytest.mark.parametrize("first", [11, 9])
def test_a_gap_or_half_known_news_ends_what_is_known_until_a_snapshot(first: int) -> None:
    index = _knowing(_A, *_CHAIN)
    assert not _apply(index, _A, PrefixNews(first, 13, (b"new",)))
    assert (index.holders(_CHAIN), index.next_number(_A), len(index)) == ({}, None, 0)
    assert not _apply(index, _A, PrefixNews(13, 14, (b"newer",)))

    assert _apply(index, _A, PrefixNews(0, 20, _CHAIN[:1], is_snapshot=True))
    assert index.holders(_CHAIN) == {_A: 1}


def test_a_restart_ends_what_the_old_incarnation_had() -> None:
    index, again = _knowing(_A, *_CHAIN), MemberId("a", "2")
    assert not _apply(index, again, PrefixNews(10, 11, (b"new",)))
    assert _apply(index, again, PrefixNews(0, 1, _CHAIN[:1], is_snapshot=True))
    assert index.holders(_CHAIN) == {again: 1}
    assert not _apply(index, _A, PrefixNews(10, 11, (b"late",)))
    assert index.holders([b"late"]) == {}


def test_a_snapshot_in_parts_goes_on_with_the_events_after_it() -> None:
    hashes = tuple(number.to_bytes(16, "big") for number in range(70_000))
    index = PrefixIndex()
    messages = list(prefix_news.to_wire(PrefixNews(0, 99, hashes, is_snapshot=True)))
    for message in messages:
        assert index.apply(_A, prefix_news.from_wire(message), max_blocks=70_000)
    assert index.apply(_A, PrefixNews(99, 100, (), (hashes[0],)), max_blocks=70_000)
    assert (len(messages), len(index)) == (2, 69_999)


def test_a_worker_that_claims_more_than_it_has_room_for_is_not_believed() -> None:
    index = _knowing(_B, *_CHAIN)
    assert not _apply(index, _A, PrefixNews(0, 5, _CHAIN, is_snapshot=True), max_blocks=2)
    assert index.holders(_CHAIN) == {_B: 3}


def test_a_forgotten_worker_leaves_the_others() -> None:
    index = _knowing(_A, *_CHAIN)
    _apply(index, _B, PrefixNews(0, 2, _CHAIN[:1], is_snapshot=True))
    index.forget(_A)
    index.check()
    assert index.holders(_CHAIN) == {_B: 1}


def test_hashes_that_are_cut_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="multiple of 16"):
        prefix_news.from_wire(worker_pb2.PrefixNews(added=b"x" * 17))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_lost_doubled_or_late_the_index_has_what_the_cache_has_or_nothing(seed: int) -> None:
    dice, cache, index = random.Random(seed), PrefixCache(LeastRecentlyUsed()), PrefixIndex()
    sent: list[PrefixNews] = []
    number, num_right = 0, 0
    for block_id in range(400):
        cache.add(block_id, b"%d" % block_id, b"root")
        cache.park(block_id)
        while cache.num_idle > 20:
            cache.evict()
        if dice.random() < 0.5:
            sent.append(cache.news_since(number))
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
                sent, number = [cache.news_since(None)], cache.next_number
        if index.next_number(_A) == cache.next_number:
            num_right += 1
            assert {h for h in cache.snapshot().block_hashes if index.holders([h])} == set(
                cache.snapshot().block_hashes
            )
            assert len(index) == len(cache.snapshot().block_hashes)
    assert num_right > 50
