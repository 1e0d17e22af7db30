"""Whether a loaded model is computed by the compiled kernels. Every reason against it is a NotCompiled, which a worker
prints at its start; the plain forward stays then."""

from pathlib import Path

import torch

from cluster.errors import ModelRefused
from cluster.settings.engine_settings import EngineSettings
from engine.cpu.compiled_forward import CompiledForward
from engine.cpu.library import load_kernels
from engine.cpu.packed_decoder import PackedDecoder
from engine.decoders.not_compiled import NotCompiled
from engine.decoders.recognise import Decoder, recognise
from engine.kv.pool import KvPool
from engine.model.load_check import difference
from engine.model.loaded import LoadedModel

_SHARE_OF_AVAILABLE_MEMORY = 0.8


def compiled_forward(settings: EngineSettings, loaded: LoadedModel, pool: KvPool) -> CompiledForward:
    """Return a compiled forward, checked against the plain one. It takes over the weights, so the model itself cannot
    be called any more. Raises NotCompiled and then leaves the model unchanged."""
    _require_asked_for(settings, loaded, pool)
    kernels = load_kernels()
    decoder = recognise(loaded.model)
    _require_memory(decoder)
    packed = PackedDecoder(kernels, decoder)

    def forward(pool: KvPool) -> CompiledForward:
        return CompiledForward(kernels, packed, pool, loaded.info.max_model_len)

    try:
        fault = difference(loaded, settings.max_prefill_tokens, forward)
    except ModelRefused as error:
        raise NotCompiled(f"compiled, {error.message}") from error
    if fault is not None:
        raise NotCompiled(f"compiled, {fault}")
    _release_weights(decoder)
    return forward(pool)


def _require_asked_for(settings: EngineSettings, loaded: LoadedModel, pool: KvPool) -> None:
    if settings.cpu_kernels == "off":
        raise NotCompiled("--cpu-kernels off")
    if loaded.device != "cpu":
        raise NotCompiled(f"the model is on {loaded.device}")
    if loaded.info.dtype != "bfloat16":
        raise NotCompiled(f"the model computes in {loaded.info.dtype}")
    if pool.tensor.dtype != torch.bfloat16:
        raise NotCompiled(f"the pool keeps KV in {pool.layout.dtype}")
    if settings.num_threads > 1:
        raise NotCompiled(f"the kernels run in one thread, not in {settings.num_threads}")
    if settings.cpu_kernels == "auto" and torch.cpu._is_amx_tile_supported():
        raise NotCompiled("this processor has AMX, which the kernels do not use; --cpu-kernels on takes them anyway")


def _require_memory(decoder: Decoder) -> None:
    """Require memory for the packed weights beside the plain ones, since both exist while they are compared. Raises
    NotCompiled."""
    needed = sum(linear.weight.nbytes for linear in decoder.linears())
    available = _available_bytes()
    if needed > _SHARE_OF_AVAILABLE_MEMORY * available:
        raise NotCompiled(f"packing takes {needed >> 20} MiB for a moment, and {available >> 20} MiB are there")


def _available_bytes() -> int:
    """Return the available memory, reclaimable page cache included: after a checkpoint was read, little memory is
    free."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].removesuffix("kB")) << 10


def _release_weights(decoder: Decoder) -> None:
    """Free all weights except the embedding's, which may also be the output head's."""
    embedded = next(decoder.embedding.parameters())
    for linear in decoder.linears():
        if linear.weight is not embedded:
            linear.weight.data = torch.empty(0, dtype=linear.weight.dtype)
