"""How many blocks the pool gets, and how long a sequence may be so that it fits the model and the pool. Pure."""

from typing import Protocol

from cluster.engine_settings import EngineSettings, parse_bytes
from cluster.errors import ConfigError
from engine.layout import BlockLayout


class WireSpace(Protocol):
    """What KV travels as, and what that takes of --kv-cache-memory beside each block of the pool."""

    @property
    def name(self) -> str: ...

    def copy_bytes(self, layout: BlockLayout) -> int:
        """Raises ConfigError for blocks that cannot travel so."""
        ...


class NativeSpace:
    """KV travels from the pool itself."""

    name = "native"

    def copy_bytes(self, layout: BlockLayout) -> int:
        return 0


NATIVE = NativeSpace()


def num_blocks(settings: EngineSettings, layout: BlockLayout, wire: WireSpace = NATIVE) -> int:
    """As given, or as many as the memory holds. Raises ConfigError when that is none."""
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
    """What can be said before anything is loaded. `limit`: the model's own, if it names one. Raises ConfigError."""
    if wanted < 0:
        raise ConfigError(f"--max-model-len must not be negative, not {wanted}")
    if limit is not None and wanted > limit:
        raise ConfigError(f"--max-model-len {wanted} is more than the model's {limit} positions: give at most {limit}")
    if not wanted and limit is None:
        raise ConfigError("the model's configuration names no longest length: give --max-model-len")


def max_model_len(settings: EngineSettings, layout: BlockLayout, limit: int | None, wire: WireSpace = NATIVE) -> int:
    """A given length must fit the pool (ConfigError with both numbers); the model's own is cut to it."""
    check_length(settings.max_model_len, limit)
    pool_tokens = num_blocks(settings, layout, wire) * layout.block_size
    longest = settings.max_model_len
    if longest > pool_tokens:
        raise ConfigError(
            f"--max-model-len {longest} does not fit the KV pool of {pool_tokens} tokens: give --max-model-len "
            f"{pool_tokens} or less, or --kv-cache-memory {layout.num_blocks_for(longest) * _block_bytes(layout, wire)}"
        )
    return longest or min(limit or pool_tokens, pool_tokens)


def _block_bytes(layout: BlockLayout, wire: WireSpace) -> int:
    return layout.block_bytes + wire.copy_bytes(layout)
