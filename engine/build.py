"""Builds the parts of an engine from its settings. Prints nothing: `Engine.report` holds the lines that a worker prints
at its start.

The memory that a worker needs beside its pool on a GPU is measured: the largest step that the settings allow runs on a
small scratch pool (`measure`).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from cluster.errors import ConfigError
from cluster.messages import LayoutFingerprint, Sampling
from cluster.settings.worker_settings import GPU_MEMORY_UTILIZATION, EngineSettings
from engine.attention.registry import AttentionBackend
from engine.cpu.compiled_draw import compiled_draw
from engine.cpu.compiled_forward import compiled_forward
from engine.cuda.fused_forward import FusedForward, fused_decoder
from engine.cuda.graph_forward import CudaCapture, captured
from engine.decoders.layer_parts import NotCompiled
from engine.deterministic import make_deterministic
from engine.kv import capacity
from engine.kv.capacity import GpuMemory
from engine.kv.layout import BlockLayout
from engine.kv.pool import KvPool, allocate_pool
from engine.model.load_check import check_equal
from engine.model.loaded import LoadedModel, ModelInfo, WeightFiles, fingerprint, pack_weights
from engine.model.loading import load_unchecked, num_sharing
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.forward import Forward, PlainForward
from engine.steps.runner import LaunchingRunner, ModelRunner

_ONE_TOKEN = StepPlan((Chunk(sequence_id=0, token_ids=(0,), start=0, block_ids=(0,)),))  # of an unused pool
_LARGEST_SAMPLING = Sampling(temperature=1.0, top_p=0.9, num_logprobs=20)  # the sampling that needs the most memory


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    model_info: ModelInfo
    pool: KvPool
    runner: ModelRunner
    fingerprint: LayoutFingerprint
    report: tuple[str, ...]  # lines for the worker to print


def build_engine(
    settings: EngineSettings,
    wire: capacity.WireSpace = capacity.NATIVE,
    ended: Callable[[str], None] = lambda phase: None,
) -> Engine:
    """Load and check the model, and allocate the pool. `ended` receives the name of each phase at its end. Raises
    ConfigError and ModelRefused."""
    # Workers share a host's cores: threads that compete for a core stall each other.
    torch.set_num_threads(settings.num_threads or 1)
    files = WeightFiles.of(settings.model) if settings.load_format == "auto" else None
    loaded = load_unchecked(settings, wire, ended)
    settings = capacity.with_pool_memory(settings, loaded.device)
    on_gpu = loaded.device.startswith("cuda")
    if on_gpu:
        check_equal(loaded, settings.max_prefill_tokens)
        ended("load_check")
    on_device = forwards(settings, loaded) if on_gpu else None
    if capacity.is_measured(settings):
        settings, loaded = _measured(settings, loaded, wire)
    num_blocks = capacity.num_blocks(settings, loaded.layout, wire)
    pool = allocate_pool(
        loaded.layout, num_blocks, loaded.device, num_spare=1 if on_gpu else 0
    )  # for graphs' idle rows
    ended("pool")
    layout_fingerprint = fingerprint(loaded, wire.name, files)  # may read the weights, so it comes before packing
    ended("fingerprint")
    runner = (LaunchingRunner if on_gpu else ModelRunner)(loaded.forward(pool), pool)
    if on_device is not None:
        speed = _speed_up_gpu(settings, loaded, runner, pool, on_device)
    else:
        speed = (*_speed_up_drawing(settings, runner), *_speed_up(settings, loaded, runner, pool, ended))
    if settings.deterministic == "on":
        made = make_deterministic(loaded, runner, pool)
        layout_fingerprint = made.marked(layout_fingerprint)
        speed = (*speed, made.report)
    ended("kernels")
    return Engine(
        model_info=loaded.info,
        pool=pool,
        runner=runner,
        fingerprint=layout_fingerprint,
        report=(*_report(settings, loaded, num_blocks), *speed),
    )


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
    sizes = f"{len(graphs.sizes)} sizes, {graphs.sizes[0]} to {graphs.sizes[-1]} decodes, {taken >> 20} MiB{stopped}"
    return graphs, (line, f"cuda graphs: {sizes}")


def _measured(
    settings: EngineSettings, loaded: LoadedModel, wire: capacity.WireSpace
) -> tuple[EngineSettings, LoadedModel]:
    """Return the settings with the pool's memory and the longest sequence that fits it. Raises ConfigError."""
    settings = capacity.measured(settings, measure(loaded, settings), loaded.layout, wire)
    longest = capacity.max_model_len(settings, loaded.layout, loaded.info.max_model_len, wire)
    return settings, dataclasses.replace(loaded, info=dataclasses.replace(loaded.info, max_model_len=longest))


def _speed_up_gpu(
    settings: EngineSettings, loaded: LoadedModel, runner: ModelRunner, pool: KvPool, on_device: Forwards
) -> tuple[str, ...]:
    """Set up the fused forward, CUDA graphs for decodes and asynchronous steps. Returns lines for the report."""
    runner.forward, lines = gpu_forward(settings, loaded, pool, on_device)
    runner.feeds, line = _async_scheduling(settings, loaded)
    return line, *lines


