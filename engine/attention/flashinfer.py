"""Attention on CUDA by FlashInfer's kernels (Ye et al., 2025), over the same blocks in place.

A step of decodes uses its decode kernel, and any other step its prefill kernel, which computes decodes as well. Both
are planned on the host once per step and kind of layer; a plan reads no device memory. Imported only when this back end
is chosen: FlashInfer is an optional package, and compiles kernels at their first use if its wheel contains none.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import flashinfer
import torch

from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import PackedBatch

_WORKSPACE_BYTES = 128 << 20  # recommended by its documentation
_TENSOR_CORE_GROUP = 4  # from this many heads per KV head on, matrix units are faster than plain ones in a decode


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """The kind of layer that one FlashInfer plan serves."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scaling: float
    window_left: int
    softcap: float

    def options(self) -> dict[str, Any]:
        return {
            "sm_scale": self.scaling,
            "window_left": self.window_left,
            "logits_soft_cap": self.softcap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
            "non_blocking": True,
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """The page tables of a step in FlashInfer's format: the planning inputs on the host, the kernel inputs on the
    device."""

    query_starts: torch.Tensor  # int32 [sequences + 1], host
    page_starts: torch.Tensor  # int32 [sequences + 1], host
    page_ids: torch.Tensor  # int32 [pages], device
    last_page_lens: torch.Tensor  # int32 [sequences], host
    are_decodes: bool


class FlashInferBackend:
    """Attention by FlashInfer. Keeps the plans of the newest step; with `graph_pages`, the plans of one batch size at
    fixed addresses for CUDA graphs."""

    def __init__(self, graph_pages: int | None = None, workspace: torch.Tensor | None = None) -> None:
        """`graph_pages` is the most pages that all sequences of a captured decode step will ever read together."""
        self._graph_pages = graph_pages
        self._workspace = workspace
        self._batch: PackedBatch | None = None
        self._pages: _Pages | None = None
        self._wrappers: dict[tuple[_LayerKind, bool], Any] = {}
        self._planned: set[tuple[_LayerKind, bool]] = set()

    def for_graph(self, batch: PackedBatch) -> "FlashInferBackend":
        """Return a back end for a graph over this batch's tensors. All graphs share one workspace, since steps run one
        after another."""
        num_pages = batch.block_tables.numel()
        return FlashInferBackend(num_pages, self._shared_workspace(batch.block_tables.device))

    def prepare(self, batch: PackedBatch) -> None:
        """Plan again for every kind of layer seen so far; a replayed graph reads these plans."""
        self._batch, self._pages = batch, None
        self._planned.clear()
        if self._graph_pages is not None:
            for kind, are_decodes in self._wrappers:
                self._plan(kind, self._step(batch, kind.block_size), are_decodes)

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        if batch is not self._batch:
            self.prepare(batch)
        _, block_size, num_kv_heads, head_dim = kv.keys.shape
        kind = _LayerKind(
            num_heads=query.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=query.dtype,
            scaling=options.scaling,
            window_left=-1 if options.sliding_window is None else options.sliding_window - 1,
            softcap=options.softcap or 0.0,
        )
        pages = self._step(batch, block_size)
        place = (kind, pages.are_decodes)
        if place not in self._planned:
            self._plan(kind, pages, pages.are_decodes)
        query = query if query.stride(2) == 1 else query.contiguous()
        output: torch.Tensor = self._wrappers[place].run(query, (kv.keys, kv.values))
        return output

    def _step(self, batch: PackedBatch, block_size: int) -> _Pages:
        if self._pages is None:
            self._pages = _pages(batch, block_size)
        return self._pages

    def _plan(self, kind: _LayerKind, pages: _Pages, are_decodes: bool) -> None:
        place = (kind, are_decodes)
        if place not in self._wrappers:
            self._wrappers[place] = self._wrapper(kind, pages)
        shape = (kind.num_heads, kind.num_kv_heads, kind.head_dim, kind.block_size)
        table = (pages.page_starts, pages.page_ids, pages.last_page_lens)
        if are_decodes:
            self._wrappers[place].plan(*table, *shape, **kind.options())
        else:
            self._wrappers[place].plan(pages.query_starts, *table, *shape, causal=True, **kind.options())
        self._planned.add(place)

    def _wrapper(self, kind: _LayerKind, pages: _Pages) -> Any:
        device = pages.page_ids.device
        workspace = self._shared_workspace(device)
        if not pages.are_decodes:
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        tensor_cores = kind.num_heads // kind.num_kv_heads >= _TENSOR_CORE_GROUP
        buffers: dict[str, Any] = {}
        if self._graph_pages is not None:
            num_sequences = len(pages.last_page_lens)
            sizes = {"indptr": num_sequences + 1, "indices": self._graph_pages, "last_page_len": num_sequences}
            buffers = {
                f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=device)
                for name, size in sizes.items()
            } | {"use_cuda_graph": True}
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores, **buffers)

    def _shared_workspace(self, device: torch.device) -> torch.Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace


def _pages(batch: PackedBatch, block_size: int) -> _Pages:
    """Return the step's page tables. Lengths come from the host; page ids are gathered from the block tables on the
    device, without a wait."""
    context_lens = [start + length for start, length in zip(batch.starts, batch.query_lens, strict=True)]
    counts = [-(-length // block_size) for length in context_lens]
    page_starts = list(itertools.accumulate(counts, initial=0))
    host_counts = torch.tensor(counts)
    device = batch.block_tables.device
    flat = torch.arange(page_starts[-1]) + (
        torch.arange(len(counts)) * batch.block_tables.shape[1] - torch.tensor(page_starts[:-1])
    ).repeat_interleave(host_counts)
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return _Pages(
        query_starts=torch.tensor(list(itertools.accumulate(batch.query_lens, initial=0)), dtype=torch.int32),
        page_starts=torch.tensor(page_starts, dtype=torch.int32),
        page_ids=batch.block_tables.reshape(-1)[flat].to(torch.int32),
        last_page_lens=torch.tensor([(length - 1) % block_size + 1 for length in context_lens], dtype=torch.int32),
        are_decodes=all(length == 1 for length in batch.query_lens),
    )
