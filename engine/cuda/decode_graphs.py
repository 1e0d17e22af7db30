"""CUDA graphs for one engine's decodes: what is captured, and what the worker's report says of it."""

from typing import cast

import torch

from cluster.engine_settings import EngineSettings
from engine.batch import PackedBatch
from engine.cuda.cuda_capture import CudaCapture
from engine.cuda.decode_buckets import bucket_sizes
from engine.cuda.graph_forward import CapturableBackend, Capture, GraphForward, GraphStep
from engine.cuda.static_decodes import StaticDecodes
from engine.forward import Forward, PlainForward
from engine.loaded import LoadedModel
from engine.pool import KvPool


def graph_forward(
    settings: EngineSettings, loaded: LoadedModel, pool: KvPool, plain: Forward
) -> tuple[Forward, tuple[str, ...]]:
    """The forward to serve with, and lines for the report. The pool needs one spare block."""
    if settings.cuda_graphs == "off":
        return plain, ("cuda graphs: off (--cuda-graphs off)",)
    if settings.deterministic == "on":
        return plain, ("cuda graphs: off, as --deterministic computes in shapes of its own",)
    if not loaded.attention.captures:
        return plain, (f"cuda graphs: off, as attention by {loaded.attention.name} cannot be captured",)
    taken = torch.cuda.memory_allocated(pool.device)
    graphs, why = captured(settings.max_num_seqs, loaded, pool, plain, CudaCapture(pool.device))
    taken = torch.cuda.memory_allocated(pool.device) - taken
    if not graphs.sizes:
        return plain, (f"cuda graphs: off, as the model cannot be captured ({why})",)
    stopped = f"; smaller ones could not be captured ({why})" if why else ""
    return graphs, (
        f"cuda graphs: {len(graphs.sizes)} sizes, {graphs.sizes[0]} to {graphs.sizes[-1]} decodes, "
        f"{taken >> 20} MiB{stopped}",
    )


def captured(
    max_num_seqs: int, loaded: LoadedModel, pool: KvPool, plain: Forward, capture: Capture
) -> tuple[GraphForward, str]:
    """With as many sizes as could be captured, and why it stopped before the last, or nothing."""
    width = loaded.layout.num_blocks_for(loaded.info.max_model_len)
    graphs = GraphForward(plain, StaticDecodes(max_num_seqs, width, pool.spare_block, pool.device))
    family = cast(CapturableBackend, loaded.attention.build())

    def step_for(batch: PackedBatch) -> GraphStep:
        backend = family.for_graph(batch)
        return GraphStep(PlainForward(loaded.model, pool, backend), backend)

    try:
        graphs.capture(bucket_sizes(max_num_seqs), step_for, capture)
    except RuntimeError as error:
        return graphs, str(error).strip().partition("\n")[0]
    return graphs, ""
