"""The order of eviction that keeps the blocks that are used again: on recorded conversations, and on made ones that
differ from them.
"""

import heapq
import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.block_pool import BlockPool
from engine.kv.eviction import LeastValuable, values

_ROOT = b"root"
# Mooncake's conversation trace (Qin et al., FAST 2025), first 2,000 rows: prompts as ids of blocks of 512 tokens.
_TRACES = Path(os.environ.get("TRACES", Path(__file__).parents[5] / "shared" / "traces"))
_TRACE = _TRACES / "conversation_trace.head2000.jsonl"
_needs_trace = pytest.mark.skipif(not _TRACE.exists(), reason=f"no {_TRACE.name} where TRACES says")

_Prompts = list[list[int]]


def _recorded() -> tuple[_Prompts, list[int]]:
    rows = [json.loads(line) for line in _TRACE.read_text().splitlines()]
    return [row["hash_ids"] for row in rows], [row["input_length"] for row in rows]


def _made(seed: int, *, num_prompts: int, another_turn: float, reading: float) -> _Prompts:
    """Return generated conversations over a few system prompts: another turn follows with probability `another_turn`,
    after a number of other prompts drawn from `reading`.
    """
    dice, fresh = random.Random(seed), itertools.count()
    beginnings = [[next(fresh) for _ in range(dice.randrange(1, 6))] for _ in range(8)]
    coming: list[tuple[float, int, list[int]]] = []
    prompts = []
    for now in range(num_prompts):
        if coming and coming[0][0] <= now:
            prompt = heapq.heappop(coming)[2]
        else:
            prompt = list(beginnings[min(int(dice.paretovariate(1)) - 1, 7)])
        prompt += [next(fresh) for _ in range(min(200, 1 + int(dice.lognormvariate(2.0, 1.2))))]
        prompts.append(list(prompt))
        if dice.random() < another_turn and len(prompt) < 400:
            heapq.heappush(coming, (now + reading * dice.lognormvariate(0, 0.7), now, prompt))
    return prompts


def _hits(prompts: _Prompts, num_blocks: int, eviction: str) -> list[int]:
    """Return the number of found blocks of each prompt, in order."""
    pool = BlockPool(num_blocks, eviction)
    hits = []
    for prompt in prompts:
        hashes = [b"%d" % block for block in prompt]
        found = pool.find(hashes)
        block_ids = pool.reserve_beside(found, len(hashes) - len(found))
        assert block_ids is not None
        pool.keep(block_ids, hashes, _ROOT)
        pool.drop_references(block_ids)
        hits.append(len(found))
    pool.check()
    return hits


@lru_cache
def _recorded_hits(num_blocks: int, eviction: str) -> list[int]:
    return _hits(_recorded()[0], num_blocks, eviction)


def _share(hits: Sequence[int], prompts: Sequence[Sequence[int]]) -> float:
    return sum(hits) / sum(map(len, prompts))


@_needs_trace
@pytest.mark.parametrize(("num_blocks", "blocks_hit", "tokens_hit"), [(60_000, 0.289, 0.294), (12_000, 0.222, 0.226)])
def test_hit_rates_of_lru_on_real_conversations(num_blocks: int, blocks_hit: float, tokens_hit: float) -> None:
    """The first pool holds all blocks: no cache has a higher hit rate."""
    prompts, lengths = _recorded()
    hits = _recorded_hits(num_blocks, "lru")

    tokens = sum(min(512 * hit, length) for hit, length in zip(hits, lengths, strict=True))
    assert _share(hits, prompts) == pytest.approx(blocks_hit, abs=0.001)
    assert tokens / sum(lengths) == pytest.approx(tokens_hit, abs=0.001)


