"""Computes steps on one device. Owns the order of a step: copies, forward, draw; never decides what is in it."""

import inspect
from dataclasses import dataclass

import torch

from engine.attention.interface import KV_KEYWORD, AttentionOptions, LayerKv
from engine.attention.registry import AttentionBackend
from engine.batch import PackedBatch, pack
from engine.loaded import LoadedModel
from engine.pool import KvPool
from engine.sampler import draw
from engine.step import StepPlan, StepResult


class ModelRunner:
    """Runs one model over one pool; called by the step thread alone.

    A block is zeroed when a step begins it without filling it, so the positions after a sequence's last token are zero
    at all times: a tail is offered as it lies.
    """

    def __init__(self, loaded: LoadedModel, pool: KvPool) -> None:
        self._model = loaded.model
        self._pool = pool
        self._backend = loaded.attention.build()
        self._device = torch.device(loaded.device)
        self._keeps_rows = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters

    def run(self, plan: StepPlan) -> StepResult:
        logits = self.logits(plan)  # [chunks with samples, vocab]
        samples = [sample for chunk in plan.chunks for sample in chunk.samples]
        tokens = iter(draw(self._row_per_sample(logits, plan), samples) if samples else ())
        result = StepResult(tuple(tuple(next(tokens) for _ in chunk.samples) for chunk in plan.chunks))
        if self._device.type == "cuda":
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record()
            written.synchronize()
        return result

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Computes the step up to the logits of each sampled chunk's last token, `[chunks with samples, vocab]`."""
        if plan.copies:
            self._pool.copy_blocks(plan.copies)
        if not plan.chunks:
            return torch.empty(0, 0)
        batch = pack(plan.chunks, self._pool.layout.block_size, self._device)
        if batch.fresh_blocks is not None:
            self._pool.tensor.index_fill_(0, batch.fresh_blocks, 0)
        keywords: dict[str, object] = {KV_KEYWORD: _PagedKv(self._pool, batch, self._backend)}
        num_rows = len(batch.logit_rows)
        if self._keeps_rows:  # one row where none is wanted: no model has to cope with an empty product
            keywords["logits_to_keep"] = batch.logit_rows if num_rows else batch.query_starts[:1]
        output = self._model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **keywords)
        logits: torch.Tensor = output.logits[0]
        return logits[:num_rows] if self._keeps_rows else logits[batch.logit_rows]

    def _row_per_sample(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        counts = [len(chunk.samples) for chunk in plan.chunks if chunk.samples]
        if all(count == 1 for count in counts):
            return logits
        return logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)


@dataclass(frozen=True, slots=True)
class _PagedKv:
    """KvAccess over the pool for one step."""

    pool: KvPool
    batch: PackedBatch
    backend: AttentionBackend

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        keys, values = self.pool.layers[layer]
        place = (self.batch.slot_blocks, self.batch.slot_offsets)
        keys.index_put_(place, key)
        values.index_put_(place, value)
        return self.backend.attend(query, LayerKv(key, value, keys, values), self.batch, options)
