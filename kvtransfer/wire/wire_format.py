"""The format in which KV is transferred, and the formats that `--kv-wire-dtype` names.

Blocks keep their ids: block 7 of the pool is block 7 of the wire memory. Transports serve and
fill `memory`, and digests cover it. With the native format it is the pool itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cluster.errors import ConfigError
from kvtransfer.memory import PoolMemory
from kvtransfer.wire.codecs import Codec, Fp8Codec, Int4Codec, Int8Codec
from kvtransfer.wire.quantised import BlockTable, QuantisedBlocks, QuantisedFormat

_SHORT_BYTES = 1 << 20  # digested in 0.1 ms
_NATIVE_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_CODECS: Mapping[str, Callable[[], Codec]] = {"int8": Int8Codec, "fp8": Fp8Codec, "int4": Int4Codec}


class WireFormat(Protocol):
    @property
    def memory(self) -> PoolMemory: ...

    @property
    def short_bytes(self) -> int:
        """Return up to how many bytes are encoded, decoded and digested on the event loop's thread; 0 for none.

        For few bytes that is faster than waking another thread and being woken by it.
        """
        ...

    @property
    def is_pool(self) -> bool:
        """Return whether `memory` is the pool, so that `encode` and `decode` have nothing to do."""
        ...

    def encode(self, block_ids: Sequence[int]) -> None:
        """Write the wire's bytes of sealed blocks, before their digests. Beyond `short_bytes` it runs on a helper
        thread."""
        ...

    def decode(self, block_ids: Sequence[int]) -> None:
        """Write the pool's blocks from verified bytes; they are visible to the device when it returns.

        Beyond `short_bytes` it runs on a helper thread."""
        ...


class NativeFormat:
    """The native format, which transfers the pool's bytes unchanged."""

    is_pool = True

    def __init__(self, pool: PoolMemory) -> None:
        self.memory = pool
        self.short_bytes = 0 if pool.raw.is_cuda else _SHORT_BYTES  # on a GPU the event loop would wait for the device

    def encode(self, block_ids: Sequence[int]) -> None:
        pass

    def decode(self, block_ids: Sequence[int]) -> None:
        pass


class WireDtype:
    def __init__(self, name: str) -> None:
        """`name` is a value of `--kv-wire-dtype`."""
        self.name = name
        self._codec = None if name == "native" else _CODECS[name]()

    def copy_bytes(self, table: BlockTable) -> int:
        """Return the bytes of the wire copy per block of the pool. Raises ConfigError for blocks that cannot be
        quantised."""
        if self._codec is None:
            return 0
        if table.dtype not in _NATIVE_DTYPES:
            raise ConfigError(f"--kv-wire-dtype must be native: the pool keeps KV as {table.dtype} already")
        return QuantisedBlocks(table, self._codec).slot_bytes

    def format(self, pool: PoolMemory, table: BlockTable) -> WireFormat:
        """Return the format for a pool. Raises ConfigError as `copy_bytes`."""
        return NativeFormat(pool) if self._codec is None else QuantisedFormat(pool, table, self._codec)
