"""Computes the logits of a packed batch by the model's own modules in `transformers`, with attention over the pool.

Faster implementations (compiled kernels, CUDA graphs) are Forwards too and replace this one.
"""

import inspect
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.attention.interface import KV_KEYWORD, AttentionOptions, LayerKv
from engine.attention.registry import AttentionBackend
from engine.batch import PackedBatch
from engine.kv.pool import KvPool, quantise


class Forward(Protocol):
    """Computes one packed batch over one pool: writes its tokens' KV and reads the KV that they attend to."""

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """Return the logits of `batch.logit_rows`, `[rows, vocab]`, in the model's dtype or a wider one; there may be
        no rows."""
        ...


class PlainForward:
    """The reference forward: every other Forward returns the same logits within rounding."""

    def __init__(self, model: PreTrainedModel, pool: KvPool, backend: AttentionBackend) -> None:
        self._model = model
        self._pool = pool
        self._backend = backend
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        keywords: dict[str, object] = {KV_KEYWORD: _PagedKv(self._pool, batch, self._backend)}
        num_rows = len(batch.logit_rows)
        if self._keeps_rows:  # one row where none is needed, because a model may fail on an empty product
            keywords["logits_to_keep"] = batch.logit_rows if num_rows else batch.query_starts[:1]
        output = self._model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **keywords)
        logits: torch.Tensor = output.logits[0]
        return logits[:num_rows] if self._keeps_rows else logits[batch.logit_rows]


@dataclass(slots=True)
class _PagedKv:
    """Gives the layers access to the pool for one step."""

    pool: KvPool
    batch: PackedBatch
    backend: AttentionBackend
    num_written: int = 0  # layers whose K and V are in the pool

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        keys, values = self.pool.layers[layer]
        scales = self.pool.scales[layer] if self.pool.scales else ()
        if not scales:
            self._write(keys, key)
            self._write(values, value)
        for view, scale_view, states in zip((keys, values), scales, (key, value), strict=False):
            codes, found = quantise(states, view.dtype)
            self._write(view, codes)
            self._write(scale_view, found)
        self.num_written += 1
        if self.num_written == len(self.pool.layers) and self.batch.written is not None:
            self.batch.written()
        return self.backend.attend(query, LayerKv(key, value, keys, values, *scales), self.batch, options)

    def _write(self, view: torch.Tensor, states: torch.Tensor) -> None:
        view.index_put_((self.batch.slot_blocks, self.batch.slot_offsets), states)
