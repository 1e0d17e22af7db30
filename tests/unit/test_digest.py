"""The digest of a block: one definition, and no damage to a single word passes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.digest import DIGEST_BYTES, digest_blocks, digest_bytes, digest_tensor, split_digests
from tests.contract.kv_pools import random_pool


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (b"", "00000000000000000000000000000000"),
        (b"tandem", "37f9623f19c6c5738dfe130787a64fc6"),
        (bytes(4), "d4dd9c5ca490004f0ccaa34c83c46212"),
        (bytes(range(256)) * 512, "58b742a08a36b2daa02d5fd773fe39e6"),
    ],
)
def test_the_definition_never_moves(data: bytes, digest: str) -> None:
    """Workers of different versions compare these values."""
    assert digest_bytes(data).hex() == digest


@given(st.binary(min_size=1, max_size=300))
def test_torch_and_numpy_give_the_same_digest(data: bytes) -> None:
    assert digest_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8)[None])[0] == digest_bytes(data)


def test_torch_and_numpy_agree_past_one_chunk() -> None:
    blocks = torch.randint(0, 256, (3, 200_003), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    assert digest_tensor(blocks) == tuple(digest_bytes(row.numpy()) for row in blocks)


@given(st.integers(0, 63), st.integers(1, 2**32 - 1))
def test_any_change_within_one_word_is_caught(word: int, change: int) -> None:
    words = np.arange(64, dtype=np.uint32) * np.uint32(2654435761)
    before = digest_bytes(words.tobytes())
    words[word] ^= np.uint32(change)
    after = digest_bytes(words.tobytes())
    assert before[:8] != after[:8] and before[8:] != after[8:]  # each sum alone sees it


def test_swapped_words_lengths_and_top_bits_are_caught() -> None:
    block = bytearray(np.random.default_rng(3).bytes(4096))
    digests = {digest_bytes(bytes(block)), digest_bytes(bytes(block) + bytes(4)), digest_bytes(bytes(block) + bytes(1))}
    digests.add(digest_bytes(bytes(block[4:8] + block[:4] + block[8:])))
    block[3] ^= 0x80
    block[7] ^= 0x80
    digests.add(digest_bytes(bytes(block)))
    assert len(digests) == 5


def test_a_pools_blocks_are_digested_in_the_order_asked_for() -> None:
    pool = random_pool(6, seed=1)
    digests = digest_blocks(pool, [4, 0, 4])
    assert digests == tuple(digest_bytes(pool.raw[block].numpy().tobytes()) for block in (4, 0, 4))
    assert split_digests(b"".join(digests)) == digests
    with pytest.raises(ValueError, match="multiple"):
        split_digests(bytes(DIGEST_BYTES + 1))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_digest() -> None:
    blocks = torch.randint(0, 256, (5, 100_003), dtype=torch.uint8)
    assert digest_tensor(blocks.cuda()) == digest_tensor(blocks)
