"""Attention on CUDA: Tandem's own paged kernel in Triton, for prompt chunks and for decodes.

It supports every option of a layer: strides, windows, soft caps, sinks, grouped heads, head sizes that are not powers
of two, K and V of 8 bits with their scales, and full float32.

Imported only when this back end is chosen: Triton comes with torch's CUDA wheels.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from engine.attention.interface import AttentionOptions, LayerKv
from engine.attention.triton_kernels import MOST_PARTS, attend_tile, merge_parts
from engine.batch import PackedBatch

_CHUNK_ROWS = 64  # queries x heads of a group that one program computes, in chunks
_WIDE_CHUNK_ROWS = 128  # the same for rows of few registers: K and V are read half as often
_WIDE_ROW_BYTES = 256
_MIN_ROWS = 16  # the minimum of a matrix unit
_PROGRAMS_PER_PROCESSOR = 4
_LEAST_PART = 256  # minimum tokens of a decode's context per program


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """The work of each program of one launch: which sequence it computes, and its first query."""

    rows: int
    are_decodes: bool
    sequences: torch.Tensor  # [tiles]
    offsets: torch.Tensor  # [tiles]


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The constants that the kernels are compiled with."""

    key_pad: int
    value_pad: int
    columns: int
    least_part: int
    chunk_rows: int
    num_stages: int


class TritonBackend:
    """The attention back end over the Triton kernels.

    Splits a step into tiles once per kind of layer, and keeps the tiles of the newest step. A CUDA graph is captured
    with the tiles that its first run made: tiles made under capture would be read from the host's memory at every
    replay.
    """

    def __init__(self, least_part: int = _LEAST_PART) -> None:
        self._least_part = least_part
        self._tiled: tuple[int, ...] = ()  # the lengths that they are for
        self._launches: dict[tuple[int, int], tuple[_Tiles, ...]] = {}  # by group and rows

    def for_graph(self, batch: PackedBatch) -> "TritonBackend":
        return TritonBackend(self._least_part)

    def prepare(self, batch: PackedBatch) -> None:
        """Do nothing: a decode's launches depend only on the number of decodes and the width of the block table."""

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        group = query.shape[1] // kv.keys.shape[2]
        geometry = _geometry(kv.keys.shape[3], kv.values.shape[3], query.element_size(), self._least_part)
        if self._tiled != batch.query_lens:
            self._tiled, self._launches = batch.query_lens, {}
        kind = (group, geometry.chunk_rows)
        if kind not in self._launches:
            self._launches[kind] = _launches(batch, *kind, query.device)
        query = query if query.stride(2) == 1 else query.contiguous()
        output = query.new_empty(*query.shape[:2], kv.values.shape[-1])
        for tiles in self._launches[kind]:
            _launch(tiles, geometry, query, output, _Call(kv, batch, options))
        return output


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    kv: LayerKv
    batch: PackedBatch
    options: AttentionOptions


