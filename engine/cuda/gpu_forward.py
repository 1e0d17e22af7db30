"""Builds the forward of an engine on a GPU: fused if the kernels support the model, with CUDA graphs for decodes, and
described in lines for the worker's report."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from cluster.settings.engine_settings import EngineSettings
from engine.attention.registry import AttentionBackend
from engine.batch import PackedBatch
from engine.cuda.fused_forward import FusedForward, fused_decoder
from engine.cuda.graph_forward import CapturableBackend, Capture, GraphForward, GraphStep, StaticDecodes, bucket_sizes
from engine.decoders.traced_calls import NotCompiled
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.steps.forward import Forward, PlainForward

NewForward = Callable[[AttentionBackend], Forward]


@dataclass(frozen=True, slots=True, eq=False)
class Forwards:
    """Makes forwards of one model over any pool and with any back end."""

    over: Callable[[KvPool, AttentionBackend], Forward]
    report: str


def forwards(settings: EngineSettings, loaded: LoadedModel) -> Forwards:
    """Return the model's forwards, fused if the kernels support the model. This moves weights and runs the model's own
    forward once more, which needs memory, so it is called before the pool is allocated."""
    try:
        if settings.deterministic == "on":
            raise NotCompiled("--deterministic uses fixed shapes")
        fused, ops = fused_decoder(loaded, settings.max_prefill_tokens)
    except NotCompiled as why:
        return Forwards(partial(PlainForward, loaded.model), f"forward: plain ({why})")
    return Forwards(
        lambda pool, backend: FusedForward(fused, pool, backend, ops), f"forward: fused, {len(fused.layers)} layers"
    )


def gpu_forward(
    settings: EngineSettings, loaded: LoadedModel, pool: KvPool, made: Forwards
) -> tuple[Forward, tuple[str, ...]]:
    """Return the forward to serve with, and lines for the report. The pool needs one spare block."""
    new_forward, line = partial(made.over, pool), made.report
    plain = new_forward(loaded.attention.build())
    if settings.cuda_graphs == "off":
        return plain, (line, "cuda graphs: off (--cuda-graphs off)")
    if settings.deterministic == "on":
        return plain, (line, "cuda graphs: off, as --deterministic uses fixed shapes")
    if not loaded.attention.captures:
        return plain, (line, f"cuda graphs: off, as attention by {loaded.attention.name} cannot be captured")
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved(pool.device)
    capture = CudaCapture(pool.device)
    graphs, why = captured(settings.max_num_seqs, loaded, pool, new_forward, capture)
    taken = torch.cuda.memory_reserved(pool.device) - taken  # graphs keep the memory that their steps use temporarily
    if not graphs.sizes:
        return plain, (line, f"cuda graphs: off, as the model cannot be captured ({why})")
    stopped = f"; smaller ones could not be captured ({why})" if why else ""
    said = f"{len(graphs.sizes)} sizes, {graphs.sizes[0]} to {graphs.sizes[-1]} decodes, {taken >> 20} MiB{stopped}"
    return graphs, (line, f"cuda graphs: {said}")


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
    except Exception as error:  # noqa: BLE001 - whatever a kernel or a library raises: steps are computed without
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
