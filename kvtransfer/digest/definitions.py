"""The digest of a block: 16 bytes of its bytes as sent, the same on CPU and GPU. Owns the definitions; keeps nothing.

The bytes are cut into pieces of 8,192, the last padded with zeros, and read as signed numbers b[i]. Each piece has 16
sums over i of `c[i][j] * b[i]`, exact 32-bit integers: c is a fixed matrix of odd numbers from -127 to 127, by
splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). So the work on every byte is an
int8 matrix product, which processors and GPUs have units for. The digest is the BLAKE2b of the block's length and sums:

- `SUMS`, the first definition, hashes the sums of all pieces in order: 64 bytes per 8 KB, on the host;
- `FOLDED` takes the sums, as little-endian bytes, for bytes like any others and sums them again, each time with a
  matrix of its own, until those of at most two pieces are left, 128 bytes. So 2 MiB, as of an 8B Llama, are folded
  once; down to one piece a GPU would be asked once more, to save its host 0.1 us a block.

What is certain of the first sums: one changed byte moves all 16 of its piece, for no coefficient is 0. Changes of two
or more bytes of a piece cancel in all 16 with a chance of at most 2^-112 over the coefficients: whatever the others
are, at most one of the 128 values that a changed byte's own one can have makes a sum what it was. Pieces that swap
places change the order of the sums.

What a fold costs: unless the sums before it agree, it sees bytes that differ. (Of one changed byte at least 16, the
lowest of each sum, for an odd number times less than 256 is no multiple of 256; of two pieces that swap places those in
which their sums differ, at both places.) What differs was settled before the fold's own coefficients were drawn, so
the chance that it cancels is at most 2^-112 once more. Had the fold the same matrix, what differs would depend on it,
and the argument would not hold; another one costs 128 KiB. So n folds miss with at most (n + 1) * 2^-112 what `SUMS`
misses with 2^-112, and one changed byte with n * 2^-112 instead of never. BLAKE2b's 16 bytes miss with 2^-128.

All these chances hold for changes that do not depend on the coefficients: damage and mix-ups. The coefficients are
public and the sums are linear, so whoever chooses the bytes finds a change of a few dozen bytes that leaves all sums,
and with them both digests, as they were (docs/security.md). A digest is no message authentication code.
"""

import hashlib
import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from kvtransfer.digest.piece_sums import NUM_SUMS, coefficients, host_sums, num_pieces
from kvtransfer.memory import PoolMemory
from kvtransfer.side_stream import side_stream

DIGEST_BYTES = 16

_BATCH_BYTES = 4 << 20  # gathered blocks are still in a cache when they are read


@dataclass(frozen=True, slots=True)
class DigestDefinition:
    name: str  # as the two sides of a hand-off say it
    person: bytes  # of BLAKE2b: no two definitions agree by chance
    most_pieces: int | None  # whose sums are hashed; more are folded. None: all are hashed


FOLDED = DigestDefinition("folded-sums", b"tandem kv folded", 2)
SUMS = DigestDefinition("piece-sums", b"tandem kv block", None)
DEFINITIONS = (FOLDED, SUMS)  # best first; the last is what everybody knows


def digest_blocks(
    memory: PoolMemory, block_ids: Sequence[int], definition: DigestDefinition = FOLDED
) -> tuple[bytes, ...]:
    """One digest per block, in order. Blocks the caller: about 0.13 seconds per GB on one core with int8 units."""
    if memory.raw.is_cuda:
        return _digest_on_device(memory.raw, block_ids, definition)
    batch = max(1, _BATCH_BYTES // memory.block_bytes)
    sums = torch.empty(len(block_ids), num_pieces(memory.block_bytes), NUM_SUMS, dtype=torch.int32)
    for start in range(0, len(block_ids), batch):
        ids = block_ids[start : start + batch]
        sums[start : start + batch] = host_sums(_blocks(memory.raw, ids), 0)
    return _hashed(folded(sums, definition, host_sums), memory.block_bytes, definition)


def split_digests(packed: bytes) -> tuple[bytes, ...]:
    """Packed digests one by one. Raises ValueError for bytes that are no whole number of them."""
    if len(packed) % DIGEST_BYTES:
        raise ValueError(f"packed digests must be a multiple of {DIGEST_BYTES} bytes, not {len(packed)}")
    return tuple(packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES))


def digest_bytes(data: bytes, definition: DigestDefinition = FOLDED) -> bytes:
    """The digest of one block's bytes."""
    block = torch.frombuffer(bytearray(data), dtype=torch.uint8)[None] if data else torch.empty(1, 0, dtype=torch.uint8)
    return digest_tensor(block, definition)[0]


def digest_tensor(blocks: torch.Tensor, definition: DigestDefinition = FOLDED) -> tuple[bytes, ...]:
    """The digests of the rows of `blocks` (torch.uint8, [n, block_bytes]), computed on the device where they are."""
    num_blocks, num_bytes = blocks.shape
    if blocks.is_cuda:
        return _digest_on_device(blocks, range(num_blocks), definition)
    return _hashed(folded(host_sums(blocks, 0), definition, host_sums), num_bytes, definition)


def folded(
    sums: torch.Tensor, definition: DigestDefinition, sums_of: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """What is hashed of a block's `sums` (torch.int32, [blocks, pieces, 16]); `sums_of` sums rows of bytes in the n-th
    fold, where they are."""
    for fold in itertools.count(1):
        if definition.most_pieces is None or sums.shape[1] <= definition.most_pieces:
            break
        sums = sums_of(sums.flatten(1).view(torch.uint8), fold)
    return sums


def _blocks(raw: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    if ids[-1] - ids[0] == len(ids) - 1 and all(after > one for one, after in itertools.pairwise(ids)):
        return raw[ids[0] : ids[-1] + 1]  # neighbours: where they are
    return raw.index_select(0, torch.from_numpy(np.array(ids, dtype=np.int64)))


def _digest_on_device(
    blocks: torch.Tensor, block_ids: Sequence[int], definition: DigestDefinition
) -> tuple[bytes, ...]:
    """Everything is enqueued, and one copy of what is to be hashed waited for."""
    from kvtransfer.digest.triton_sums import piece_sums

    if not block_ids:
        return ()
    device = blocks.device

    def fold_on_device(rows: torch.Tensor, fold: int) -> torch.Tensor:
        return piece_sums(rows, torch.arange(len(rows), device=device), _device_coefficients(device, fold))

    with side_stream("digest", device) as stream:
        ids = torch.from_numpy(np.array(block_ids, dtype=np.int64)).pin_memory().to(device, non_blocking=True)
        sums = folded(piece_sums(blocks, ids, _device_coefficients(device, 0)), definition, fold_on_device)
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
        stream.record_event().synchronize()
    return _hashed(on_host, blocks.shape[1], definition)


@lru_cache(maxsize=16)
def _device_coefficients(device: torch.device, fold: int) -> torch.Tensor:
    """torch.int8, [sums, piece]: what a matrix unit reads in one go lies together."""
    return coefficients(fold).t().contiguous().to(device)


def _hashed(sums: torch.Tensor, num_bytes: int, definition: DigestDefinition) -> tuple[bytes, ...]:
    """One hash per row of `sums` (torch.int32, [blocks, pieces, 16])."""
    begun = hashlib.blake2b(struct.pack("<Q", num_bytes), digest_size=DIGEST_BYTES, person=definition.person)
    digests = []
    for row in sums.numpy().astype("<i4", copy=False):
        one = begun.copy()  # half the price of beginning anew
        one.update(row)
        digests.append(one.digest())
    return tuple(digests)
