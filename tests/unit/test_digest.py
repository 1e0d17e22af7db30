"""The digest of a block: one definition, and no damage to a single byte passes."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import digest
from kvtransfer.digest import DIGEST_BYTES, digest_blocks, digest_bytes, digest_tensor, split_digests
from tests.contract.kv_pools import random_pool


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (b"", "b228b19bfd483108b59c793f0f618cd5"),
        (b"tandem", "d61ea22290251453951509e5d8d536a5"),
        (bytes(4), "0f208b590f3cca8781ceae1069d9e14b"),
        (bytes(range(256)) * 512, "97875ed50464a05e875ee73f00f06e82"),
    ],
)
def test_the_definition_never_moves(data: bytes, digest: str) -> None:
    """Workers of different versions compare these values."""
    assert digest_bytes(data).hex() == digest


def written_out(data: bytes) -> bytes:
    """The definition without any of the tricks: sums in Python's own integers."""
    coefficients = digest._coefficients().to(torch.int64).numpy()
    padded = np.frombuffer(data + bytes(-len(data) % 8192), dtype=np.int8).astype(np.int64)
    sums = padded.reshape(-1, 8192) @ coefficients
    hashed = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=16, person=b"tandem kv block")
    hashed.update(sums.astype("<i4").tobytes())
    return hashed.digest()


@given(st.binary(max_size=300))
def test_short_blocks_follow_the_definition(data: bytes) -> None:
    assert digest_bytes(data) == written_out(data)


def test_long_blocks_follow_the_definition_at_the_extremes() -> None:
    dice = np.random.default_rng(5)
    for block in (bytes([0x80]) * 65_536, bytes([0x7F]) * 65_537, dice.bytes(200_003)):
        assert digest_bytes(block) == written_out(block)


def test_a_processor_without_exact_int8_products_gives_the_same_digests() -> None:
    pieces = torch.randint(-128, 128, (40, 8192), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    coefficients = digest._coefficients()
    assert torch.equal(digest._wide_product(pieces, coefficients), digest._host_product()(pieces, coefficients))


@given(st.integers(0, 20_000), st.integers(1, 255))
def test_any_changed_byte_moves_every_sum_of_its_piece(place: int, change: int) -> None:
    before = np.random.default_rng(1).integers(0, 256, 20_001, dtype=np.uint8)
    after = before.copy()
    after[place] ^= change
    sums = [
        digest._host_product()(digest._pieces(torch.from_numpy(row)[None]), digest._coefficients())
        for row in (before, after)
    ]
    moved = (sums[0] != sums[1]).any(dim=1)
    assert (sums[0] != sums[1])[place // 8192].all() and moved.sum() == 1
    assert digest_bytes(before.tobytes()) != digest_bytes(after.tobytes())


def test_swapped_words_swapped_pieces_and_lengths_are_caught() -> None:
    block = np.random.default_rng(3).bytes(16_384)
    others = (block + bytes(4), block + bytes(1), block[4:8] + block[:4] + block[8:], block[8192:] + block[:8192])
    assert len({digest_bytes(one) for one in (block, *others)}) == 5


def test_a_pools_blocks_are_digested_in_the_order_asked_for() -> None:
    pool = random_pool(6, seed=1)
    for block_ids in ([4, 0, 4], [1, 2, 3], [5]):
        expected = tuple(digest_bytes(pool.raw[block].numpy().tobytes()) for block in block_ids)
        assert digest_blocks(pool, block_ids) == expected
    digests = digest_blocks(pool, [4, 0, 4])
    assert split_digests(b"".join(digests)) == digests
    with pytest.raises(ValueError, match="multiple"):
        split_digests(bytes(DIGEST_BYTES + 1))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_digest() -> None:
    blocks = torch.randint(0, 256, (5, 100_003), dtype=torch.uint8)
    assert digest_tensor(blocks.cuda()) == digest_tensor(blocks)
