"""The forward of an engine on a GPU: fused where it can be, decodes from graphs, and what the worker's report says."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from cluster.settings.engine_settings import EngineSettings
from engine.attention.registry import AttentionBackend
from engine.batch import PackedBatch
from engine.cuda.cuda_capture import CudaCapture
from engine.cuda.decode_buckets import bucket_sizes
from engine.cuda.fused_forward import FusedForward, fused_decoder
from engine.cuda.graph_forward import CapturableBackend, Capture, GraphForward, GraphStep
from engine.cuda.static_decodes import StaticDecodes
from engine.decoders.not_compiled import NotCompiled
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.steps.forward import Forward, PlainForward

NewForward = Callable[[AttentionBackend], Forward]


@dataclass(frozen=True, slots=True, eq=False)
class Forwards:
    """One model's, over any pool and with any back end."""

    over: Callable[[KvPool, AttentionBackend], Forward]
    report: str


def forwards(settings: EngineSettings, loaded: LoadedModel) -> Forwards:
    """Fused where that can be. Weights are moved and the model's own forward is asked once more, which takes memory for
    a while: called before the pool takes what there is."""
    try:
        if settings.deterministic == "on":
            raise NotCompiled("--deterministic computes in shapes of its own")
        fused, ops = fused_decoder(loaded, settings.max_prefill_tokens)
    except NotCompiled as why:
        return Forwards(partial(PlainForward, loaded.model), f"forward: plain ({why})")
    return Forwards(
        lambda pool, backend: FusedForward(fused, pool, backend, ops), f"forward: fused, {len(fused.layers)} layers"
    )


def gpu_forward(
    settings: EngineSettings, loaded: LoadedModel, pool: KvPool, made: Forwards
) -> tuple[Forward, tuple[str, ...]]:
    """The forward to serve with, and lines for the report. The pool needs one spare block."""
    new_forward, line = partial(made.over, pool), made.report
    plain = new_forward(loaded.attention.build())
    if settings.cuda_graphs == "off":
        return plain, (line, "cuda graphs: off (--cuda-graphs off)")
    if settings.deterministic == "on":
        return plain, (line, "cuda graphs: off, as --deterministic computes in shapes of its own")
    if not loaded.attention.captures:
        return plain, (line, f"cuda graphs: off, as attention by {loaded.attention.name} cannot be captured")
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved(pool.device)
    capture = CudaCapture(pool.device)
    graphs, why = captured(settings.max_num_seqs, loaded, pool, new_forward, capture)
    taken = torch.cuda.memory_reserved(pool.device) - taken  # graphs keep what their steps only pass through
    if not graphs.sizes:
        return plain, (line, f"cuda graphs: off, as the model cannot be captured ({why})")
    stopped = f"; smaller ones could not be captured ({why})" if why else ""
    said = f"{len(graphs.sizes)} sizes, {graphs.sizes[0]} to {graphs.sizes[-1]} decodes, {taken >> 20} MiB{stopped}"
    return graphs, (line, f"cuda graphs: {said}")


def captured(
    max_num_seqs: int, loaded: LoadedModel, pool: KvPool, new_forward: NewForward, capture: Capture
) -> tuple[GraphForward, str]:
    """With as many sizes as could be captured, and why it stopped before the last, or nothing."""
    width = loaded.layout.num_blocks_for(loaded.info.max_model_len)
    decodes = StaticDecodes(max_num_seqs, width, pool.spare_block, pool.device)
    graphs = GraphForward(new_forward(loaded.attention.build()), decodes)
    family = cast(CapturableBackend, loaded.attention.build())

    def step_for(batch: PackedBatch) -> GraphStep:
        backend = family.for_graph(batch)
        return GraphStep(new_forward(backend), backend)

    try:
        graphs.capture(bucket_sizes(max_num_seqs), step_for, capture)
    except Exception as error:  # noqa: BLE001 - whatever a kernel or a library raises: steps are computed without
        return graphs, str(error).strip().partition("\n")[0] or type(error).__name__
    return graphs, ""
