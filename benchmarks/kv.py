"""make bench-kv: how fast KV moves by each transport, beside what this machine can do, measured in the same run."""

import argparse
import asyncio
import importlib.metadata
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.kv_importer import COLUMNS, moves_over
from benchmarks.kv_parties import EXPORTER, HOST, means_of, module_of
from benchmarks.kv_shapes import (
    GPU_POOL_BLOCKS,
    GPU_SHAPES,
    POOL_BLOCKS,
    QUICK_POOL_BLOCKS,
    QUICK_SHAPES,
    SHAPES,
    Shape,
    target_pool,
)
from benchmarks.kv_table import Cell, as_json, as_markdown
from cli.certificates import make_authority, make_certificate

_RESULTS = Path(__file__).parent / "results"
_ROWS = {"cpu": ("shm", "tcp", "tcp+tls", "nixl"), "cuda": ("cuda_ipc", "nccl", "nixl", "tcp")}
_PACKAGES = ("numpy", "grpcio", "nixl-cu13")


async def measure(
    rows: Sequence[str], shapes: Sequence[Shape], num_pool_blocks: int, device: str = "cpu"
) -> list[Cell]:
    """One pair of processes per row."""
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        if "tcp+tls" in rows:
            authority = make_authority(Path(folder), days=2)
            make_certificate(Path(folder), authority, "member", [HOST], days=2)
        for row in rows:
            certificates = folder if row == "tcp+tls" else ""
            async with moves_over(row.split("+")[0], num_pool_blocks, certificates, device) as (moves, limits):
                for shape in shapes:
                    print(f"{row}, {shape.name}", file=sys.stderr, flush=True)
                    samples = await _in_turns(moves.timed(shape, limits), shape.num_samples)
                    cells.append(_cell(row, shape, samples))
    return cells


async def _in_turns(timed: Mapping[str, Callable[[], Awaitable[float]]], num_samples: int) -> dict[str, list[float]]:
    """The order changes with each turn; the first one warms up."""
    dice = random.Random(3)
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(num_samples + 1):
        for name in dice.sample(sorted(timed), len(timed)):
            seconds = await timed[name]()
            if turn:
                samples[name].append(seconds)
    return samples


def _cell(row: str, shape: Shape, samples: dict[str, list[float]]) -> Cell:
    ours = {name: samples.pop(name) for name in COLUMNS}
    return Cell(row, shape.name, shape.num_bytes, samples, *(ours[name] for name in COLUMNS))


def _offered(rows: Sequence[str], device: str) -> list[str]:
    """Without those that this machine does not have; each is told with its reason."""
    pool = target_pool(1, device)
    offered = []
    for row in rows:
        name = row.partition("+")[0]
        reason = module_of(name).unavailable(means_of(EXPORTER, pool, None))
        if reason:
            print(f"{row} is left out: {reason}", file=sys.stderr)
        else:
            offered.append(row)
    pool.close()
    return offered


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples, at most 64 MB; kept nowhere")
    parser.add_argument("--device", default="cpu", choices=tuple(_ROWS), help="where both pools lie")
    parser.add_argument("--transports", default="", help="lines of the table, comma-separated")
    parser.add_argument("--keep", action="store_true", help="what --quick found, too")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder for kv.md and kv.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = _offered(
        arguments.transports.split(",") if arguments.transports else _ROWS[arguments.device], arguments.device
    )
    shapes: Sequence[Shape]
    shapes, num_pool_blocks = (SHAPES, POOL_BLOCKS) if arguments.device == "cpu" else (GPU_SHAPES, GPU_POOL_BLOCKS)
    if arguments.quick:
        shapes, num_pool_blocks = QUICK_SHAPES, QUICK_POOL_BLOCKS
    cells = asyncio.run(measure(rows, shapes, num_pool_blocks, arguments.device))
    about = machine.about() | {name: _version(name) for name in _PACKAGES} | {"flags": " ".join(sys.argv[1:])}
    table = as_markdown(cells, about)
    print(table)
    if arguments.keep or not arguments.quick:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "kv.md").write_text(table)
        (arguments.output / "kv.json").write_text(as_json(cells, about))


if __name__ == "__main__":
    main()
