"""What a KV block looks like inside, and how big it is. Owns the axis order; never touches memory. Pure.

A pool is block-major: `[num_blocks, block_elems]`. Inside a block the layers follow each other, and each layer has its
K, then its V, as `[block_size, num_kv_heads, head_dim]`. For a model whose layers are alike that is

    [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]

so that one block is one contiguous run of bytes. Layers that differ from each other, or whose K and V differ, change
the table and nothing else. Everything outside this file goes by the table.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    """Where a layer's K and V begin inside a block, in elements."""

    shape: LayerShape
    key_offset: int
    value_offset: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The table of one model at one block size and dtype."""

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
    def block_bytes(self) -> int:
        return self.block_elems * self.item_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def digest(self) -> str:
        """Equal digests mean that a block's bytes mean the same on both sides."""
        table = [
            (place.key_offset, place.value_offset, place.shape.num_kv_heads, place.shape.key_dim, place.shape.value_dim)
            for place in self.layers
        ]
        text = json.dumps([self.block_size, self.dtype, table], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def lay_out(shapes: Sequence[LayerShape], block_size: int, dtype: str) -> BlockLayout:
    """The table for these layers. The one place that decides what lies where."""
    places = []
    offset = 0
    for shape in shapes:
        key_elems = block_size * shape.num_kv_heads * shape.key_dim
        value_elems = block_size * shape.num_kv_heads * shape.value_dim
        places.append(LayerPlace(shape, key_offset=offset, value_offset=offset + key_elems))
        offset += key_elems + value_elems
    return BlockLayout(block_size, dtype, tuple(places))
