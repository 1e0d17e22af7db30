"""Steps of decodes from CUDA graphs: the launches of a whole forward, recorded once per size and replayed by one call.

Everything that changes from step to step lies in tensors that stay in place. A step with longer chunks, with guesses,
or with more decodes than any graph has is computed as it was before. What cannot be captured never is, visibly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.registry import AttentionBackend
from engine.batch import PackedBatch
from engine.cuda.decode_buckets import bucket_for
from engine.cuda.static_decodes import StaticDecodes
from engine.steps.forward import Forward


class CapturableBackend(AttentionBackend, Protocol):
    """An attention back end whose launches depend on nothing but a batch's shapes and tensors, once it is prepared."""

    def for_graph(self, batch: PackedBatch) -> "CapturableBackend":
        """One that serves a graph over this batch's tensors, and nothing else."""
        ...

    def prepare(self, batch: PackedBatch) -> None:
        """What the host does for a step, given its lengths, before its launches are made or replayed."""
        ...


class Capture(Protocol):
    """Records what `compute` launches, after it has run at least once. -> what launches all of it again.

    Raises RuntimeError where the device cannot."""

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
    """A Forward. `logits` it answers with are overwritten by its next step."""

    def __init__(self, plain: Forward, decodes: StaticDecodes) -> None:
        self._plain = plain
        self._decodes = decodes
        self._graphs: dict[int, _Graph] = {}
        self._sizes: tuple[int, ...] = ()
        self._logits = torch.empty(0)  # [largest size, vocab], which all graphs write to

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured so far, ascending."""
        return self._sizes

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], step_for: Callable[[PackedBatch], GraphStep], capture: Capture) -> None:
        """From the largest down, so that the memory of one serves the next. Raises RuntimeError at the first that
        cannot be captured; those before it stay. The pool's spare block is written to, and no other."""
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = self._captured(self._decodes.batch(size), step_for, capture)
            self._sizes = tuple(sorted(self._graphs))

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        count = len(batch.query_lens)
        size = bucket_for(count, self._sizes)
        if size is None or set(batch.query_lens) != {1} or batch.block_tables.shape[1] > self._decodes.table_width:
            return self._plain(batch)
        graph = self._graphs[size]
        graph.backend.prepare(self._decodes.take(batch, graph.batch))
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
