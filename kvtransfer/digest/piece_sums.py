"""Sums of pieces of bytes, on the host: the int8 product behind digests, and its coefficients. Owns the coefficients.

What they are for and why they look so: kvtransfer/digest/definitions.py. On a GPU: kvtransfer/digest/triton_sums.py.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

PIECE_BYTES = 8_192  # of a row: sums stay below 2^31 by far, and a 16 KiB matrix stays in the first-level cache
NUM_SUMS = 16

_SEED = 0x7A6E64656D2D6B76
_GAMMA = np.uint64(0x9E3779B97F4A7C15)

_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def host_sums(rows: torch.Tensor, fold: int) -> torch.Tensor:
    """torch.int32, [n, pieces, sums] of `rows` (torch.uint8, [n, row_bytes]) with the coefficients of that fold."""
    pieces = pieces_of(rows)
    sums = exact_product()(pieces, coefficients(fold)[: pieces.shape[1]])
    return sums.reshape(len(rows), num_pieces(rows.shape[1]), NUM_SUMS)


def num_pieces(row_bytes: int) -> int:
    return -(-row_bytes // PIECE_BYTES)


def pieces_of(rows: torch.Tensor) -> torch.Tensor:
    """torch.int8, [n * pieces, piece or shorter row]; the rows' own memory where they divide evenly."""
    row_bytes = rows.shape[1]
    padding = -row_bytes % PIECE_BYTES if row_bytes > PIECE_BYTES else 0  # zeros change no sum
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    num_rows = len(rows) * num_pieces(row_bytes)
    return rows.contiguous().view(torch.int8).reshape(num_rows, min(row_bytes, PIECE_BYTES))


@lru_cache(maxsize=1)
def exact_product() -> _Product:
    """The int8 product, if this processor computes it exactly: some without int8 units saturate inside."""
    extremes = torch.full((32, PIECE_BYTES), -128, dtype=torch.int8)
    factors = torch.full((PIECE_BYTES, NUM_SUMS), -127, dtype=torch.int8)
    factors[::2] = 127
    for matrix in (factors, factors.abs()):
        if not torch.equal(torch._int_mm(extremes, matrix), wide_product(extremes, matrix)):
            return wide_product
    return torch._int_mm


def wide_product(pieces: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """In float64, where every sum is exact."""
    return (pieces.to(torch.float64) @ factors.to(torch.float64)).to(torch.int32)


@lru_cache(maxsize=8)
def coefficients(fold: int) -> torch.Tensor:
    """torch.int8, [piece, sums]: the top bytes of splitmix64's outputs, made odd; each fold takes the next 131,072 of
    them, the block's own sums (fold 0) the first. Array arithmetic wraps mod 2^64."""
    count = PIECE_BYTES * NUM_SUMS
    place = np.arange(fold * count + 1, (fold + 1) * count + 1, dtype=np.uint64)
    state = np.uint64(_SEED) + place * _GAMMA
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    odd = (mixed >> np.uint64(56)).astype(np.uint8) | np.uint8(1)
    return torch.from_numpy(odd.view(np.int8).reshape(PIECE_BYTES, NUM_SUMS))
