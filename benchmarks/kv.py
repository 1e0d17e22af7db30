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
from benchmarks.kv_parties import HOST
from benchmarks.kv_shapes import POOL_BLOCKS, QUICK_POOL_BLOCKS, QUICK_SHAPES, SHAPES, Shape
from benchmarks.kv_table import Cell, as_json, as_markdown
from cli.certificates import make_authority, make_certificate
from kvtransfer.transports.nixl_agent import why_not_loadable

_RESULTS = Path(__file__).parent / "results"
_ROWS = ("shm", "tcp", "tcp+tls", "nixl")
_PACKAGES = ("numpy", "grpcio", "nixl-cu13")


async def measure(rows: Sequence[str], shapes: Sequence[Shape], num_pool_blocks: int) -> list[Cell]:
    """One pair of processes per row."""
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        if "tcp+tls" in rows:
            authority = make_authority(Path(folder), days=2)
            make_certificate(Path(folder), authority, "member", [HOST], days=2)
        for row in rows:
            certificates = folder if row == "tcp+tls" else ""
            async with moves_over(row.split("+")[0], num_pool_blocks, certificates) as (moves, limits):
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


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples, at most 64 MB; kept nowhere")
    parser.add_argument("--transports", default=",".join(_ROWS), help="lines of the table, comma-separated")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder for kv.md and kv.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = arguments.transports.split(",")
    if "nixl" in rows and (reason := why_not_loadable()):
        print(f"nixl is left out: {reason}", file=sys.stderr)
        rows.remove("nixl")
    shapes, num_pool_blocks = (QUICK_SHAPES, QUICK_POOL_BLOCKS) if arguments.quick else (SHAPES, POOL_BLOCKS)
    cells = asyncio.run(measure(rows, shapes, num_pool_blocks))
    about = machine.about() | {name: _version(name) for name in _PACKAGES} | {"flags": " ".join(sys.argv[1:])}
    table = as_markdown(cells, about)
    print(table)
    if not arguments.quick:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "kv.md").write_text(table)
        (arguments.output / "kv.json").write_text(as_json(cells, about))


if __name__ == "__main__":
    main()
