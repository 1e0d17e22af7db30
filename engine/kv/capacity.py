"""Computes the number of blocks in the pool, and the longest sequence that fits both the model and the pool. Pure.

`estimate` computes the memory that KV needs from a model's configuration alone.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cluster.errors import ConfigError
from cluster.settings.worker_settings import DTYPES, EngineSettings, parse_bytes
from engine.kv.layout import ITEM_BYTES, SCALE_BYTES, SCALED, BlockLayout, LayerShape, lay_out

_CPU_POOL = "256MiB"
MARGIN_BYTES = 1 << 30  # of a GPU: for CUDA graphs and kernels' workspaces, which the profiling run does not see
CONTEXT_BYTES = (
    1 << 30
)  # of a GPU: a process's CUDA context and the kernels of its libraries, which no interface reports
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_LENGTH = ("max_position_embeddings", "n_positions", "max_sequence_length")


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
    """Return whether a profiling run must determine the pool's size."""
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

    A configured length must fit the pool (ConfigError with both numbers); the model's own length is reduced to the
    size of the pool. Before the pool is measured, return the length that it should hold.
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


@dataclass(frozen=True, slots=True)
class KvEstimate:
    """The memory that the K and V of one token take over all layers. Every token keeps its KV, with or without sliding
    windows."""

    num_layers: int
    layer: LayerShape
    dtype: str
    max_tokens: int | None  # the model's longest sequence, if its configuration names one

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token's K and V, scales included, without the padding of an 8-bit block."""
        scale_bytes = 2 * self.layer.num_kv_heads * SCALE_BYTES if self.dtype in SCALED else 0
        return self.num_layers * (self.layer.elems_per_token * ITEM_BYTES[self.dtype] + scale_bytes)

    def block_bytes(self, block_size: int) -> int:
        return lay_out([self.layer] * self.num_layers, block_size, self.dtype).block_bytes

    def request_bytes(self, num_tokens: int, block_size: int = 1) -> int:
        """Return the KV bytes of a sequence of `num_tokens`, in whole blocks."""
        return -(-num_tokens // block_size) * self.block_bytes(block_size)

    def num_sequences(self, memory_bytes: int, num_tokens: int, block_size: int = 1) -> int:
        """Return how many sequences of `num_tokens` fit at once."""
        return memory_bytes // self.block_bytes(block_size) // -(-num_tokens // block_size)


def estimate(config: Mapping[str, object], dtype: str = "auto", kv_cache_dtype: str = "auto") -> KvEstimate:
    """Return the estimate. `dtype` auto means the checkpoint's, and `kv_cache_dtype` auto means `dtype`. Raises
    ConfigError with the keys that the configuration lacks."""
    nested = config.get("text_config")
    text: Mapping[str, object] = nested if isinstance(nested, Mapping) else config
    num_heads = _first(text, _HEADS)
    computed = _dtype(config, text, dtype)
    return KvEstimate(
        num_layers=_first(text, _LAYERS),
        layer=_layer(text, num_heads),
        dtype=computed if kv_cache_dtype == "auto" else kv_cache_dtype,
        max_tokens=next((length for key in _LENGTH if isinstance(length := text.get(key), int)), None),
    )


def _layer(text: Mapping[str, object], num_heads: int) -> LayerShape:
    nope, rope, value = (text.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if isinstance(nope, int) and isinstance(rope, int) and isinstance(value, int):
        return LayerShape(num_heads, nope + rope, value)  # latent attention: transformers passes K and V uncompressed
    head_dim = text.get("head_dim") or _first(text, _WIDTH) // num_heads
    assert isinstance(head_dim, int)
    num_kv_heads = 1 if text.get("multi_query") else _first(text, (*_KV_HEADS, *_HEADS))
    return LayerShape(num_kv_heads, head_dim, head_dim)


def _dtype(config: Mapping[str, object], text: Mapping[str, object], wanted: str) -> str:
    declared = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    dtype = str(declared or "float32") if wanted == "auto" else wanted
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype}")
    return dtype


def _first(text: Mapping[str, object], keys: tuple[str, ...]) -> int:
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError(f"the model's configuration has none of {', '.join(keys)}")
