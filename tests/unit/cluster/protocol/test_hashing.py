"""Hashes of prompts and blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.protocol.hashing import (
    HASH_BYTES,
    BlockChain,
    hash_prompt,
    hash_root,
    keyed_chains,
    nameless_chains,
    pack_ids,
)

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def hash_blocks(ids: list[int], block_size: int, parent: bytes = b"") -> list[bytes]:
    chain = BlockChain(KEY, block_size, parent)
    chain.extend(ids)
    return chain.hashes


def test_hashes_never_change() -> None:
    """Members of different versions compare hashes: a change of the hash is a new protocol version."""
    assert hash_prompt(KEY, [1, 2, 3]).hex() == "bd3aba358d7ba575fbf84c5384ccee65"
    assert [block.hex() for block in hash_blocks([1, 2, 3, 4, 5], 2)] == [
        "a3008a37d448f5dbc5599c440b9718f9",
        "209bda39b4eadc4fe46d79fddc1f53e2",
    ]


@given(IDS, IDS)
def test_prompts_hash_equal_exactly_if_they_are_equal(first: list[int], second: list[int]) -> None:
    assert (hash_prompt(KEY, first) == hash_prompt(KEY, second)) == (first == second)
    assert len(hash_prompt(KEY, first)) == HASH_BYTES


@given(IDS, st.integers(1, 5))
def test_only_full_blocks_have_a_hash(ids: list[int], block_size: int) -> None:
    assert len(hash_blocks(ids, block_size)) == len(ids) // block_size


@given(st.lists(st.integers(0, 9), min_size=8, max_size=24), st.data())
def test_a_block_hash_covers_all_tokens_up_to_its_end(ids: list[int], data: st.DataObject) -> None:
    changed_at = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids[:changed_at], ids[changed_at] + 1, *ids[changed_at + 1 :]]
    before, after = hash_blocks(ids, 4), hash_blocks(changed, 4)
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < changed_at // 4 for i in range(len(before))]


def test_a_hash_differs_by_key_tenant_and_use() -> None:
    ids = [1, 2, 3, 4]
    roots = [
        hash_root(KEY),
        hash_root(OTHER_KEY),
        hash_root(KEY, salt="tenant a"),
        hash_root(KEY, adapter="tenant a"),
        hash_root(KEY, content="int8"),
        hash_root(KEY, salt="a", adapter="b"),
        hash_root(KEY, salt="ab"),
    ]
    hashes = {block for root in (*roots, b"") for block in hash_blocks(ids, len(ids), root)}
    hashes |= {hash_prompt(KEY, ids), hash_prompt(OTHER_KEY, ids), *roots}
    assert len(hashes) == len(roots) * 2 + 3


@given(IDS, st.integers(0, 40), st.integers(1, 5))
def test_a_chain_of_packed_ids_has_the_hashes_of_a_chain_of_ids(ids: list[int], num: int, block_size: int) -> None:
    new_chain = keyed_chains(KEY, block_size)
    of_packed, expected = new_chain("tenant", "native"), new_chain("tenant", "native")
    expected.extend(ids)
    for begin in (ids[:num], ids):
        of_packed.extend_packed(pack_ids(begin))
    assert of_packed.hashes == expected.hashes


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=10), st.integers(1, 4))
def test_a_chain_grown_in_steps_has_the_hashes_of_a_whole_chain(
    ids: list[int], more: list[int], block_size: int
) -> None:
    new_chain = keyed_chains(KEY, block_size)
    chain = new_chain("tenant", "native")
    chain.extend(ids)
    apart = chain.copy()
    for end in range(len(more) + 1):
        apart.extend(ids + more[:end])

    assert apart.hashes == hash_blocks(ids + more, block_size, hash_root(KEY, salt="tenant"))
    assert chain.hashes == apart.hashes[: len(ids) // block_size]
    assert [apart.parent_of(i) for i in range(1, len(apart.hashes) + 1)] == apart.hashes
    assert apart.parent_of(0) == hash_root(KEY, salt="tenant")


def test_without_prefix_sharing_blocks_have_no_hash() -> None:
    chain = nameless_chains()("tenant", "native")
    chain.extend(range(100))
    chain.extend_packed(pack_ids(range(100)))
    assert chain.hashes == chain.copy().hashes == []


def test_a_chain_can_be_continued_block_by_block() -> None:
    first, second = hash_blocks([1, 2, 3, 4], 2)
    assert hash_blocks([3, 4], 2, parent=first) == [second]


def test_an_invalid_token_id_is_an_error() -> None:
    with pytest.raises(ValueError, match="32 bits"):
        hash_prompt(KEY, [-1])
