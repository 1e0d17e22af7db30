"""The digest of a block is the same on every machine and finds damage to a single byte. Every test runs twice: with the
compiled digests, and with the reference."""

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import digests
from kvtransfer.digests import DIGEST_BYTES, digest_blocks, digest_bytes, digest_tensor, split_digests
from tests.contract.rigs.kv_pools import random_pool

PIECE = 8192
# Found in two seconds by lattice reduction (LLL) of the first 48 rows of coefficients: added to the first bytes of a
# piece it changes none of the sixteen sums.
# fmt: off
FORGED_CHANGE = (
    -7, -11, 4, 10, 4, 0, -6, 2, -6, 0, -8, -15, -6, 0, 3, -6, 10, 2, 3, 1, 0,
    9, -1, -11, 8, -1, -7, 7, 2, 8, 1, 3, -5, -3, 3, -3, -11, 10, -4, 0, -4, 0, 1,
)
# fmt: on
LLAMA_BLOCK = bytes(range(256)) * 8192  # 2 MiB, as of an 8B Llama: folded once, to the sums of two pieces


@contextmanager
def digests_by(implementation: str) -> Iterator[None]:
    """Compute digests by the "compiled" library or the "reference". Skips the test where there is no such library."""
    with pytest.MonkeyPatch.context() as patch:
        if implementation == "reference":
            patch.setattr(digests, "compiled_digests", lambda: None)
        elif digests.compiled_digests() is None:
            pytest.skip("this machine has no compiler or no AVX2")
        yield


@pytest.fixture(params=["compiled", "reference"], autouse=True, scope="module")
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with digests_by(request.param):
        yield request.param


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (b"", "713c26c0fce3a01abaafb335ca83dbe4"),
        (b"tandem", "7e661fb0ada722e4e0a322a9c4a7e46e"),
        (bytes(4), "6f60ba4a13528f44af6ed414cba5f924"),
        (bytes(range(256)) * 512, "e5bcdefc68933b1198093e967e4f46e2"),
        (LLAMA_BLOCK, "1d601d515031f6446832240273b7d9ee"),
        (LLAMA_BLOCK + b"\x80", "d1021fd6039226f0b04ade0a71f7c07f"),
    ],
    ids=len,
)
def test_digests_of_known_bytes_never_change(data: bytes, digest: str) -> None:
    """Workers of different versions compare these values."""
    assert digest_bytes(data).hex() == digest


