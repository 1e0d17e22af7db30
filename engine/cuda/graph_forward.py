"""Computes steps of decodes by CUDA graphs: the launches of a whole forward, recorded once per batch size and replayed
by one call.

Everything that changes from step to step lies in tensors at fixed addresses. A step with longer chunks, with draft
tokens, or with more decodes than the largest graph runs without a graph. A model that cannot be captured runs without
graphs, and the engine's report says so.

A step of n decodes replays the graph of the smallest size that holds n, and computes unused rows for the rest: at most
a third of a small step, and under a tenth from 64 on. Sizes are closer where steps are small and each graph is cheap.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from engine.attention.registry import AttentionBackend
from engine.batch import PackedBatch
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.steps.forward import Forward

NewForward = Callable[[AttentionBackend], Forward]
_SMALL = (1, 2, 4)
_EIGHTS_TO = 256
_FAR_STEP = 32


class StaticDecodes:
    """The input tensors of all graphs, at fixed addresses: `batch(size)` is the batch that a graph of `size` rows
    captures, and `copy_step` copies a step into it."""

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
        """Return the first `size` rows as a batch, with the host's values for idle rows."""
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

    def copy_step(self, step: PackedBatch, batch: PackedBatch) -> PackedBatch:
        """Copy a step into the first rows of `batch` and make the other rows idle. Returns `batch` with the starts of
        the step's sequences, which the host reads."""
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


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, ascending: 1, 2, 4, 8, 16, 24, ... and `max_num_seqs` itself."""
    assert max_num_seqs >= 1
    sizes = {*_SMALL, *range(8, _EIGHTS_TO + 1, 8), *range(_EIGHTS_TO, max_num_seqs, _FAR_STEP), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def bucket_for(num_decodes: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `sizes` that holds `num_decodes` rows, or None."""
    place = bisect.bisect_left(sizes, num_decodes)
    return sizes[place] if place < len(sizes) else None


class CapturableBackend(AttentionBackend, Protocol):
    """An attention back end whose launches depend only on a batch's shapes and tensors once it is prepared."""

    def for_graph(self, batch: PackedBatch) -> "CapturableBackend":
        """Return a back end for a graph over this batch's tensors."""
        ...

    def prepare(self, batch: PackedBatch) -> None:
        """Do the host's work for a step, given its lengths, before its launches are made or replayed."""
        ...


class Capture(Protocol):
    """Records the launches of `compute`, after running it at least once, and returns a function that launches all of
    them again.

    Raises RuntimeError if the device cannot record them.
    """

    def __call__(self, compute: Callable[[], object], prepare: Callable[[], None]) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True, eq=False)
class GraphStep:
    """A forward with a back end of its own, over the same model and pool as the plain one."""

    forward: Forward
    backend: CapturableBackend


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    batch: PackedBatch
    backend: CapturableBackend
    replay: Callable[[], None]


class GraphForward:
    """A Forward that replays CUDA graphs for decode steps. The next step overwrites the logits it returned."""

    def __init__(self, plain: Forward, decodes: StaticDecodes) -> None:
        self._plain = plain
        self._decodes = decodes
        self._graphs: dict[int, _Graph] = {}
        self._sizes: tuple[int, ...] = ()
        self._logits = torch.empty(0)  # [largest size, vocab], which all graphs write to

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured batch sizes, ascending."""
        return self._sizes

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], step_for: Callable[[PackedBatch], GraphStep], capture: Capture) -> None:
        """Capture the sizes from the largest down, so that smaller graphs reuse its memory. Raises RuntimeError at the
        first size that cannot be captured and keeps those before it. Writes only to the pool's spare block."""
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = self._captured(self._decodes.batch(size), step_for, capture)
            self._sizes = tuple(sorted(self._graphs))

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        count = len(batch.query_lens)
        size = bucket_for(count, self._sizes)
        if size is None or set(batch.query_lens) != {1} or batch.block_tables.shape[1] > self._decodes.table_width:
            return self._plain(batch)
        graph = self._graphs[size]
        graph.backend.prepare(self._decodes.copy_step(batch, graph.batch))
        graph.replay()
        logits = self._logits[:count]
        return logits if len(batch.logit_rows) == count else logits[batch.logit_rows]

    def _captured(self, batch: PackedBatch, step_for: Callable[[PackedBatch], GraphStep], capture: Capture) -> _Graph:
        step = step_for(batch)
        step.backend.prepare(batch)
        if not len(self._logits):
            self._logits = torch.empty_like(step.forward(batch))
        replay = capture(lambda: self._compute(step, batch), lambda: step.backend.prepare(batch))
        return _Graph(batch, step.backend, replay)

    def _compute(self, step: GraphStep, batch: PackedBatch) -> None:
        logits = step.forward(batch)
        self._logits[: len(logits)].copy_(logits)


def captured(
    max_num_seqs: int, loaded: LoadedModel, pool: KvPool, new_forward: NewForward, capture: Capture
) -> tuple[GraphForward, str]:
    """Capture graphs for as many sizes as possible. Also returns why it stopped before the last size, if it did."""
    width = loaded.layout.num_blocks_for(loaded.info.max_model_len)
    decodes = StaticDecodes(max_num_seqs, width, pool.spare_block, pool.device)
    graphs = GraphForward(new_forward(loaded.attention.build()), decodes)
    family = cast(CapturableBackend, loaded.attention.build())

    def step_for(batch: PackedBatch) -> GraphStep:
        backend = family.for_graph(batch)
        return GraphStep(new_forward(backend), backend)

    try:
        graphs.capture(bucket_sizes(max_num_seqs), step_for, capture)
    except Exception as error:  # noqa: BLE001 - a kernel or a library may raise anything: steps are computed without
        return graphs, str(error).strip().partition("\n")[0] or type(error).__name__
    return graphs, ""


class CudaCapture:
    """A Capture on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], object], prepare: Callable[[], None]) -> Callable[[], None]:
        """Capture `compute` as a graph. Raises RuntimeError if `compute` waits for the device; this is detected before
        recording, since torch's allocator does not recover from a failed capture."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for mode in ("default", "error"):  # compiles the kernels and lets libraries choose theirs
                prepare()
                _run(compute, mode)
            prepare()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        current.wait_stream(self._stream)
        return graph.replay


def _run(compute: Callable[[], object], sync_debug_mode: str) -> None:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(sync_debug_mode)
    try:
        compute()
    finally:
        torch.cuda.set_sync_debug_mode(before)
