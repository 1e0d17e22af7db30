"""A wire format of fewer bits: quantises blocks into the wire copy, and restores blocks from it.

A slot of the wire copy holds the codes in the order of the block's elements (of 4-bit codes, element i in the low half
of byte i and element i + block_elems / 2 in the high one), then the groups' parameters, then one byte that counts the
unused positions at the block's end: those are zero, and come back so.

A slot is written only with its final bytes, in one pass: encoding a block again, for a second ticket, does not disturb
who is reading it for the first.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvtransfer.memory import PoolMemory
from kvtransfer.side_stream import side_stream
from kvtransfer.transports.host.host_memory import runs
from kvtransfer.wire.codecs import Codec
from kvtransfer.wire.kv_groups import BlockTable, KvGroups
from kvtransfer.wire.wire_copy import WireCopy

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HOST_PIECE_BYTES = 1 << 21  # of the pool: what is computed from it stays in a cache
_CUDA_PIECE_BYTES = 64 << 20
_MOST_UNUSED = 255


class QuantisedBlocks:
    """Blocks and slots as values: what the bytes of a slot mean. Owns no memory."""

    def __init__(self, table: BlockTable, codec: Codec) -> None:
        """Raises ConfigError for blocks that cannot be divided into groups."""
        self._codec = codec
        self._groups = KvGroups(table)
        self._dtype = _DTYPES[table.dtype]
        self._code_bytes = table.block_elems * codec.code_bits // 8
        self.slot_bytes = self._code_bytes + self._groups.num_groups * codec.param_bytes + 1

    def quantise(self, blocks: torch.Tensor) -> torch.Tensor:
        """uint8 [n, block_bytes] -> uint8 [n, slot_bytes]"""
        elements = blocks.view(self._dtype)
        slots = torch.empty(len(blocks), self.slot_bytes, dtype=torch.uint8, device=blocks.device)
        is_packed = self._codec.code_bits == 4
        codes = torch.empty_like(elements, dtype=torch.uint8) if is_packed else slots[:, : self._code_bytes]
        unused = self._unused_positions(elements)
        slots[:, -1] = unused
        if bool(unused.any()):
            elements = self._padded(elements, unused)
        start = self._code_bytes
        for source, target in zip(self._groups.of(elements), self._groups.of(codes), strict=True):
            fresh = torch.empty(source.elements.shape, dtype=torch.float32, device=blocks.device)
            rounded, params = self._codec.quantise(fresh.copy_(source.elements), source.axis)
            target.elements.view(self._codec.code_dtype).copy_(rounded)
            for param in params:
                of_block = param.flatten(1)
                slots[:, start : start + of_block.shape[1]] = of_block
                start += of_block.shape[1]
        if is_packed:
            slots[:, : self._code_bytes] = _packed(codes)
        return slots

    def restore(self, slots: torch.Tensor) -> torch.Tensor:
        """uint8 [n, slot_bytes] -> uint8 [n, block_bytes]. Elements beyond the dtype's largest become that."""
        codes = slots[:, : self._code_bytes]
        codes = codes if self._codec.code_bits == 8 else _unpacked(codes)
        elements = torch.empty(len(slots), self._groups.block_elems, dtype=self._dtype, device=slots.device)
        largest = torch.finfo(self._dtype).max
        start = self._code_bytes
        for source, target in zip(self._groups.of(codes), self._groups.of(elements), strict=True):
            shape = source.param_shape
            width = torch.Size(shape[1:]).numel()
            params = []
            for _ in range(self._codec.param_bytes):
                params.append(slots[:, start : start + width].reshape(shape))
                start += width
            target.elements.copy_(self._codec.restore(source.elements, params).clamp_(-largest, largest))
        self._clear(elements, slots[:, -1])
        return elements.view(torch.uint8)

    def _unused_positions(self, elements: torch.Tensor) -> torch.Tensor:
        """How many positions at the end of each block are zero in every layer.  # uint8 [n]"""
        last = torch.stack([part[:, :, -1].ne(0).flatten(1).any(1) for part in self._groups.by_position(elements)])
        if bool(last.any(0).all()):
            return torch.zeros(len(elements), dtype=torch.uint8, device=elements.device)
        written = torch.stack([part.ne(0).any(3).any(1) for part in self._groups.by_position(elements)]).any(0)
        positions = torch.arange(1, self._groups.block_size + 1, device=elements.device)
        used = (written * positions).amax(1)  # [n, block_size] -> [n]
        return (self._groups.block_size - used).clamp_(max=_MOST_UNUSED).to(torch.uint8)

    def _padded(self, elements: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        """Unused positions repeat the first, so that a channel's range is that of its used ones."""
        padded = elements.clone()
        for part in self._groups.by_position(padded):
            part.copy_(torch.where(self._is_unused(unused), part[:, :, :1], part))
        return padded

    def _clear(self, elements: torch.Tensor, unused: torch.Tensor) -> None:
        if bool(unused.any()):
            for part in self._groups.by_position(elements):
                part.masked_fill_(self._is_unused(unused), 0)

    def _is_unused(self, unused: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, 1, block_size, 1]"""
        positions = torch.arange(self._groups.block_size, device=unused.device)
        return (positions >= self._groups.block_size - unused[:, None].int())[:, None, :, None]


class QuantisedFormat:
    """See WireFormat. One thread may encode while another decodes, never the same block."""

    short_bytes = 0  # a block takes half a millisecond, and no two threads may do the same

    def __init__(self, pool: PoolMemory, table: BlockTable, codec: Codec) -> None:
        self._pool = pool
        self._blocks = QuantisedBlocks(table, codec)
        self.memory = WireCopy(num_blocks=pool.num_blocks, block_bytes=self._blocks.slot_bytes, device=pool.raw.device)

    def encode(self, block_ids: Sequence[int]) -> None:
        with _apart("encode", self._pool.raw.device):
            for ids in self._pieces(block_ids):
                _write(self.memory.raw, ids, self._blocks.quantise(_read(self._pool.raw, ids)))

    def decode(self, block_ids: Sequence[int]) -> None:
        with _apart("decode", self._pool.raw.device):
            for ids in self._pieces(block_ids):
                _write(self._pool.raw, ids, self._blocks.restore(_read(self.memory.raw, ids)))

    def _pieces(self, block_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        piece_bytes = _CUDA_PIECE_BYTES if self._pool.raw.is_cuda else _HOST_PIECE_BYTES
        num_blocks = max(1, piece_bytes // self._pool.block_bytes)
        for start in range(0, len(block_ids), num_blocks):
            yield block_ids[start : start + num_blocks]


@contextmanager
def _apart(work: str, device: torch.device) -> Iterator[None]:
    """From the engine's steps; complete at the end."""
    if device.type != "cuda":
        yield
        return
    with side_stream(work, device) as stream:
        yield
        stream.synchronize()


def _read(rows: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    if _are_neighbours(ids):
        return rows[ids[0] : ids[-1] + 1]
    return rows.index_select(0, torch.tensor(ids, device=rows.device))


def _write(rows: torch.Tensor, ids: Sequence[int], values: torch.Tensor) -> None:
    if rows.is_cuda:
        rows.index_copy_(0, torch.tensor(ids, device=rows.device), values)
        return
    for first, row, length in runs(range(len(ids)), ids):  # several times as fast on a CPU as index_copy_
        rows[row : row + length] = values[first : first + length]


def _are_neighbours(ids: Sequence[int]) -> bool:
    return list(ids) == list(range(ids[0], ids[0] + len(ids)))


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes, two per byte: halves of the block, not neighbours, which would have to be picked apart."""
    low, high = codes.chunk(2, dim=1)
    return high.bitwise_left_shift(4).bitwise_or_(low)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat([packed.bitwise_and(15), packed.bitwise_right_shift(4)], dim=1)
