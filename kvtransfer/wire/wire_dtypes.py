"""The wire dtypes by name: what a worker's `--kv-wire-dtype` stands for."""

from collections.abc import Callable, Mapping

from cluster.errors import ConfigError
from kvtransfer.memory import PoolMemory
from kvtransfer.wire.codecs import Codec, Fp8Codec, Int4Codec, Int8Codec
from kvtransfer.wire.kv_groups import BlockTable
from kvtransfer.wire.quantised import QuantisedBlocks, QuantisedFormat
from kvtransfer.wire.wire_format import NativeFormat, WireFormat

_NATIVE_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_CODECS: Mapping[str, Callable[[], Codec]] = {"int8": Int8Codec, "fp8": Fp8Codec, "int4": Int4Codec}


class WireDtype:
    def __init__(self, name: str) -> None:
        """One of those that `--kv-wire-dtype` takes."""
        self.name = name
        self._codec = None if name == "native" else _CODECS[name]()

    def copy_bytes(self, table: BlockTable) -> int:
        """What the wire copy takes for each block of the pool. Raises ConfigError for blocks that cannot travel so."""
        if self._codec is None:
            return 0
        if table.dtype not in _NATIVE_DTYPES:
            raise ConfigError(f"--kv-wire-dtype must be native: the pool keeps KV as {table.dtype} already")
        return QuantisedBlocks(table, self._codec).slot_bytes

    def format(self, pool: PoolMemory, table: BlockTable) -> WireFormat:
        """Raises ConfigError as `copy_bytes`."""
        return NativeFormat(pool) if self._codec is None else QuantisedFormat(pool, table, self._codec)
