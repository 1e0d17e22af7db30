"""Find the length from which swapping a preempted sequence's KV out and in is cheaper than computing it again.

    python -m benchmarks.swap_crossover [--write]

For the demo model and the 135M shape, on one core, over sequences of growing length, with the parts of a decode worker,
in turns. A swap is timed into slots whose pages were never touched, as the first preemptions find them, and into
touched ones. With --write every sample goes to benchmarks/results/swap.json and the table beside it.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.engine.shapes import MODELS
from benchmarks.machine import about
from cluster.request_size import blocks_for
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.kv.host_blocks import HostBlocks, SwappingRunner
from engine.scheduling.batching.block_tables import PreemptionCost
from engine.scheduling.step import BlockSwap, Chunk, StepPlan

_DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
_RESULTS = Path(__file__).parent / "results"
_LENGTHS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
_BLOCK_SIZE, _CHUNK_TOKENS, _SAMPLES = 16, 512, 7
_FRESH_BYTES = 64 << 20  # so much comes from the system, not from what was used before; only what is written is taken


@dataclass(frozen=True, slots=True)
class Point:
    """All samples of one length, in seconds."""

    num_tokens: int
    recompute_s: tuple[float, ...]
    swap_s: tuple[float, ...]  # out and in
    first_swap_s: tuple[float, ...]  # into pages that were never touched

    def is_swap_cheaper(self) -> bool:
        return statistics.median(self.first_swap_s) < statistics.median(self.recompute_s)


@dataclass(frozen=True, slots=True)
class Measured:
    model: str
    block_bytes: int
    points: tuple[Point, ...]
    scheduler_tokens: int  # from so many on the decode worker's own model of these costs swaps

    @property
    def crossover_tokens(self) -> int | None:
        """Return the shortest length from which a swap, even a first one, is cheaper at every measured length."""
        cheaper = [point.is_swap_cheaper() for point in self.points]
        first = next((place for place in range(len(cheaper)) if all(cheaper[place:])), None)
        return None if first is None else self.points[first].num_tokens


def measure(name: str, folder: Path) -> Measured:
    with _engine(folder) as engine:
        points = tuple(_point(engine, num_tokens) for num_tokens in (_LENGTHS[-1], *_LENGTHS))[1:]  # the first is warm
        longest = points[-1]
        token_s = statistics.median(longest.recompute_s) / longest.num_tokens
        cost = PreemptionCost(HostBlocks(engine.pool, 64).copy_s_per_block(), lambda num_tokens: token_s * num_tokens)
        scheduler_tokens = next(n for n in range(1, 1 << 20) if cost.is_swap_cheaper(blocks_for(n, _BLOCK_SIZE), n))
        return Measured(name, engine.pool.block_bytes, points, scheduler_tokens)


@contextmanager
def _engine(folder: Path) -> Iterator[Engine]:
    has_weights = (folder / "model.safetensors").exists()
    settings = EngineSettings(
        model=str(folder),
        load_format="auto" if has_weights else "dummy",
        device="cpu",
        block_size=_BLOCK_SIZE,
        num_blocks=2 * blocks_for(_LENGTHS[-1], _BLOCK_SIZE),
        max_model_len=1024,
        max_prefill_tokens=_CHUNK_TOKENS,
    )
    engine = build_engine(settings)
    try:
        yield engine
    finally:
        engine.pool.close()


def _point(engine: Engine, num_tokens: int) -> Point:
    num_blocks = blocks_for(num_tokens, _BLOCK_SIZE)
    touched = HostBlocks(engine.pool, num_blocks)
    _swap_s(engine, touched, num_blocks)
    recompute_s, swap_s, first_swap_s = [], [], []
    fresh: list[HostBlocks] = []  # kept: pages that are given back would come again, touched
    for _ in range(_SAMPLES):
        recompute_s.append(_recompute_s(engine, num_tokens))
        swap_s.append(_swap_s(engine, touched, num_blocks))
        fresh.append(HostBlocks(engine.pool, max(num_blocks, _FRESH_BYTES // engine.pool.block_bytes)))
        first_swap_s.append(_swap_s(engine, fresh[-1], num_blocks))
    return Point(num_tokens, tuple(recompute_s), tuple(swap_s), tuple(first_swap_s))


def _recompute_s(engine: Engine, num_tokens: int) -> float:
    began_s = time.perf_counter()
    for start in range(0, num_tokens, _CHUNK_TOKENS):
        token_ids = tuple(range(10 + start, 10 + min(start + _CHUNK_TOKENS, num_tokens)))
        block_ids = tuple(range(blocks_for(start + len(token_ids), _BLOCK_SIZE)))
        engine.runner.run(StepPlan((Chunk(0, token_ids, start, block_ids),)))
    return time.perf_counter() - began_s


def _swap_s(engine: Engine, host_blocks: HostBlocks, num_blocks: int) -> float:
    """Time copying blocks out and into others, as two steps without other work."""
    runner = SwappingRunner(engine.runner, host_blocks)
    out = tuple(BlockSwap(i, i) for i in range(num_blocks))
    back = tuple(BlockSwap(num_blocks + i, i) for i in range(num_blocks))
    return runner.run(StepPlan((), swaps_out=out)).swap_s + runner.run(StepPlan((), swaps_in=back)).swap_s


def _table(results: Sequence[Measured], machine: dict[str, str]) -> str:
    lines = [
        "# Swap against recompute",
        "",
        f"`python -m benchmarks.swap_crossover --write`, {machine['date']}, commit {machine['commit']},",
        f"{machine['processor']}, torch {machine['torch']}, one thread, bfloat16, blocks of {_BLOCK_SIZE} tokens.",
        f"Medians of {_SAMPLES}, in turns. *First swap*: into host pages that were never touched.",
    ]
    for result in results:
        lines += ["", f"## {result.model}, {result.block_bytes / 1024:.0f} KiB a block", ""]
        lines += ["| tokens | recompute | swap | first swap |", "|---|---|---|---|"]
        for point in result.points:
            medians = map(statistics.median, (point.recompute_s, point.swap_s, point.first_swap_s))
            lines.append(f"| {point.num_tokens} | " + " | ".join(f"{1e3 * s:.3f} ms" for s in medians) + " |")
        crossover = result.crossover_tokens
        what = "at no length" if crossover is None else f"from **{crossover} token{'s'[: crossover > 1]}** on"
        lines += ["", f"Swap beats recompute {what}."]
        lines += [f"By its rates of this run the decode worker swaps what has {result.scheduler_tokens} or more."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    arguments = parser.parse_args()
    machine = about()
    with tempfile.TemporaryDirectory() as folder:
        shape = MODELS[0].save(Path(folder) / MODELS[0].name)
        results = [measure("Demo model", _DEMO), measure(f"{MODELS[0].name} shape, random weights", shape)]
    table = _table(results, machine)
    print(table)
    if arguments.write:
        kept = {"machine": machine, "results": [asdict(result) for result in results]}
        (_RESULTS / "swap.json").write_text(json.dumps(kept, indent=1) + "\n")
        (_RESULTS / "swap.md").write_text(table)


if __name__ == "__main__":
    main()
