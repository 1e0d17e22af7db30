"""Attention that gives each row the same bits however its sequence is cut into chunks and whichever sequences share the
step. It is slower than the other back ends.

The context of a row is read in tiles of positions counted from the sequence's beginning. The highest score is found
over all tiles first, so no sum is ever rescaled; sums are taken tile by tile in order, and a tile in which a row sees
no position adds zeros. Every product has one of two shapes, and the length of every array is a multiple of the vector
width, because remainders are computed by other code. All K and V are read from the pool, those of the step's own tokens
too.
"""

import math
from dataclasses import dataclass

import torch

from engine.attention.gather import take_elements
from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import PackedBatch

_LEAST_TILE = 128  # positions
_LEAST_ROWS = 8
_CHUNK_QUERIES = 32  # of one sequence that are computed together
_DECODES_AT_ONCE = 16  # sequences
_REMAINDER_FREE = 64  # elements


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Queries that are computed together: consecutive queries of one sequence, or one query of each of several
    sequences."""

    rows: torch.Tensor  # [sequences, queries], in the batch
    positions: torch.Tensor  # [sequences, queries]
    block_ids: torch.Tensor  # [sequences, blocks], whole tiles of them
    first: torch.Tensor  # [sequences], the first position of those blocks


class FixedTilesBackend:
    """Attention whose result for a token does not depend on the batch. With `wide`, `_CHUNK_QUERIES` queries of a chunk
    are computed together, otherwise one at a time as in decode. Keeps the units of the newest step."""

    def __init__(self, wide: bool) -> None:
        self._num_queries = _CHUNK_QUERIES if wide else 1
        self._batch: PackedBatch | None = None
        self._units: dict[int | None, list[_Unit]] = {}

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        if batch is not self._batch:
            self._batch, self._units = batch, {}
        window, block_size = options.sliding_window, kv.keys.shape[1]
        if window not in self._units:
            self._units[window] = _units(batch, self._num_queries, block_size, window)
        output = query.new_empty(*query.shape[:2], kv.values.shape[-1])
        for unit in self._units[window]:
            output[unit.rows] = _attend(query[unit.rows], kv, unit, options)
        num_tokens = batch.rows[-1].stop
        output[num_tokens:] = output[num_tokens - 1]  # a padded step repeats its last token
        return output


def tile_size(block_size: int) -> int:
    """Return the tile size: whole blocks, and a multiple of the least number of rows."""
    step = math.lcm(block_size, _REMAINDER_FREE // _LEAST_ROWS)
    return -(-_LEAST_TILE // step) * step


def _units(batch: PackedBatch, num_queries: int, block_size: int, window: int | None) -> list[_Unit]:
    """Return the units of a step: pieces of chunks first, then the single queries."""
    tables = batch.block_tables.cpu()
    pieces: list[tuple[int, int, int]] = []  # (sequence, first of its queries, how many)
    for sequence, length in enumerate(batch.query_lens):
        pieces += [(sequence, begin, min(num_queries, length - begin)) for begin in range(0, length, num_queries)]
    units = [_unit(batch, tables, [piece], num_queries, block_size, window) for piece in pieces if piece[2] > 1]
    alone = sorted((piece for piece in pieces if piece[2] == 1), key=lambda piece: batch.starts[piece[0]] + piece[1])
    for begin in range(0, len(alone), _DECODES_AT_ONCE):
        units.append(_unit(batch, tables, alone[begin : begin + _DECODES_AT_ONCE], 1, block_size, window))
    return units


def _unit(
    batch: PackedBatch,
    tables: torch.Tensor,
    pieces: list[tuple[int, int, int]],
    num_queries: int,
    block_size: int,
    window: int | None,
) -> _Unit:
    tile = tile_size(block_size)
    sequences = torch.tensor([sequence for sequence, _, _ in pieces])
    # A short piece repeats its last query, which is then written twice to the same row.
    queries = torch.tensor([[begin + min(i, count - 1) for i in range(num_queries)] for _, begin, count in pieces])
    positions = queries + torch.tensor([batch.starts[sequence] for sequence, _, _ in pieces])[:, None]
    rows = queries + torch.tensor([batch.rows[sequence].start for sequence, _, _ in pieces])[:, None]
    lowest = positions[:, 0] * 0 if window is None else (positions[:, 0] - window + 1).clamp(min=0)
    first = lowest // tile * tile
    num_tiles = int((positions[:, -1] // tile - first // tile).max()) + 1
    columns = (first // block_size)[:, None] + torch.arange(num_tiles * tile // block_size)
    last = positions[:, -1:] // block_size
    device = batch.block_tables.device
    return _Unit(
        rows=rows.to(device),
        positions=positions.to(device),
        block_ids=tables[sequences[:, None], torch.minimum(columns, last)].to(device),
        first=first.to(device),
    )


def _attend(query: torch.Tensor, kv: LayerKv, unit: _Unit, options: AttentionOptions) -> torch.Tensor:
    """Attend `[sequences, queries, heads, dim]` -> `[sequences, queries, heads, value_dim]`."""
    num_sequences, num_queries, num_heads, dim = query.shape
    num_kv_heads = kv.keys.shape[2]
    group = num_heads // num_kv_heads
    num_used = num_queries * group
    num_rows = -(-num_used // _LEAST_ROWS) * _LEAST_ROWS
    rows = query.new_zeros(num_sequences, num_kv_heads, num_rows, dim)
    ours = query.view(num_sequences, num_queries, num_kv_heads, group, dim).transpose(1, 2).flatten(2, 3)
    rows[:, :, :num_used] = ours * options.scaling
    positions = unit.positions[:, :1].repeat(1, num_rows)  # unused rows see what the first query sees
    positions[:, :num_used] = unit.positions.repeat_interleave(group, dim=1)
    output = _attend_rows(rows, positions, kv, unit, options)[:, :, :num_used].to(query.dtype)
    return output.view(num_sequences, num_kv_heads, num_queries, group, -1).transpose(1, 2).flatten(2, 3)


def _attend_rows(
    rows: torch.Tensor, positions: torch.Tensor, kv: LayerKv, unit: _Unit, options: AttentionOptions
) -> torch.Tensor:
    """Attend with rows `[sequences, kv_heads, rows, dim]`, which hold a group's heads query by query; positions are
    `[sequences, rows]`."""
    tile = tile_size(kv.keys.shape[1])
    keys = _tiles(kv.keys, kv.key_scales, unit, tile, rows.dtype)
    values = _tiles(kv.values, kv.value_scales, unit, tile, rows.dtype)
    scores = [
        _scores(rows, key, positions, unit.first + index * tile, options) for index, key in enumerate(keys)
    ]  # of each tile [sequences, kv_heads, rows, tile]
    highest = torch.stack([score.amax(dim=-1) for score in scores]).amax(dim=0)
    total = torch.zeros_like(highest)
    if options.sinks is not None:
        sinks = _per_row(options.sinks, rows)
        highest = torch.maximum(highest, sinks)
        total = (sinks - highest)[..., None].expand(*highest.shape, _REMAINDER_FREE).contiguous().exp_()[..., 0]
    weighted = rows.new_zeros(*rows.shape[:3], kv.values.shape[-1], dtype=torch.float32)
    for score, value in zip(scores, values, strict=True):
        weights = score.sub_(highest[..., None]).exp_()
        total = total + weights.sum(dim=-1)
        weighted += torch.bmm(weights.to(value.dtype).flatten(0, 1), value).view(weighted.shape)
    return weighted / total[..., None]


def _scores(
    rows: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, first: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    tile = key.shape[1]
    scores = torch.bmm(rows.flatten(0, 1), key.transpose(1, 2)).float().view(*rows.shape[:3], tile)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    columns = first[:, None, None] + torch.arange(tile, device=key.device)
    visible = columns <= positions[:, :, None]
    if options.sliding_window is not None:
        visible &= columns > positions[:, :, None] - options.sliding_window
    return scores.masked_fill_(~visible[:, None], -torch.inf)


def _per_row(sinks: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Expand one value per head to one per row: `[heads]` -> `[kv_heads, rows]`."""
    by_head = sinks.float().view(rows.shape[1], -1)
    times = -(-rows.shape[2] // by_head.shape[1])
    return by_head.repeat(1, times)[:, : rows.shape[2]]


def _tiles(
    view: torch.Tensor, scales: torch.Tensor | None, unit: _Unit, tile: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return tiles of K and V, each contiguous `[sequences * kv_heads, tile, dim]`."""
    tokens = take_elements(view, scales, unit.block_ids.flatten(), dtype)
    tiles = tokens.view(len(unit.block_ids), -1, tile, *view.shape[2:]).permute(1, 0, 3, 2, 4)
    return [part.contiguous().flatten(0, 1) for part in tiles]
