"""`make bench-kv`: measure how fast each transport moves KV, beside this machine's limits measured in the same run."""

import argparse
import asyncio
import importlib.metadata
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.kv.digests import measure_digests, table
from benchmarks.kv.importer import COLUMNS, moves_over
from benchmarks.kv.parties import EXPORTER, HOST, means_of, module_of
from benchmarks.kv.shapes import (
    GPU_POOL_BLOCKS,
    GPU_SHAPES,
    POOL_BLOCKS,
    QUICK_POOL_BLOCKS,
    QUICK_SHAPES,
    SHAPES,
    STAGED_SHAPES,
    Shape,
    target_pool,
)
from benchmarks.kv.table import Cell, as_json, as_markdown
from cli.verbs.access.certs import make_authority, make_certificate

_RESULTS = Path(__file__).parents[1] / "results"
_ROWS = {"cpu": ("shm", "tcp", "tcp+tls", "nixl"), "cuda": ("cuda_ipc", "nccl", "nixl", "tcp")}
_PACKAGES = ("torch", "numpy", "grpcio", "nixl-cu13", "cupy-cuda13x", "nvidia-nccl-cu13", "cuda-bindings")
_UNREACHED = {"nccl": "two processes on one GPU need NCCL 2.30"}
_LEAST_SAMPLES = 3
_LARGE = 64 << 20
_GPU_CELL_S = 2.0  # all of it is to fit the minutes of a check


async def measure(
    rows: Sequence[str],
    shapes: Sequence[Shape],
    num_pool_blocks: int,
    device: str = "cpu",
    longest_s: float = math.inf,
    keep: Callable[[Sequence[Cell]], None] = lambda cells: None,
) -> list[Cell]:
    """Measure with one pair of processes per row. A cell that has taken `longest_s` takes only the least number of
    samples. `keep` receives the results so far after each cell."""
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        if "tcp+tls" in rows:
            authority = make_authority(Path(folder), days=2)
            make_certificate(Path(folder), authority, "member", [HOST], days=2)
        for row in rows:
            certificates = folder if row == "tcp+tls" else ""
            async with moves_over(row.split("+")[0], num_pool_blocks, certificates, device) as (moves, limits):
                for shape in shapes:
                    if (device, row) == ("cuda", "tcp") and shape not in STAGED_SHAPES:
                        continue
                    print(f"{row}, {shape.name}", file=sys.stderr, flush=True)
                    samples = await _in_turns(moves.timed(shape, limits), shape.num_samples, longest_s)
                    cells.append(_cell(row, shape, samples))
                    keep(cells)
    return cells


async def _in_turns(
    timed: Mapping[str, Callable[[], Awaitable[float]]], num_samples: int, longest_s: float
) -> dict[str, list[float]]:
    """Take samples in turns whose order changes; the first turn warms up."""
    dice = random.Random(3)
    samples: dict[str, list[float]] = {name: [] for name in timed}
    ends_at_s = time.monotonic() + longest_s
    for turn in range(num_samples + 1):
        if turn > _LEAST_SAMPLES and time.monotonic() > ends_at_s:
            break
        for name in dice.sample(sorted(timed), len(timed)):
            seconds = await timed[name]()
            if turn:
                samples[name].append(seconds)
    return samples


def _cell(row: str, shape: Shape, samples: dict[str, list[float]]) -> Cell:
    ours = {name: samples.pop(name) for name in COLUMNS}
    return Cell(row, shape.name, shape.num_bytes, samples, *(ours[name] for name in COLUMNS))


async def _offered(rows: Sequence[str], device: str) -> list[str]:
    """Return the transports that this machine has; print the reason for each missing one."""
    offered = []
    for row in rows:
        reason = await _why_not(row.partition("+")[0], device)
        if reason:
            print(f"{row} is left out: {reason}", file=sys.stderr)
        else:
            offered.append(row)
    return offered


async def _why_not(transport: str, device: str) -> str:
    pool = target_pool(1, device, transport)
    try:
        module, means = module_of(transport), means_of(EXPORTER, pool, None)
        if reason := module.unavailable(means):
            return str(reason)
        exporter, importer = module.exporter(means), module.importer(means)
        await exporter.start()
        is_reached = exporter.reachable(importer.endpoint())
        await importer.close()
        await exporter.close()
    finally:
        pool.close()
    return "" if is_reached else _UNREACHED.get(transport, "no importer on this machine is reached")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples, at most 64 MB; not stored")
    parser.add_argument("--device", default="cpu", choices=tuple(_ROWS), help="where both pools lie")
    parser.add_argument("--transports", default="", help="only these rows of the table, comma-separated")
    parser.add_argument("--digests", action="store_true", help="also measure digests alone, beside a copy")
    parser.add_argument("--keep", action="store_true", help="store the results of --quick too")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder for kv.md and kv.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.device == "cuda":
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # both processes are on one GPU
    rows = asyncio.run(
        _offered(arguments.transports.split(",") if arguments.transports else _ROWS[arguments.device], arguments.device)
    )
    shapes, num_pool_blocks = _sizes(arguments.device, is_quick=arguments.quick)
    longest_s = math.inf if arguments.device == "cpu" else _GPU_CELL_S
    about = machine.about() | {name: _version(name) for name in _PACKAGES} | {"flags": " ".join(sys.argv[1:])}

    def keep(cells: Sequence[Cell]) -> None:
        if arguments.keep or not arguments.quick:
            arguments.output.mkdir(parents=True, exist_ok=True)
            (arguments.output / "kv.md").write_text(as_markdown(cells, about))
            (arguments.output / "kv.json").write_text(as_json(cells, about))

    keep([])
    print(as_markdown(asyncio.run(measure(rows, shapes, num_pool_blocks, arguments.device, longest_s, keep)), about))
    if arguments.digests and rows:
        costs = measure_digests(
            [shape for shape in shapes if shape.num_bytes >= _LARGE], num_pool_blocks, arguments.device
        )
        print("\n".join(table(costs)))
        (arguments.output / "digests.md").write_text("\n".join(table(costs)) + "\n")
        (arguments.output / "digests.json").write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")


def _sizes(device: str, *, is_quick: bool) -> tuple[Sequence[Shape], int]:
    """Return the shapes and the number of blocks of each pool. A small GPU gets only what three pools have room for."""
    if device == "cpu":
        return (QUICK_SHAPES, QUICK_POOL_BLOCKS) if is_quick else (SHAPES, POOL_BLOCKS)
    fitting = torch.cuda.mem_get_info()[0] // (4 * GPU_SHAPES[0].block_bytes)
    num_pool_blocks = min(GPU_POOL_BLOCKS, fitting)
    return [shape for shape in GPU_SHAPES if 2 * shape.num_blocks <= num_pool_blocks], num_pool_blocks


if __name__ == "__main__":
    main()
