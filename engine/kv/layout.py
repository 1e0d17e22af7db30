"""The layout and size of a KV block. Owns the axis order; never touches memory. Pure.

A pool is block-major: `[num_blocks, block_elems]`. Inside a block the layers follow each other, and each layer has its
K, then its V, as `[block_size, num_kv_heads, head_dim]`. For a model whose layers are alike that is

    [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]

so that one block is one contiguous run of bytes. Layers that differ from each other, or whose K and V differ, change
the table and nothing else. Everything outside this file goes by the table.

KV of 8 bits has one bfloat16 scale for K and one for V per token and head (engine/kv/pool.py). They follow the
last layer's V, each layer's K scales and then its V scales as `[block_size, num_kv_heads]`: a block still is one run of
bytes, and needs nothing outside it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
SCALED = frozenset({"int8", "fp8"})  # KV dtypes that have scales
SCALE_BYTES = 2
_ALIGNMENT = 16  # bytes: alignment of a quantised block and of its scales; kernels load this many at once


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K and V of one token in one layer: `[num_kv_heads, key_dim]` and `[num_kv_heads, value_dim]`."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elems_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The position of a layer inside a block: the offsets of its K and V in elements, and of their scales in scales
    from the block's start."""

    shape: LayerShape
    key_offset: int
    value_offset: int
    key_scale_offset: int = 0  # 0: it has none
    value_scale_offset: int = 0


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of a block for one model, block size and KV dtype."""

    block_size: int  # tokens
    dtype: str
    layers: tuple[LayerPlace, ...]

    @property
    def block_elems(self) -> int:
        return self.block_size * sum(place.shape.elems_per_token for place in self.layers)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def has_scales(self) -> bool:
        return self.dtype in SCALED

    @property
    def block_bytes(self) -> int:
        elems_bytes = self.block_elems * self.item_bytes
        if not self.has_scales:
            return elems_bytes
        num_scales = self.block_size * sum(2 * place.shape.num_kv_heads for place in self.layers)
        return _aligned(_aligned(elems_bytes) + num_scales * SCALE_BYTES)

    @property
    def kv_bytes_per_token(self) -> int:
        """The KV bytes per token, rounded up: a quantised block may end in padding."""
        return -(-self.block_bytes // self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def digest(self) -> str:
        """A digest of the layout. Equal digests mean that a block's bytes mean the same on both sides."""
        table = [
            (place.key_offset, place.value_offset, place.shape.num_kv_heads, place.shape.key_dim, place.shape.value_dim)
            + ((place.key_scale_offset, place.value_scale_offset) if self.has_scales else ())
            for place in self.layers
        ]
        text = json.dumps([self.block_size, self.dtype, table], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def lay_out(shapes: Sequence[LayerShape], block_size: int, dtype: str) -> BlockLayout:
    """Return the layout for these layers. No other place decides the order of a block's contents."""
    places = []
    offset = 0
    scale_offset = _aligned(block_size * sum(shape.elems_per_token for shape in shapes)) // SCALE_BYTES
    for shape in shapes:
        key_elems = block_size * shape.num_kv_heads * shape.key_dim
        value_elems = block_size * shape.num_kv_heads * shape.value_dim
        place = LayerPlace(shape, key_offset=offset, value_offset=offset + key_elems)
        offset += key_elems + value_elems
        if dtype in SCALED:
            num_scales = block_size * shape.num_kv_heads
            place = replace(place, key_scale_offset=scale_offset, value_scale_offset=scale_offset + num_scales)
            scale_offset += 2 * num_scales
        places.append(place)
    return BlockLayout(block_size, dtype, tuple(places))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