def splitmix64(place: int) -> int:
    """Return the n-th output of the generator, counted from 1, in Python's own integers."""
    state = (0x7A6E64656D2D6B76 + place * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


@functools.cache
def coefficients(fold: int) -> np.ndarray:
    first = fold * PIECE * 16 + 1
    rows = [[signed(splitmix64(first + 16 * i + j) >> 56 | 1) for j in range(16)] for i in range(PIECE)]
    return np.array(rows)


def summed(data: bytes, fold: int) -> bytes:
    """Return 64 bytes of sums for each 8,192 bytes, computed in 64 bits, which is more than they need."""
    padded = np.frombuffer(data + bytes(-len(data) % PIECE), dtype=np.int8).astype(np.int64)
    return bytes((padded.reshape(-1, PIECE) @ coefficients(fold)).astype("<i4").tobytes())


def written_out(data: bytes) -> bytes:
    """Compute the definition step by step, without the optimisations."""
    sums, folds = summed(data, 0), 0
    while len(sums) > 128:
        folds += 1
        sums = summed(sums, folds)
    hashed = len(data).to_bytes(8, "little") + sums
    return hashlib.blake2b(hashed, digest_size=16, person=b"tandem kv folded").digest()


@given(st.binary(max_size=300))
def test_short_blocks_follow_the_definition(data: bytes) -> None:
    assert digest_bytes(data) == written_out(data)


def test_long_blocks_follow_the_definition_at_the_extremes_and_at_every_number_of_folds() -> None:
    dice = np.random.default_rng(5)
    sizes = (8191, 8192, 8193, 2 * PIECE, 2 * PIECE + 1, 200_003, 2 << 20, (2 << 20) + 1)
    for block in (bytes([0x80]) * 65_536, bytes([0x7F]) * 65_537, *map(dice.bytes, sizes)):
        assert digest_bytes(block) == written_out(block)


@pytest.mark.parametrize("num_bytes", [1, 64, 512, PIECE])
def test_a_processor_without_exact_int8_products_gives_the_same_digests(num_bytes: int) -> None:
    pieces = torch.randint(-128, 128, (40, num_bytes), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    factors = digests.coefficients(0)[:num_bytes]
    assert torch.equal(digests.wide_product(pieces, factors), digests.exact_product()(pieces, factors))


def test_the_wide_product_folds_to_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    block = np.random.default_rng(6).bytes(100_003)
    monkeypatch.setattr(digests, "exact_product", lambda: digests.wide_product)
    monkeypatch.setattr(digests, "compiled_digests", lambda: None)
    assert digest_bytes(block) == written_out(block)


@given(st.integers(0, 20_000), st.integers(1, 255))
def test_any_changed_byte_moves_every_sum_of_its_piece(place: int, change: int) -> None:
    before = np.random.default_rng(1).integers(0, 256, 20_001, dtype=np.uint8)
    after = before.copy()
    after[place] ^= change
    sums = [digests.host_sums(torch.from_numpy(row)[None], 0)[0] for row in (before, after)]
    moved = sums[0] != sums[1]
    assert moved[place // PIECE].all() and moved.any(dim=1).sum() == 1
    lowest = [one.view(torch.uint8)[:, ::4] for one in sums]  # of each sum: so a fold sees 16 other bytes at least
    assert (lowest[0] != lowest[1])[place // PIECE].all()
    assert digest_bytes(before.tobytes()) != digest_bytes(after.tobytes())


def test_swapped_words_swapped_pieces_and_changed_lengths_are_detected() -> None:
    block = np.random.default_rng(3).bytes(16_384)
    others = (block + bytes(4), block + bytes(1), block[4:8] + block[:4] + block[8:], block[8192:] + block[:8192])
    assert len({digest_bytes(one) for one in (block, *others)}) == 5


def test_pieces_that_swap_places_are_detected_at_any_distance() -> None:
    """130 pieces are folded in two: places 0 and 128 have the same coefficients in the fold, and another piece."""
    pieces = np.random.default_rng(4).integers(0, 256, (130, PIECE), dtype=np.uint8)
    found = {digest_bytes(pieces.tobytes())}
    for place in (1, 64, 127, 128, 129):
        swapped = pieces.copy()
        swapped[[0, place]] = swapped[[place, 0]]
        found.add(digest_bytes(swapped.tobytes()))
    assert len(found) == 6


def test_a_chosen_change_of_37_bytes_leaves_the_digest_unchanged() -> None:
    """The limit that docs/security.md states: a digest finds accidental damage and no forgery."""
    original = bytearray(LLAMA_BLOCK)
    original[PIECE : PIECE + len(FORGED_CHANGE)] = bytes([64]) * len(FORGED_CHANGE)
    forged = bytearray(original)
    for place, change in enumerate(FORGED_CHANGE):
        forged[PIECE + place] += change
    assert sum(one != other for one, other in zip(original, forged, strict=True)) == 37
    assert digest_bytes(bytes(forged)) == digest_bytes(bytes(original))


def test_a_pools_blocks_are_digested_in_the_given_order() -> None:
    pool = random_pool(6, seed=1)
    for block_ids in ([4, 0, 4], [1, 2, 3], [5]):
        expected = tuple(digest_bytes(pool.raw[block].numpy().tobytes()) for block in block_ids)
        assert digest_blocks(pool, block_ids) == expected
    found = digest_blocks(pool, [4, 0, 4])
    assert split_digests(b"".join(found)) == found
    with pytest.raises(ValueError, match="multiple"):
        split_digests(bytes(DIGEST_BYTES + 1))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_digest() -> None:
    blocks = torch.randint(0, 256, (5, 100_003), dtype=torch.uint8)
    assert digest_tensor(blocks.cuda()) == digest_tensor(blocks)