def _speed_up(
    settings: EngineSettings, loaded: LoadedModel, runner: ModelRunner, pool: KvPool, ended: Callable[[str], None]
) -> tuple[str, ...]:
    """Use the compiled forward if this model has one, otherwise the plain forward on packed weights; check the one that
    is used. Returns lines for the report that say which, and why. Raises ModelRefused."""
    try:
        runner.forward = compiled = compiled_forward(settings, loaded, pool)
    except NotCompiled as why:
        check_equal(loaded, settings.max_prefill_tokens)
        ended("load_check")
        weights = "weights: plain (--pack-weights off)"
        if settings.pack_weights == "auto":
            weights = pack_weights(loaded.model, lambda: runner.logits(_ONE_TOKEN))
        return f"forward: plain ({why})", weights
    kind = loaded.model.config.model_type
    return (f"forward: compiled for {compiled.instructions} ({kind}, {len(loaded.layout.layers)} layers)",)


def _async_scheduling(settings: EngineSettings, loaded: LoadedModel) -> tuple[bool, str]:
    """Return whether a step may be launched while another one runs, and a line for the report."""
    if settings.async_scheduling == "off":
        return False, "async scheduling: off (--async-scheduling off)"
    if settings.speculation != "off":
        return False, "async scheduling: off, as draft tokens need the drawn tokens of the step before (--speculation)"
    if loaded.attention.keeps_plans:
        return False, f"async scheduling: off, as {loaded.attention.name} plans one step at a time"
    return True, "async scheduling: on"


def _speed_up_drawing(settings: EngineSettings, runner: ModelRunner) -> tuple[str, ...]:
    """Draw tokens with the compiled library, which yields the same tokens. Returns lines for the report."""
    if settings.cpu_kernels == "off":
        return ("drawing: torch (--cpu-kernels off)",)
    try:
        runner.compiled_draw = compiled_draw()
    except NotCompiled as why:
        return (f"drawing: torch ({why})",)
    return ("drawing: compiled",)


def _report(settings: EngineSettings, loaded: LoadedModel, num_blocks: int) -> tuple[str, ...]:
    layout, longest = loaded.layout, loaded.info.max_model_len
    num_longest = num_blocks // layout.num_blocks_for(longest)
    lines = [
        f"KV: {num_blocks * layout.block_size} tokens, {num_longest} sequences of max length; {layout.dtype}, "
        f"{layout.kv_bytes_per_token} bytes a token"
    ]
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if not settings.max_model_len and limit is not None and longest < limit:
        lines.append(f"max length: {longest} tokens; the model's {limit} do not fit the KV pool")
    if settings.local_world_size > 1 and loaded.device != "cpu":
        lines.append(f"{loaded.device} for worker {settings.local_rank} of {settings.local_world_size} on this host")
    if loaded.device == "cpu" and settings.gpu_memory_utilization != GPU_MEMORY_UTILIZATION:
        lines.append(f"--gpu-memory-utilization {settings.gpu_memory_utilization:g} changes nothing on a CPU")
    return (*lines, f"attention: {loaded.attention.name} on {loaded.device}, {loaded.info.dtype}")


def measure(loaded: LoadedModel, settings: EngineSettings) -> GpuMemory:
    """Run the step on the model's GPU and return the memory it took. Raises ConfigError if even that step does not
    fit."""
    device = torch.device(loaded.device)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    pool = KvPool(loaded.layout, settings.max_num_seqs, device)
    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)  # loading and checking took more for a while
    try:
        ModelRunner(loaded.forward(pool), pool).run(largest_step(settings, loaded.layout, loaded.info.max_model_len))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of --max-prefill-tokens {settings.max_prefill_tokens} and --max-num-seqs {settings.max_num_seqs} "
            f"does not fit the GPU beside {weights} bytes of weights: give less of both, or a shorter --max-model-len"
        ) from error
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_reserved(device) - reserved  # with the fragments of the allocator
    pool.close()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    sharing = num_sharing(settings.device, settings.local_rank, settings.local_world_size, torch.cuda.device_count())
    return GpuMemory(total=total, weights=weights, largest_step=step_bytes, free=free, num_sharing=sharing)


def largest_step(settings: EngineSettings, layout: BlockLayout, longest: int) -> StepPlan:
    """Return the largest step: prompt chunks up to the step's budget and as many decodes as it allows, all ending at
    the maximum length and drawing a token. Each uses one block of the pool, repeated in its table."""
    lengths = [min(longest, settings.max_prefill_tokens)]
    while len(lengths) < settings.max_num_seqs:
        left = settings.max_prefill_tokens - sum(lengths)
        lengths.append(min(longest, left) if left > 0 else 1)
    num_blocks = layout.num_blocks_for(longest)
    return StepPlan(
        tuple(
            Chunk(
                sequence_id=number,
                token_ids=(0,) * length,
                start=longest - length,
                block_ids=(number,) * num_blocks,
                samples=(Sample(seed=number, position=longest, sampling=_LARGEST_SAMPLING),),
            )
            for number, length in enumerate(lengths)
        )
    )
