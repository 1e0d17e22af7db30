"""A wire format with fewer bits per element: quantises blocks into a wire copy and restores blocks from it.

`WireCopy` owns the memory: a slot per block of the pool. `KvGroups` decides which elements share a scale. Keys are
grouped by channel over `KEY_GROUP` tokens, values by token over 64 neighbouring elements: some channels of K are far
larger than the rest, for every token, while V has no such channels (Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit
Quantization for KV Cache", 2024). Where the block size is not a multiple of `KEY_GROUP`, keys are grouped as values
are.

A slot holds the codes in the order of the block's elements (for 4-bit codes, element i in the low half of byte i and
element i + block_elems / 2 in the high half), then the parameters of the groups, then one byte that counts the unused
positions at the end of the block. Those positions are zero and are restored as zero.

A slot is written only with its final bytes, in one pass. So encoding a block again, for a second ticket, does not
disturb an importer that reads it for the first.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.errors import ConfigError
from cluster.shared_memory import allocate_sealed
from kvtransfer.memory import PoolMemory, runs, side_stream
from kvtransfer.wire.codecs import Codec

KEY_GROUP = 16  # tokens of one channel
VALUE_GROUPS = (64, 32)  # elements of one token; the first that divides every layer's part of a block
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HOST_PIECE_BYTES = 1 << 21  # bytes of the pool per turn, so that its results stay in a cache
_CUDA_PIECE_BYTES = 64 << 20
_MOST_UNUSED = 255


class WireCopy:
    """Memory with one slot per block; it implements PoolMemory. It starts as zeros."""

    def __init__(self, *, num_blocks: int, block_bytes: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.memfd: int | None = None
        if device.type == "cpu":
            self.memfd, mapping = allocate_sealed("tandem-kv-wire", num_blocks * block_bytes)
            flat = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
            self._close_file = weakref.finalize(self, os.close, self.memfd)  # runs once, in `close` or when collected
        else:
            flat = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
        self.raw = flat.view(num_blocks, block_bytes)

    def close(self) -> None:
        """End this process's use of the memory."""
        self.raw = torch.empty(0, 0, dtype=torch.uint8)
        if self.memfd is not None:
            self._close_file()
            self.memfd = None


class LayerShape(Protocol):
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...


class LayerPlace(Protocol):
    @property
    def shape(self) -> LayerShape: ...
    @property
    def key_offset(self) -> int: ...
    @property
    def value_offset(self) -> int: ...


