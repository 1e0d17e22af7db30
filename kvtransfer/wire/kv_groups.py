"""Which elements of a block share a scale: the only place of this package that looks inside a block.

Keys are grouped by channel over `KEY_GROUP` tokens, values by token over 64 neighbouring elements: some channels
of K are far larger than the rest, and are so for every token, while V has no such channels (Liu et al., "KIVI: A
Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024). In blocks of another size than a multiple of
`KEY_GROUP` keys are grouped as values are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.errors import ConfigError

KEY_GROUP = 16  # tokens of one channel
VALUE_GROUPS = (64, 32)  # elements of one token; the first that divides every layer's part of a block


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
    """Where each layer's K and V, `[block_size, num_kv_heads, dim]`, begin inside a block. Offsets count elements."""

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
    """Those elements of some blocks that are grouped alike. A view: writing to it writes to the blocks."""

    elements: torch.Tensor  # [n, layers, lines, KEY_GROUP, channels] or [n, layers, groups, 64 or 32]
    axis: int  # along which a group lies

    @property
    def param_shape(self) -> list[int]:
        """Of one parameter of every group."""
        shape = list(self.elements.shape)
        shape[self.axis] = 1
        return shape


@dataclass(frozen=True, slots=True)
class _Run:
    """Equally wide parts of a block at equal distances: a uniform model has one run of keys and one of values."""

    offset: int
    stride: int
    count: int
    channels: int


class KvGroups:
    """The groups of every block of one table."""

    def __init__(self, table: BlockTable) -> None:
        """Raises ConfigError for blocks that cannot be divided into groups."""
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
        """Every element of `blocks` (`[n, block_elems]`, rows contiguous, any dtype) once, always in this order."""
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
        """The same elements as `[n, layers, block_size, channels]`, in the same order."""
        row, start = blocks.stride(0), blocks.storage_offset()
        for run in (*self._by_channel, *self._by_token):
            shape = (len(blocks), run.count, self.block_size, run.channels)
            yield blocks.as_strided(shape, (row, run.stride, run.channels, 1), start + run.offset)

    @property
    def num_groups(self) -> int:
        """Of one block."""
        by_channel = sum(run.count * run.channels * self.block_size for run in self._by_channel) // KEY_GROUP
        by_token = sum(run.count * run.channels * self.block_size for run in self._by_token) // self._value_group
        return by_channel + by_token


def _runs(places: Sequence[tuple[int, int]]) -> Iterator[_Run]:
    """(offset, channels) of each layer, as the fewest runs."""
    start = 0
    while start < len(places):
        offset, channels = places[start]
        stride = places[start + 1][0] - offset if start + 1 < len(places) else 0
        end = start + 1
        while end < len(places) and places[end] == (offset + (end - start) * stride, channels):
            end += 1
        yield _Run(offset, stride, end - start, channels)
        start = end