@_needs_trace
@pytest.mark.parametrize(
    ("num_blocks", "lru", "value"), [pytest.param(3_000, 0.061, 0.116, marks=pytest.mark.slow), (12_000, 0.222, 0.234)]
)
def test_the_least_valuable_beats_lru_on_real_conversations(num_blocks: int, lru: float, value: float) -> None:
    """The advantage holds in both halves; the policy was chosen on the first half alone."""
    prompts, _ = _recorded()
    by_lru, by_value = (_recorded_hits(num_blocks, eviction) for eviction in ("lru", "value"))

    assert _share(by_lru, prompts) == pytest.approx(lru, abs=0.001)
    assert _share(by_value, prompts) == pytest.approx(value, abs=0.001)
    for half in (slice(1000), slice(1000, 2000)):
        assert sum(by_value[half]) > sum(by_lru[half])


def test_the_least_valuable_beats_lru_where_conversations_continue_after_many_others() -> None:
    prompts = _made(1, num_prompts=1000, another_turn=0.75, reading=200)
    assert sum(_hits(prompts, 3_000, "value")) > 1.2 * sum(_hits(prompts, 3_000, "lru"))


def test_the_least_valuable_is_nearly_lru_where_lru_is_right() -> None:
    """The breaks between turns are short, and nearly all reused blocks fit."""
    prompts = _made(2, num_prompts=1000, another_turn=0.5, reading=60)
    assert sum(_hits(prompts, 3_000, "value")) > 0.97 * sum(_hits(prompts, 3_000, "lru"))


def test_without_statistics_the_oldest_block_is_evicted_first() -> None:
    eviction = LeastValuable(1000)
    for number in range(100):
        eviction.park(number, b"%d" % number)
    assert list(itertools.islice(eviction.candidates(), 100)) == list(range(100))


def test_blocks_that_are_reused_at_a_great_age_are_kept_until_then() -> None:
    """Every tenth block is used again after 300 others; the blocks in between are twice as many as fit."""
    blocks: Iterator[int] = itertools.count(1_000_000)
    prompts = [[turn % 300 if turn % 10 == 0 else next(blocks)] for turn in range(6000)]
    assert sum(_hits(prompts, 150, "lru")) == 0
    assert sum(_hits(prompts[3000:], 150, "value")) > 200  # of 270 that can be found


@given(st.lists(st.floats(0, 0.2), min_size=1, max_size=12))
def test_the_value_of_an_age_is_the_best_rate_over_all_times_to_keep(chances: list[float]) -> None:
    uses, ages = [0.0], [0.0]
    for chance in chances:
        ages.append(ages[-1] + max(1 - uses[-1] - chance / 2, 0.01))
        uses.append(min(uses[-1] + chance, 0.99))
    for age, value in enumerate(values(chances)):
        rates = [(uses[end] - uses[age]) / (ages[end] - ages[age]) for end in range(age + 1, len(uses))]
        assert value == pytest.approx(max(rates, default=0.0))


def test_random_use_keeps_the_pool_consistent_and_evicts_children_before_parents() -> None:
    dice, pool = random.Random(5), BlockPool(40)
    held: list[tuple[int, ...]] = []
    for _ in range(1500):
        prompt = [
            b"%d" % dice.randrange(3),
            *(b"%d/%d" % (dice.randrange(3), place) for place in range(dice.randrange(6))),
        ]
        hashes = [b"".join(prompt[: end + 1]) for end in range(len(prompt))]
        found = pool.find(hashes)
        pool.lease_copied(found)
        block_ids = pool.reserve_beside(found, len(hashes) - len(found))
        pool.end_lease(found)
        if block_ids is not None:
            pool.keep(block_ids, hashes, _ROOT)
            held.append(block_ids)
        while held and (block_ids is None or dice.random() < 0.5):
            pool.drop_references(held.pop(dice.randrange(len(held))))
            block_ids = ()
        pool.check()
        kept = set(pool._cache._blocks)
        orphans = {h for h in kept if pool._cache._entries[pool._cache._blocks[h]].parent not in {*kept, _ROOT}}
        assert not orphans, "a block is kept that cannot be found"
    assert pool.num_evicted > 500