class BlockTable(Protocol):
    """The offsets in elements, inside a block, of the K and V of each layer, `[block_size, num_kv_heads, dim]`."""

    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layers(self) -> Sequence[LayerPlace]: ...
    @property
    def block_elems(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Groups:
    """The elements of some blocks that are grouped in one way. It is a view: writing to it writes to the blocks."""

    elements: torch.Tensor  # [n, layers, lines, KEY_GROUP, channels] or [n, layers, groups, 64 or 32]
    axis: int  # along which a group lies

    @property
    def param_shape(self) -> list[int]:
        """Return the shape of one parameter of every group."""
        shape = list(self.elements.shape)
        shape[self.axis] = 1
        return shape


@dataclass(frozen=True, slots=True)
class _Run:
    """Equally wide parts of a block at equal distances. A uniform model has one run of keys and one of values."""

    offset: int
    stride: int
    count: int
    channels: int


class KvGroups:
    """The groups of the blocks of one table."""

    def __init__(self, table: BlockTable) -> None:
        """Divide the blocks of this table into groups. Raises ConfigError for blocks that cannot be divided."""
        keys = [(place.key_offset, place.shape.num_kv_heads * place.shape.key_dim) for place in table.layers]
        values = [(place.value_offset, place.shape.num_kv_heads * place.shape.value_dim) for place in table.layers]
        by_channel = table.block_size % KEY_GROUP == 0
        parts = [table.block_size * channels for _, channels in (values if by_channel else keys + values)]
        fitting = [length for length in VALUE_GROUPS if not any(part % length for part in parts)]
        if not fitting:
            raise ConfigError(
                f"--kv-wire-dtype must be native: a layer's {min(parts)} elements of {table.block_size} tokens cannot "
                f"be divided into groups of {VALUE_GROUPS[-1]}; with a --block-size of {VALUE_GROUPS[-1]} they can"
            )
        self._value_group = fitting[0]
        self.block_size = table.block_size
        self.block_elems = table.block_elems
        self._by_channel = tuple(_runs(keys)) if by_channel else ()
        self._by_token = tuple(_runs(values if by_channel else keys + values))

    def of(self, blocks: torch.Tensor) -> Iterator[Groups]:
        """Yield every element of `blocks` (`[n, block_elems]`, rows contiguous, any dtype) once, always in the same
        order."""
        row, start = blocks.stride(0), blocks.storage_offset()
        for run in self._by_channel:
            lines = self.block_size // KEY_GROUP
            key_shape = (len(blocks), run.count, lines, KEY_GROUP, run.channels)
            key_strides = (row, run.stride, KEY_GROUP * run.channels, run.channels, 1)
            yield Groups(blocks.as_strided(key_shape, key_strides, start + run.offset), -2)
        for run in self._by_token:
            shape = (len(blocks), run.count, self.block_size * run.channels // self._value_group, self._value_group)
            strides = (row, run.stride, self._value_group, 1)
            yield Groups(blocks.as_strided(shape, strides, start + run.offset), -1)

    def by_position(self, blocks: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the same elements as `[n, layers, block_size, channels]`, in the same order."""
        row, start = blocks.stride(0), blocks.storage_offset()
        for run in (*self._by_channel, *self._by_token):
            shape = (len(blocks), run.count, self.block_size, run.channels)
            yield blocks.as_strided(shape, (row, run.stride, run.channels, 1), start + run.offset)

    @property
    def num_groups(self) -> int:
        """Return the number of groups of one block."""
        by_channel = sum(run.count * run.channels * self.block_size for run in self._by_channel) // KEY_GROUP
        by_token = sum(run.count * run.channels * self.block_size for run in self._by_token) // self._value_group
        return by_channel + by_token


def _runs(places: Sequence[tuple[int, int]]) -> Iterator[_Run]:
    """Yield the fewest runs that cover the (offset, channels) of all layers."""
    start = 0
    while start < len(places):
        offset, channels = places[start]
        stride = places[start + 1][0] - offset if start + 1 < len(places) else 0
        end = start + 1
        while end < len(places) and places[end] == (offset + (end - start) * stride, channels):
            end += 1
        yield _Run(offset, stride, end - start, channels)
        start = end


class QuantisedBlocks:
    """Converts between the bytes of slots and of blocks, as values. It owns no memory."""

    def __init__(self, table: BlockTable, codec: Codec) -> None:
        """Divide the blocks of this table into groups. Raises ConfigError for blocks that cannot be divided."""
        self._codec = codec
        self._groups = KvGroups(table)
        self._dtype = _DTYPES[table.dtype]
        self._code_bytes = table.block_elems * codec.code_bits // 8
        self.slot_bytes = self._code_bytes + self._groups.num_groups * codec.param_bytes + 1

    def quantise(self, blocks: torch.Tensor) -> torch.Tensor:
        """Quantise blocks: uint8 [n, block_bytes] -> uint8 [n, slot_bytes]."""
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
        """Restore blocks: uint8 [n, slot_bytes] -> uint8 [n, block_bytes].

        Elements beyond the dtype's largest value become that value."""
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
        """Return how many positions at the end of each block are zero in every layer: uint8 [n]."""
        last = torch.stack([part[:, :, -1].ne(0).flatten(1).any(1) for part in self._groups.by_position(elements)])
        if bool(last.any(0).all()):
            return torch.zeros(len(elements), dtype=torch.uint8, device=elements.device)
        written = torch.stack([part.ne(0).any(3).any(1) for part in self._groups.by_position(elements)]).any(0)
        positions = torch.arange(1, self._groups.block_size + 1, device=elements.device)
        used = (written * positions).amax(1)  # [n, block_size] -> [n]
        return (self._groups.block_size - used).clamp_(max=_MOST_UNUSED).to(torch.uint8)

    def _padded(self, elements: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        """Return a copy whose unused positions repeat the first one, so that a channel's range is that of its used
        positions."""
        padded = elements.clone()
        for part in self._groups.by_position(padded):
            part.copy_(torch.where(self._is_unused(unused), part[:, :, :1], part))
        return padded

    def _clear(self, elements: torch.Tensor, unused: torch.Tensor) -> None:
        if bool(unused.any()):
            for part in self._groups.by_position(elements):
                part.masked_fill_(self._is_unused(unused), 0)

    def _is_unused(self, unused: torch.Tensor) -> torch.Tensor:
        """Return a mask of unused positions: [n] -> [n, 1, block_size, 1]."""
        positions = torch.arange(self._groups.block_size, device=unused.device)
        return (positions >= self._groups.block_size - unused[:, None].int())[:, None, :, None]


class QuantisedFormat:
    """The WireFormat of quantised KV. One thread may encode while another decodes, but never the same block."""

    is_pool = False
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
    """Run on a side stream of the GPU, and wait for it at the end. On a CPU it does nothing."""
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
    """Pack 4-bit codes, two per byte: one from each half of the block, because adjacent codes would be slow to
    unpack."""
    low, high = codes.chunk(2, dim=1)
    return high.bitwise_left_shift(4).bitwise_or_(low)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat([packed.bitwise_and(15), packed.bitwise_right_shift(4)], dim=1)
