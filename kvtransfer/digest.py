"""The digest of a block: 16 bytes of its bytes as sent, the same on CPU and GPU. Owns the definition; keeps nothing.

The block is cut into pieces of 8,192 bytes, the last padded with zeros, and read as signed bytes b[i]. Each piece has
16 sums over i of `c[i][j] * b[i]`, exact 32-bit integers: c is one fixed matrix of odd numbers from -127 to 127, by
splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). The digest is the BLAKE2b of
the block's length and all sums in order. So the work on every byte is an int8 matrix product, which processors and GPUs
have units for, and BLAKE2b sees 64 bytes per piece.

One changed byte moves every sum of its piece, for no coefficient is 0. Changes of two or more bytes of a piece cancel
in all 16 sums with a chance of at most 2^-112 over the coefficients; pieces that swap places change the order of what
is hashed. It guards against mix-ups and damage, not against somebody who chooses the bytes: who may write to a pool is
not its subject.
"""

import hashlib
import itertools
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from kvtransfer.memory import PoolMemory
from kvtransfer.side_stream import side_stream

DIGEST_BYTES = 16

_PIECE_BYTES = 8_192  # of a row: sums stay below 2^31 by far, and a 16 KiB matrix stays in the first-level cache
_NUM_SUMS = 16
_SEED = 0x7A6E64656D2D6B76
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BATCH_BYTES = 4 << 20  # gathered blocks are still in a cache when they are read

_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def digest_blocks(memory: PoolMemory, block_ids: Sequence[int]) -> tuple[bytes, ...]:
    """One digest per block, in order. Blocks the caller: about 0.13 seconds per GB on one core with int8 units."""
    if memory.raw.is_cuda:
        return _digest_on_device(memory.raw, block_ids)
    batch = max(1, _BATCH_BYTES // memory.block_bytes)
    digests: list[bytes] = []
    for start in range(0, len(block_ids), batch):
        ids = block_ids[start : start + batch]
        if ids[-1] - ids[0] == len(ids) - 1 and all(after > one for one, after in itertools.pairwise(ids)):
            blocks = memory.raw[ids[0] : ids[-1] + 1]  # neighbours: where they are
        else:
            blocks = memory.raw.index_select(0, torch.tensor(ids))
        digests += digest_tensor(blocks)
    return tuple(digests)


def split_digests(packed: bytes) -> tuple[bytes, ...]:
    """Packed digests one by one. Raises ValueError for bytes that are no whole number of them."""
    if len(packed) % DIGEST_BYTES:
        raise ValueError(f"packed digests must be a multiple of {DIGEST_BYTES} bytes, not {len(packed)}")
    return tuple(packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES))


def digest_bytes(data: bytes) -> bytes:
    """The digest of one block's bytes."""
    return digest_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8)[None] if data else torch.empty(1, 0))[0]


def digest_tensor(blocks: torch.Tensor) -> tuple[bytes, ...]:
    """The digests of the rows of `blocks` (torch.uint8, [n, block_bytes]), computed on the device where they are."""
    num_blocks, num_bytes = blocks.shape
    if blocks.is_cuda:
        return _digest_on_device(blocks, range(num_blocks))
    sums = _host_product()(_pieces(blocks), _coefficients())
    return _hash_sums(sums.reshape(num_blocks, -1), num_bytes)


def _digest_on_device(blocks: torch.Tensor, block_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Only the sums, 64 bytes per piece, come to the host."""
    from kvtransfer.digest_triton import piece_sums

    with side_stream("digest", blocks.device):
        ids = torch.from_numpy(np.array(block_ids, dtype=np.int64)).to(blocks.device)
        sums = piece_sums(blocks, ids, _device_coefficients(blocks.device)).cpu()
    return _hash_sums(sums.flatten(1), blocks.shape[1])


def _hash_sums(sums: torch.Tensor, num_bytes: int) -> tuple[bytes, ...]:
    """`sums` is torch.int32, [blocks, all sums of a block]."""
    length = struct.pack("<Q", num_bytes)
    return tuple(
        hashlib.blake2b(length + row.tobytes(), digest_size=DIGEST_BYTES, person=b"tandem kv block").digest()
        for row in sums.numpy().astype("<i4", copy=False)
    )


def _pieces(blocks: torch.Tensor) -> torch.Tensor:
    """torch.int8, [n * pieces, piece]; the blocks' own memory where they divide evenly."""
    padding = -blocks.shape[1] % _PIECE_BYTES
    if padding:
        blocks = torch.nn.functional.pad(blocks, (0, padding))
    return blocks.contiguous().view(torch.int8).reshape(-1, _PIECE_BYTES)


@lru_cache(maxsize=1)
def _host_product() -> _Product:
    """The int8 product, if this processor computes it exactly: some without int8 units saturate inside."""
    extremes = torch.full((32, _PIECE_BYTES), -128, dtype=torch.int8)
    coefficients = torch.full((_PIECE_BYTES, _NUM_SUMS), -127, dtype=torch.int8)
    coefficients[::2] = 127
    for factors in (coefficients, coefficients.abs()):
        if not torch.equal(torch._int_mm(extremes, factors), _wide_product(extremes, factors)):
            return _wide_product
    return torch._int_mm


def _wide_product(pieces: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """In float64, where every sum is exact."""
    return (pieces.to(torch.float64) @ coefficients.to(torch.float64)).to(torch.int32)


@lru_cache(maxsize=8)
def _device_coefficients(device: torch.device) -> torch.Tensor:
    """torch.int8, [sums, piece]: what a matrix unit reads in one go lies together."""
    return _coefficients().t().contiguous().to(device)


@lru_cache(maxsize=1)
def _coefficients() -> torch.Tensor:
    """torch.int8, [piece, sums]: the top bytes of splitmix64's outputs, made odd. Array arithmetic wraps mod 2^64."""
    count = _PIECE_BYTES * _NUM_SUMS
    state = np.uint64(_SEED) + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    odd = (mixed >> np.uint64(56)).astype(np.uint8) | np.uint8(1)
    return torch.from_numpy(odd.view(np.int8).reshape(_PIECE_BYTES, _NUM_SUMS))
