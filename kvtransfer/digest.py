"""The digest of a block: 16 bytes of its bytes as sent, the same on CPU and GPU. Owns the definition; keeps nothing.

The block is read as little-endian signed 32-bit words w[i], padded with zeros. The digest is two sums, each
`num_bytes * a + sum(c[i] * w[i]) mod 2^64`, packed little-endian. `a` and `c[i]` are fixed odd 64-bit numbers from
splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), with one seed per sum.

A changed word changes its product by an odd number times less than 2^32, which is never 0 mod 2^64: damage to a single
word is always caught. Words are 32 bits wide so that their top bits keep 33 bits of the coefficient: changes of two
words cancel in both sums with a chance of 2^-66 over the coefficients at worst. It guards against mix-ups and damage,
not against somebody who chooses the bytes: who may write to a pool is not its subject.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.memory import PoolMemory

DIGEST_BYTES = 16

_SEEDS = (0x7A6E64656D2D6B76, 0x9B1F0C5D3E8A4672)
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD_BYTES = 4
_CHUNK_WORDS = 16_384  # the widened words and their coefficients stay in the second-level cache
_CUDA_BATCH_BYTES = 64 << 20


def digest_blocks(memory: PoolMemory, block_ids: Sequence[int]) -> tuple[bytes, ...]:
    """One digest per block, in order. Blocks the caller for about a second per GB on a CPU."""
    if memory.raw.is_cuda:
        return _digest_on_device(memory.raw, block_ids)
    rows = memory.raw.numpy()
    return tuple(digest_bytes(rows[block_id]) for block_id in block_ids)


def split_digests(packed: bytes) -> tuple[bytes, ...]:
    """Packed digests one by one. Raises ValueError for bytes that are no whole number of them."""
    if len(packed) % DIGEST_BYTES:
        raise ValueError(f"packed digests must be a multiple of {DIGEST_BYTES} bytes, not {len(packed)}")
    return tuple(packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES))


def digest_bytes(data: npt.NDArray[np.uint8] | bytes) -> bytes:
    """The digest of one block's bytes."""
    block = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
    words = _words(block)
    chunks = _chunked_coefficients(len(words))
    widened = np.empty(min(_CHUNK_WORDS, len(words)), dtype=np.int64)
    sums = [len(block) * factor for factor in _length_factors()]
    for index, (first, second) in enumerate(chunks):
        chunk = words[index * _CHUNK_WORDS : (index + 1) * _CHUNK_WORDS]
        wide = widened[: len(chunk)]
        np.copyto(wide, chunk)
        sums[0] += int(np.dot(wide, first))
        sums[1] += int(np.dot(wide, second))
    return _pack(sums[0], sums[1])


def digest_tensor(blocks: torch.Tensor) -> tuple[bytes, ...]:
    """The same digests by torch, on whatever device `blocks` (torch.uint8, [n, block_bytes]) is."""
    num_bytes = blocks.shape[1]
    padding = -num_bytes % _WORD_BYTES
    if padding:
        blocks = torch.nn.functional.pad(blocks, (0, padding))
    words = blocks.contiguous().view(torch.int32).to(torch.int64)  # [n, words]
    coefficients = torch.from_numpy(_coefficients(words.shape[1])).to(blocks.device)  # [2, words]
    sums = torch.stack([(words * row).sum(dim=1) for row in coefficients], dim=1).tolist()  # wraps mod 2^64
    factors = _length_factors()
    return tuple(_pack(one + num_bytes * factors[0], two + num_bytes * factors[1]) for one, two in sums)


def _digest_on_device(raw: torch.Tensor, block_ids: Sequence[int]) -> tuple[bytes, ...]:
    batch = max(1, _CUDA_BATCH_BYTES // (4 * raw.shape[1]))
    digests: list[bytes] = []
    # A stream of our own: the engine's steps must not wait for digests, nor digests for steps not yet computed.
    with torch.cuda.stream(torch.cuda.Stream(raw.device)):  # type: ignore[no-untyped-call]
        for start in range(0, len(block_ids), batch):
            indices = torch.tensor(block_ids[start : start + batch], device=raw.device)
            digests += digest_tensor(raw.index_select(0, indices))
    return tuple(digests)


def _words(block: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    padding = -len(block) % _WORD_BYTES
    if padding:
        block = np.concatenate([block, np.zeros(padding, dtype=np.uint8)])
    return block.view(np.dtype("<i4"))


def _pack(first: int, second: int) -> bytes:
    return struct.pack("<QQ", first % (1 << 64), second % (1 << 64))


@lru_cache(maxsize=1)
def _length_factors() -> tuple[int, int]:
    first, second = (_odd_numbers(seed, 1)[0] for seed in _SEEDS)
    return int(first), int(second)


@lru_cache(maxsize=8)
def _coefficients(num_words: int) -> npt.NDArray[np.int64]:
    """[2, num_words]; the generators' first numbers belong to the length."""
    return np.stack([_odd_numbers(seed, num_words + 1)[1:] for seed in _SEEDS]).view(np.int64)


@lru_cache(maxsize=8)
def _chunked_coefficients(num_words: int) -> tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], ...]:
    first, second = _coefficients(num_words)
    starts = range(0, num_words, _CHUNK_WORDS)
    return tuple((first[start : start + _CHUNK_WORDS], second[start : start + _CHUNK_WORDS]) for start in starts)


def _odd_numbers(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """The first `count` outputs of splitmix64, made odd. Array arithmetic wraps mod 2^64 by definition."""
    state = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