def _launches(batch: PackedBatch, group: int, chunk_rows: int, device: torch.device) -> tuple[_Tiles, ...]:
    """Split a step into a launch for decodes and one for chunks: a decode has one query and would leave most rows of a
    chunk's tile empty."""
    least = max(_MIN_ROWS, triton.next_power_of_2(group))
    decodes = [(sequence, 0) for sequence, length in enumerate(batch.query_lens) if length == 1]
    chunk_rows = max(least, chunk_rows)
    chunks = [
        (sequence, offset)
        for sequence, length in enumerate(batch.query_lens)
        if length > 1
        for offset in range(0, length, chunk_rows // group)
    ]
    return tuple(
        _Tiles(rows, places is decodes, *_placed(places, device).unbind())
        for rows, places in ((least, decodes), (chunk_rows, chunks))
        if places
    )


def _placed(places: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return int32 `[2, tiles]` on the device, copied without waiting."""
    host = torch.tensor(places, dtype=torch.int32).T.contiguous()
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _programs_per_context(num_contexts: int, parts: int, device: torch.device) -> int:
    """Return the number of programs per context that keeps the device busy; with many contexts one program computes
    several parts."""
    if parts == 1:
        return 1
    return max(1, min(parts, -(-_PROGRAMS_PER_PROCESSOR * _num_processors(device) // num_contexts)))


@lru_cache(maxsize=16)
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=64)
def _geometry(key_dim: int, value_dim: int, element_bytes: int, least_part: int) -> _Geometry:
    key_pad, value_pad = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    row_bytes = max(key_pad, value_pad) * element_bytes
    columns = max(16, min(64, (16 << 10) // row_bytes))  # a tile of K must fit small shared memories
    return _Geometry(
        key_pad=key_pad,
        value_pad=value_pad,
        columns=columns,
        least_part=-(-least_part // columns) * columns,
        chunk_rows=_WIDE_CHUNK_ROWS if element_bytes == 2 and row_bytes <= _WIDE_ROW_BYTES else _CHUNK_ROWS,
        num_stages=2 if row_bytes <= 512 else 1,
    )


def _launch(tiles: _Tiles, geometry: _Geometry, query: torch.Tensor, output: torch.Tensor, call: _Call) -> None:
    kv, batch, options = call.kv, call.batch, call.options
    num_tiles, num_kv_heads = len(tiles.sequences), kv.keys.shape[2]
    parts = _Parts.of(tiles, geometry, output, call)
    has_scales = kv.key_scales is not None
    key_scales, value_scales = (kv.key_scales, kv.value_scales) if has_scales else (query, query)
    num_programs = _programs_per_context(num_tiles * num_kv_heads, parts.count, query.device)
    attend_tile[(num_tiles, num_kv_heads, num_programs)](
        query,
        kv.keys,
        kv.values,
        key_scales,
        value_scales,
        output,
        parts.values,
        parts.sums,
        query if options.sinks is None else options.sinks,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        tiles.sequences,
        tiles.offsets,
        options.scaling,
        options.softcap or 0.0,
        options.sliding_window or 0,
        *query.stride()[:2],
        *kv.keys.stride()[:3],
        *kv.values.stride()[:3],
        *(kv.key_scales.stride() if kv.key_scales is not None else (0, 0, 0)),
        *output.stride()[:2],
        batch.block_tables.stride(0),
        **_constants(tiles, geometry, query, call),
        **parts.constants,
        num_warps=8 if tiles.rows >= _WIDE_CHUNK_ROWS else 4,
        num_stages=geometry.num_stages,
    )
    if parts.count > 1:
        _merge(tiles, parts, output, call)


def _constants(tiles: _Tiles, geometry: _Geometry, query: torch.Tensor, call: _Call) -> dict[str, int]:
    """Return the constants of the tile kernel that the merge kernel does not share."""
    kv, options = call.kv, call.options
    _, block_size, num_kv_heads, key_dim = kv.keys.shape
    return {
        "GROUP": query.shape[1] // num_kv_heads,
        "BLOCK_SIZE": block_size,
        "KEY_DIM": key_dim,
        "KEY_PAD": geometry.key_pad,
        "ROWS": tiles.rows,
        "HAS_SOFTCAP": options.softcap is not None,
        "HAS_SINKS": options.sinks is not None,
        "HAS_SCALES": kv.key_scales is not None,
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The buffers that the parts of split contexts are written to, and the constants of both kernels.

    A context in one part is written to the output. Otherwise there is room for the largest number of parts, because the
    kernels would have to be compiled for each number of parts as contexts grow.
    """

    count: int  # of the longest context that fits the table
    values: torch.Tensor
    sums: torch.Tensor
    constants: dict[str, int]

    @classmethod
    def of(cls, tiles: _Tiles, geometry: _Geometry, output: torch.Tensor, call: _Call) -> "_Parts":
        # Sized by the table's width, because a captured graph must work for every context that fits the table.
        longest = call.batch.block_tables.shape[1] * call.kv.keys.shape[1]
        parts = min(MOST_PARTS.value, -(-longest // geometry.least_part)) if tiles.are_decodes else 1
        num_heads, value_dim = output.shape[1:]
        constants = {
            "VALUE_DIM": value_dim,
            "VALUE_PAD": geometry.value_pad,
            "COLUMNS": geometry.columns,
            "PARTS": MOST_PARTS.value if parts > 1 else 1,
            "LEAST_PART": geometry.least_part,
            "HAS_WINDOW": call.options.sliding_window is not None,
        }
        if parts == 1:
            return cls(1, output, output, constants)
        shape = (len(tiles.sequences), num_heads, MOST_PARTS.value)
        values = output.new_empty(*shape, value_dim, dtype=torch.float32)
        return cls(parts, values, output.new_empty(*shape, 2, dtype=torch.float32), constants)


def _merge(tiles: _Tiles, parts: _Parts, output: torch.Tensor, call: _Call) -> None:
    merge_parts[(len(tiles.sequences), output.shape[1])](
        parts.values,
        parts.sums,
        output,
        call.batch.query_starts,
        call.batch.context_lens,
        tiles.sequences,
        call.options.sliding_window or 0,
        *output.stride()[:2],
        **parts.constants,
    )
