"""Which cached block goes first, and how those who follow the cache hear of it."""

import json
import os
from pathlib import Path

import pytest

from engine.block_pool import BlockPool
from engine.prefix_cache import CacheEvent, PrefixCache

_ROOT = b"root"
# Mooncake's conversation trace (Qin et al., FAST 2025), first 2,000 rows: prompts as ids of blocks of 512 tokens.
_TRACES = Path(os.environ.get("TRACES", Path(__file__).parents[3] / "shared" / "traces"))
_TRACE = _TRACES / "conversation_trace.head2000.jsonl"


def _cached(*chains: bytes) -> PrefixCache:
    """Blocks of one letter each, numbered in order of appearance; each chain was let go after the one before."""
    cache = PrefixCache()
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
    """All that is idle, in the order in which it goes."""
    while cache.num_idle:
        cache.evict()
    events = cache.events_since(0)
    assert events is not None
    return [event.block_hash for event in events if not event.is_added]


def test_the_least_recently_used_goes_first_and_children_before_parents() -> None:
    assert _evicted(_cached(b"ab", b"xyz")) == [b"ab", b"a", b"xyz", b"xy", b"x"]
    assert _evicted(_cached(b"abc", b"abd")) == [b"abc", b"abd", b"ab", b"a"]
    assert _evicted(_cached(b"abd", b"x", b"abc")) == [b"abd", b"x", b"abc", b"ab", b"a"]


def test_a_parent_that_was_let_go_before_its_child_still_goes_after_it() -> None:
    cache = PrefixCache()
    for number, block_hash in enumerate((b"a", b"ab", b"abc", b"x")):
        cache.add(number, block_hash, block_hash[:-1] or _ROOT)
    for number in (1, 0, 3, 2):
        cache.park(number)

    assert _evicted(cache) == [b"x", b"abc", b"ab", b"a"]


def test_a_parent_whose_children_are_all_in_use_is_given_up_rather_than_nothing() -> None:
    cache = PrefixCache()
    cache.add(0, b"a", _ROOT)
    cache.add(1, b"ab", b"a")
    cache.park(0)

    assert cache.evict() == 0
    assert cache.match([b"a", b"ab"]) == ()
    cache.add(2, b"a", _ROOT)
    assert cache.match([b"a", b"ab"]) == (2, 1)
    cache.check(in_use={1, 2})


def test_a_block_has_one_content() -> None:
    cache = _cached(b"a")
    with pytest.raises(AssertionError, match="two contents"):
        cache.add(0, b"b", _ROOT)


def test_followers_hear_every_change_by_number_or_that_they_missed_some() -> None:
    cache = _cached(b"ab")
    cache.evict()

    assert cache.events_since(1) == (CacheEvent(1, b"ab", True), CacheEvent(2, b"ab", False))
    assert cache.events_since(3) == ()
    assert cache.events_since(4) is None
    snapshot = cache.snapshot()
    assert (snapshot.next_number, snapshot.block_hashes) == (3, (b"a",))

    for number in range(5000):
        cache.add(10 + number, b"%d" % number, _ROOT)
    assert cache.events_since(3) is None
    assert cache.events_since(5003) == ()
    assert len(cache.events_since(5003 - 4096) or ()) == 4096


def test_check_finds_a_block_in_use_that_could_be_evicted() -> None:
    cache = _cached(b"ab")
    cache.check(in_use=set())
    with pytest.raises(AssertionError, match="idle"):
        cache.check(in_use={0})


@pytest.mark.skipif(not _TRACE.exists(), reason=f"no {_TRACE.name} where TRACES says")
@pytest.mark.parametrize(("num_blocks", "blocks_hit", "tokens_hit"), [(60_000, 0.289, 0.294), (12_000, 0.222, 0.226)])
def test_hit_rates_on_real_conversations(num_blocks: int, blocks_hit: float, tokens_hit: float) -> None:
    """The first pool holds everything: no cache finds more. In the second the least recently used go."""
    pool = BlockPool(num_blocks)
    num_blocks_hit = num_tokens_hit = num_blocks_asked = num_tokens_asked = 0
    for line in _TRACE.read_text().splitlines():
        row = json.loads(line)
        hashes = [b"%d" % block for block in row["hash_ids"]]
        found = pool.find(hashes)
        block_ids = pool.reserve_beside(found, len(hashes) - len(found))
        assert block_ids is not None
        pool.keep(block_ids, hashes, _ROOT)
        pool.release(block_ids)
        num_blocks_hit += len(found)
        num_blocks_asked += len(hashes)
        num_tokens_hit += min(512 * len(found), row["input_length"])
        num_tokens_asked += row["input_length"]

    pool.check()
    assert num_blocks_hit / num_blocks_asked == pytest.approx(blocks_hit, abs=0.001)
    assert num_tokens_hit / num_tokens_asked == pytest.approx(tokens_hit, abs=0.001)
