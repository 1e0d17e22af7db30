"""Measure the time to encode and decode KV for each wire dtype on one core, and the link speed below which it pays.

`python -m benchmarks.wire_dtypes` prints the tables of benchmarks/results/wire_dtypes.md. Rates count the pool's bytes,
also where fewer travel, and are those of the fastest of forty samples, taken in turns. Blocks are read in random order,
as in a pool that has served for a while.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.machine import about
from engine.kv.layout import BlockLayout, LayerShape, lay_out
from engine.kv.pool import KvPool
from kvtransfer.digests import digest_blocks
from kvtransfer.wire.wire_format import WireDtype

_LAYOUTS = {
    "SmolLM-135M": lay_out([LayerShape(3, 64, 64)] * 30, 16, "bfloat16"),
    "Llama-3-8B": lay_out([LayerShape(8, 128, 128)] * 32, 16, "bfloat16"),
}
_POOL_BYTES = 128 << 20
_NUM_SAMPLES = 40
WIRE_DTYPES = ("native", "int8", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class Rates:
    """GB of the pool per second."""

    model: str
    wire_dtype: str
    ratio: float  # of the wire's bytes to the pool's
    encode: float
    decode: float
    digest: float

    @property
    def exporter(self) -> float:
        """Return the rate of encoding and digesting, one after the other on one thread."""
        return 1 / (1 / self.encode + 1 / self.digest)

    @property
    def importer(self) -> float:
        return 1 / (1 / self.decode + 1 / self.digest)

    def pays_below(self, native: "Rates") -> tuple[float, float]:
        """Return two link speeds in Gbit/s below which the wire dtype is faster: for the last piece, which nothing
        overlaps, and for a long hand-off, whose link works while the exporter encodes the next piece."""
        more_s = 1 / self.exporter + 1 / self.importer - 2 / native.digest
        return 8 * (1 - self.ratio) / more_s, 8 * min(self.exporter, self.importer)


class Bench:
    """One model's pool with every wire dtype, and the fastest time of each operation so far."""

    def __init__(self, model: str, layout: BlockLayout) -> None:
        self._model = model
        self._pool = pool = KvPool(layout, _POOL_BYTES // layout.block_bytes)
        pool.tensor.normal_(generator=torch.Generator().manual_seed(1))
        block_ids = random.Random(1).sample(range(pool.num_blocks), pool.num_blocks)
        self._ratios: dict[str, float] = {}
        self._works: dict[tuple[str, str], Callable[[], object]] = {}
        for name in WIRE_DTYPES:
            wire = WireDtype(name).format(pool, layout)
            self._ratios[name] = wire.memory.block_bytes / pool.block_bytes
            self._works[name, "encode"] = partial(wire.encode, block_ids)
            self._works[name, "decode"] = partial(wire.decode, block_ids)
            self._works[name, "digest"] = partial(digest_blocks, wire.memory, block_ids)
        self._best_s = dict.fromkeys(self._works, float("inf"))

    def sample(self) -> None:
        """Take one sample of each operation."""
        for key, work in self._works.items():
            start_s = time.perf_counter()
            work()
            self._best_s[key] = min(self._best_s[key], time.perf_counter() - start_s)

    def rates(self, wire_dtype: str) -> Rates:
        num_bytes = self._pool.num_blocks * self._pool.block_bytes
        per_s = {work: num_bytes / 1e9 / self._best_s[wire_dtype, work] for work in ("encode", "decode", "digest")}
        return Rates(model=self._model, wire_dtype=wire_dtype, ratio=self._ratios[wire_dtype], **per_s)


def main() -> None:
    torch.set_num_threads(1)
    benches = [Bench(model, layout) for model, layout in _LAYOUTS.items()]
    for _ in range(_NUM_SAMPLES):
        for bench in benches:
            bench.sample()
    print(", ".join(about().values()), end="\n\n")
    print(
        "| model | wire | bytes | encode GB/s | decode GB/s | digest GB/s | alone, below Gbit/s | long, below Gbit/s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for bench in benches:
        native, *quantised = map(bench.rates, WIRE_DTYPES)
        print(f"| {native.model} | native | 1 | | | {native.digest:.1f} | | |")
        for rates in quantised:
            alone, long = rates.pays_below(native)
            figures = f"{rates.encode:.2f} | {rates.decode:.2f} | {rates.digest:.1f} | {alone:.1f} | {long:.1f}"
            print(f"| {rates.model} | {rates.wire_dtype} | {rates.ratio:.3f} | {figures} |")


if __name__ == "__main__":
    main()
