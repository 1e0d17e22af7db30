"""The places of blocks below the pool: recently used blocks stay longest, and failures never lose or double a slot or
file.
"""

import random
from collections.abc import Sequence

import pytest

from prefill_worker.prefixes.tier_index import Place, Store, TierIndex

_A, _B, _C, _D = (bytes([number]) * 16 for number in range(1, 5))


def _store(index: TierIndex, *hashes: bytes) -> list[tuple[bytes, bytes | None]]:
    """Store a chain; every copy succeeds. Return the stored and the demoted blocks."""
    stores = index.begin_store(hashes)
    for store in stores:
        index.end_store(store, is_stored=True, is_demoted=True)
    index.check()
    return [(store.block_hash, store.demoted) for store in stores]


def _is_in_host(index: TierIndex, block_hash: bytes) -> bool:
    (place,) = index.begin_read([block_hash])
    index.end_read([place])
    return place.slot is not None


def test_the_least_recently_used_block_is_demoted_and_read_from_disk() -> None:
    index = TierIndex(2, 2)
    _store(index, _A, _B)
    index.end_read(index.begin_read([_A]))
    assert _store(index, _C) == [(_C, _B)]
    assert [_is_in_host(index, h) for h in (_A, _B, _C)] == [True, False, True]


def test_the_end_of_a_chain_is_dropped_before_its_beginning() -> None:
    index = TierIndex(3, 9)
    _store(index, _A, _B, _C)
    assert _store(index, _D) == [(_D, _C)]


def test_a_block_on_disk_is_stored_in_host_memory_again_and_its_file_stays() -> None:
    index = TierIndex(1, 2)
    _store(index, _A)
    _store(index, _B)
    assert _store(index, _A) == [(_A, _B)]
    assert _store(index, _B) == [(_B, None)]  # both have files by now
    assert (index.num_in_host, index.num_on_disk) == (1, 2)


def test_the_oldest_file_is_dropped_and_without_disk_the_oldest_block() -> None:
    index = TierIndex(1, 1)
    _store(index, _A)
    _store(index, _B)
    (store,) = index.begin_store([_C])
    assert (store.demoted, store.dropped) == (_B, (_A,))
    index.end_store(store, is_stored=True, is_demoted=True)
    assert index.num_held([_A]) == 0

    index = TierIndex(1, 0)
    _store(index, _A)
    assert _store(index, _B) == [(_B, None)]
    assert index.num_held([_A]) == 0


def test_a_block_that_is_read_keeps_its_slot() -> None:
    index = TierIndex(1, 0)
    _store(index, _A)
    places = index.begin_read([_A])
    assert index.begin_store([_B]) == ()
    index.end_read(places)
    assert len(index.begin_store([_B])) == 1


def test_a_block_that_is_copied_in_is_not_read_and_not_stored_twice() -> None:
    index = TierIndex(2, 0)
    (store,) = index.begin_store([_A])
    assert index.num_held([_A]) == 0
    assert index.begin_store([_A]) == ()
    index.end_store(store, is_stored=True, is_demoted=False)
    assert index.num_held([_A]) == 1


def test_a_block_that_could_not_be_read_leaves_the_tiers() -> None:
    index = TierIndex(2, 2)
    _store(index, _A, _B)
    places = index.begin_read([_A, _B])
    index.end_read(places, lost=_B)
    index.check()
    assert index.num_held([_A, _B]) == 1


def test_a_read_ends_at_the_first_gap() -> None:
    index = TierIndex(2, 0)
    _store(index, _A)
    _store(index, _C)
    assert index.num_held([_A, _B, _C]) == 1
    assert [place.block_hash for place in index.begin_read([_A, _B, _C])] == [_A]


def test_files_of_an_earlier_run_are_kept_up_to_the_limit_the_newest_first() -> None:
    index = TierIndex(1, 2)
    assert index.add_files([_A, _B, _C]) == (_A,)
    assert index.num_held([_B, _C]) == 2
    assert index.only_in_host() == ()


def test_at_shutdown_the_most_recently_used_blocks_go_to_disk_first() -> None:
    index = TierIndex(3, 2)
    _store(index, _A)
    _store(index, _B)
    _store(index, _C)
    assert [place.block_hash for place in index.only_in_host()] == [_C, _B]


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_copies_and_failures_loses_a_slot(seed: int) -> None:
    dice, index = random.Random(seed), TierIndex(5, 4)
    chains = [tuple(bytes([chain, n]) * 8 for n in range(dice.randrange(1, 8))) for chain in range(6)]
    storing, reading = list[Store](), list[Sequence[Place]]()
    for _ in range(600):
        fate = dice.random()
        if fate < 0.4:
            storing += index.begin_store(dice.choice(chains))
        elif fate < 0.6:
            reading.append(index.begin_read(dice.choice(chains)))
        elif fate < 0.8 and storing:
            store = storing.pop(dice.randrange(len(storing)))
            index.end_store(store, is_stored=dice.random() < 0.8, is_demoted=dice.random() < 0.8)
        elif reading:
            places = reading.pop(dice.randrange(len(reading)))
            index.end_read(places, places[-1].block_hash if places and dice.random() < 0.3 else None)
        index.check()
    pinned = {place.block_hash: place.slot for places in reading for place in places if place.slot is not None}
    for block_hash, slot in pinned.items():
        (place,) = index.begin_read([block_hash])
        assert place.slot == slot
