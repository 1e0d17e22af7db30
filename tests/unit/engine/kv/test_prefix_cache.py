"""The order of eviction in the prefix cache, and its cache events. Hit rates: test_eviction.py."""

from collections.abc import Callable

import pytest

from cluster.messages import CacheEvents
from engine.kv.eviction import Eviction, LeastRecentlyUsed, LeastValuable
from engine.kv.prefix_cache import CacheEvent, PrefixCache

_ROOT = b"root"


def _cached(*chains: bytes) -> PrefixCache:
    """Return a cache with blocks of one letter each, numbered in order of appearance. The chains are released in the
    given order.
    """
    cache = PrefixCache(LeastRecentlyUsed())
    numbers: dict[bytes, int] = {}
    for chain in chains:
        for end in range(1, len(chain) + 1):
            number = numbers.setdefault(chain[:end], len(numbers))
            cache.add(number, chain[:end], chain[: end - 1] or _ROOT)
    for chain in chains:
        for end in range(len(chain), 0, -1):
            if cache.is_idle(numbers[chain[:end]]):
                cache.unpark(numbers[chain[:end]])
            cache.park(numbers[chain[:end]])
    return cache


def _evicted(cache: PrefixCache) -> list[bytes]:
    """Evict all idle blocks; return their hashes in order of eviction."""
    while cache.num_idle:
        cache.evict()
    events = cache.events_since(0)
    assert events is not None
    return [event.block_hash for event in events if not event.is_stored]


def test_the_least_recently_used_block_is_evicted_first_and_children_before_parents() -> None:
    assert _evicted(_cached(b"ab", b"xyz")) == [b"ab", b"a", b"xyz", b"xy", b"x"]
    assert _evicted(_cached(b"abc", b"abd")) == [b"abc", b"abd", b"ab", b"a"]
    assert _evicted(_cached(b"abd", b"x", b"abc")) == [b"abd", b"x", b"abc", b"ab", b"a"]


def test_a_parent_block_is_evicted_after_its_child() -> None:
    cache = PrefixCache(LeastRecentlyUsed())
    for number, block_hash in enumerate((b"a", b"ab", b"abc", b"x")):
        cache.add(number, block_hash, block_hash[:-1] or _ROOT)
    for number in (1, 0, 3, 2):
        cache.park(number)

    assert _evicted(cache) == [b"abc", b"ab", b"a", b"x"]


@pytest.mark.parametrize("eviction", [LeastRecentlyUsed, lambda: LeastValuable(100)])
def test_a_block_used_again_is_not_evicted(eviction: Callable[[], Eviction]) -> None:
    cache = PrefixCache(eviction())
    for number in range(4):
        cache.add(number, b"abcd"[: number + 1], b"abcd"[:number] or _ROOT)
    for number in (0, 1, 2, 3):  # the first to go is the beginning, so the whole chain is to go
        cache.park(number)

    assert cache.evict() == 3
    for number in (0, 1, 2):
        cache.unpark(number)
    cache.add(4, b"x", _ROOT)
    cache.park(4)
    assert cache.evict() == 4
    cache.check(in_use={0, 1, 2})


def test_a_parent_block_is_evicted_if_only_its_children_are_in_use_and_no_other_block_is_idle() -> None:
    cache = PrefixCache(LeastRecentlyUsed())
    cache.add(0, b"a", _ROOT)
    cache.add(1, b"ab", b"a")
    cache.park(0)

    assert cache.evict() == 0
    assert cache.match([b"a", b"ab"]) == ()
    cache.add(2, b"a", _ROOT)
    assert cache.match([b"a", b"ab"]) == (2, 1)
    cache.check(in_use={1, 2})


def test_a_block_never_changes_its_content() -> None:
    cache = _cached(b"a")
    with pytest.raises(AssertionError, match="two contents"):
        cache.add(0, b"b", _ROOT)


def test_events_since_a_number_are_complete_or_reported_as_lost() -> None:
    cache = _cached(b"ab")
    cache.evict()

    assert cache.events_since(1) == (CacheEvent(1, b"ab", True), CacheEvent(2, b"ab", False))
    assert cache.events_since(3) == ()
    assert cache.events_since(4) is None
    assert cache.changes_since(None) == CacheEvents(0, 3, stored=(b"a",), cleared=True)

    for number in range(5000):
        cache.add(10 + number, b"%d" % number, _ROOT)
    assert cache.events_since(3) is None
    assert cache.events_since(5003) == ()
    assert len(cache.events_since(5003 - 4096) or ()) == 4096


def test_cache_events_contain_net_changes() -> None:
    cache = _cached(b"a")
    cache.add(7, b"x", _ROOT)
    cache.park(7)
    for _ in range(2):
        cache.evict()
    cache.add(0, b"y", _ROOT)

    assert cache.changes_since(0) == CacheEvents(0, 5, stored=(b"y",))  # the others came and went
    assert cache.changes_since(1) == CacheEvents(1, 5, stored=(b"y",), removed=(b"a",))
    assert cache.changes_since(5) == CacheEvents(5, 5, stored=())
    everything = CacheEvents(0, 5, stored=(b"y",), cleared=True)
    assert cache.changes_since(None) == everything == cache.changes_since(6)


def test_check_finds_a_block_in_use_that_could_be_evicted() -> None:
    cache = _cached(b"ab")
    cache.check(in_use=set())
    with pytest.raises(AssertionError, match="idle"):
        cache.check(in_use={0})
