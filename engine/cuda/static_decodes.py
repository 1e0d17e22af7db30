"""The tensors that graphs read: a step of decodes at addresses that never change.

Graphs of all sizes read the front of the same tensors. Rows behind a step's decodes stand idle: they compute one token
at the start of the pool's spare block, which no sequence ever has.
"""

import dataclasses

import torch

from engine.batch import PackedBatch


class StaticDecodes:
    """`batch(size)` is what a graph over so many rows is captured with; `take` puts a step there."""

    def __init__(self, max_size: int, table_width: int, spare_block: int, device: torch.device) -> None:
        self._spare_block = spare_block
        self._num_live = 0  # rows from here on are idle

        def filled(*shape: int, value: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self._input_ids = filled(1, max_size, value=0)
        self._position_ids = filled(1, max_size, value=0)
        self._slot_blocks = filled(max_size, value=spare_block)
        self._slot_offsets = filled(max_size, value=0)
        self._block_tables = filled(max_size, table_width, value=spare_block)
        self._context_lens = filled(max_size, value=1)
        self._starts = torch.arange(max_size + 1, device=device)  # of queries, which have one row each

    @property
    def table_width(self) -> int:
        return self._block_tables.shape[1]

    def batch(self, size: int) -> PackedBatch:
        """The first `size` rows, with what the host knows of idle ones."""
        return PackedBatch(
            input_ids=self._input_ids[:, :size],
            position_ids=self._position_ids[:, :size],
            slot_blocks=self._slot_blocks[:size],
            slot_offsets=self._slot_offsets[:size],
            block_tables=self._block_tables[:size],
            query_starts=self._starts[: size + 1],
            context_lens=self._context_lens[:size],
            logit_rows=self._starts[:size],
            fresh_blocks=None,
            fed=None,
            rows=tuple(slice(row, row + 1) for row in range(size)),
            query_lens=(1,) * size,
            starts=(0,) * size,
        )

    def take(self, step: PackedBatch, batch: PackedBatch) -> PackedBatch:
        """Puts a step into the front rows of `batch`, the others idle. -> `batch` with what the host knows of both."""
        count = len(step.query_lens)
        assert set(step.query_lens) == {1} and count <= len(batch.query_lens), step.query_lens
        self._input_ids[:, :count] = step.input_ids
        self._position_ids[:, :count] = step.position_ids
        self._slot_blocks[:count] = step.slot_blocks
        self._slot_offsets[:count] = step.slot_offsets
        self._block_tables[:count, : step.block_tables.shape[1]] = step.block_tables
        self._context_lens[:count] = step.context_lens
        if count < self._num_live:
            self._idle(slice(count, self._num_live))
        self._num_live = count
        return dataclasses.replace(batch, starts=step.starts + (0,) * (len(batch.query_lens) - count))

    def _idle(self, rows: slice) -> None:
        self._input_ids[:, rows] = 0
        self._position_ids[:, rows] = 0
        self._slot_blocks[rows] = self._spare_block
        self._slot_offsets[rows] = 0
        self._block_tables[rows] = self._spare_block
        self._context_lens[rows] = 1
