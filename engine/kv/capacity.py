"""Computes the number of blocks in the pool, and the longest sequence that fits both the model and the pool. Pure."""

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from cluster.errors import ConfigError
from cluster.settings.engine_settings import EngineSettings, parse_bytes
from engine.kv.layout import BlockLayout

_CPU_POOL = "256MiB"
MARGIN_BYTES = 1 << 30  # of a GPU: for CUDA graphs and kernels' workspaces, which the profiling run does not see
CONTEXT_BYTES = (
    1 << 30
)  # of a GPU: a process's CUDA context and the kernels of its libraries, which no interface reports


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory that the profiling run measured, in bytes. The pool gets the rest of the allowed share."""

    total: int
    weights: int
    largest_step: int  # its memory beyond the weights, while it runs
    free: int  # left by the weights, this process's context and other processes at this time
    num_sharing: int = 1  # workers on this GPU, which get equal parts of the allowed share


class WireSpace(Protocol):
    """The memory that the wire format of KV needs: its share of --kv-cache-memory, in addition to each block of the
    pool."""

    @property
    def name(self) -> str: ...

    def copy_bytes(self, layout: BlockLayout) -> int:
        """Return the bytes of one block's copy in the wire format. Raises ConfigError for blocks that cannot be sent in
        this format."""
        ...


class NativeSpace:
    """No extra memory is needed: KV is sent from the pool itself."""

    name = "native"

    def copy_bytes(self, layout: BlockLayout) -> int:
        return 0


NATIVE = NativeSpace()


def with_pool_memory(settings: EngineSettings, device: str) -> EngineSettings:
    """Return the settings with `--kv-cache-memory auto` resolved on a CPU; on a GPU it stays auto until the profiling
    run."""
    if settings.kv_cache_memory == "auto" and device == "cpu":
        return dataclasses.replace(settings, kv_cache_memory=_CPU_POOL)
    return settings


def is_measured(settings: EngineSettings) -> bool:
    """Whether a profiling run must determine the pool's size."""
    return not settings.num_blocks and settings.kv_cache_memory == "auto"


def measured(
    settings: EngineSettings, memory: GpuMemory, layout: BlockLayout, wire: WireSpace = NATIVE
) -> EngineSettings:
    """Return the settings with the pool's memory. Raises ConfigError with the numbers if it cannot hold one sequence of
    `--max-model-len`, or one block if that is not set."""
    share = settings.gpu_memory_utilization
    running = memory.largest_step + MARGIN_BYTES
    allowed = int(share * memory.total) // memory.num_sharing - memory.weights - CONTEXT_BYTES - running
    left = min(allowed, memory.free - running)
    longest = settings.max_model_len or layout.block_size
    needed = layout.num_blocks_for(longest) * _block_bytes(layout, wire)
    if left < needed:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} of {_gib(memory.total)} for {memory.num_sharing} worker(s), "
            f"{_gib(memory.free)} of it free, leaves {_gib(max(left, 0))} for KV, and a sequence of {longest} tokens "
            f"takes {_gib(needed)}: the weights take {_gib(memory.weights)}, the largest step "
            f"{_gib(memory.largest_step)}, and {_gib(CONTEXT_BYTES + MARGIN_BYTES)} are kept for the CUDA context and "
            "graphs; give a larger share, a smaller --max-model-len, --max-prefill-tokens or --max-num-seqs, or "
            "--kv-cache-dtype int8"
        )
    return dataclasses.replace(settings, kv_cache_memory=str(left))


def num_blocks(settings: EngineSettings, layout: BlockLayout, wire: WireSpace = NATIVE) -> int:
    """Return `--num-blocks`, or the number that the memory holds. Raises ConfigError if that is zero."""
    if settings.num_blocks:
        return settings.num_blocks
    block_bytes = _block_bytes(layout, wire)
    fitting = parse_bytes(settings.kv_cache_memory) // block_bytes
    if fitting < 1:
        raise ConfigError(
            f"--kv-cache-memory {settings.kv_cache_memory} holds no block: one of {layout.block_size} tokens takes "
            f"{block_bytes} bytes"
        )
    return fitting


def check_length(wanted: int, limit: int | None) -> None:
    """Check the lengths before anything is loaded. `limit` is the model's own maximum, if it has one. Raises
    ConfigError."""
    if wanted < 0:
        raise ConfigError(f"--max-model-len must not be negative, not {wanted}")
    if limit is not None and wanted > limit:
        raise ConfigError(f"--max-model-len {wanted} is more than the model's {limit} positions: give at most {limit}")
    if not wanted and limit is None:
        raise ConfigError("the model's configuration has no maximum length: give --max-model-len")


def max_model_len(settings: EngineSettings, layout: BlockLayout, limit: int | None, wire: WireSpace = NATIVE) -> int:
    """Return the longest sequence in tokens.

    A configured length must fit the pool (ConfigError with both numbers); the model's own length is reduced to what the
    pool holds. Before the pool is measured, return the length that it should hold.
    """
    check_length(settings.max_model_len, limit)
    longest = settings.max_model_len
    if is_measured(settings):
        return longest or limit or 0
    pool_tokens = num_blocks(settings, layout, wire) * layout.block_size
    if longest > pool_tokens:
        raise ConfigError(
            f"--max-model-len {longest} does not fit the KV pool of {pool_tokens} tokens: give --max-model-len "
            f"{pool_tokens} or less, or --kv-cache-memory {layout.num_blocks_for(longest) * _block_bytes(layout, wire)}"
        )
    return longest or min(limit or pool_tokens, pool_tokens)


def _block_bytes(layout: BlockLayout, wire: WireSpace) -> int:
    return layout.block_bytes + wire.copy_bytes(layout)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
