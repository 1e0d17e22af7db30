"""`make bench-start`: measure the time from `tandem up` to the first token, phase by phase, with warm caches.

Each round starts every arm once, in turns: `tandem up`, the same of another checkout (--against), and a fresh Python
that only loads the weights with transformers. The first round warms the caches and does not count.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.engine.shapes import MODELS, ModelShape
from benchmarks.machine import about
from benchmarks.start.runs import Run, demo, up, weights
from benchmarks.start.table import Runs, phases, totals
from engine.model.loading import dummy_model

_RESULTS = Path(__file__).parents[1] / "results"
_ROOT = Path(__file__).parents[2]
_DEMO = "demo model"
_DEMO_FLAGS = ("--kv-cache-memory", "256MiB")
_FLAGS = (
    *("--colocated", "1", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64"),
    *("--kv-cache-memory", "2GiB", "--prefix-caching", "off", "--num-threads", "1"),
)

Arms = dict[str, Callable[[], Coroutine[Any, Any, Run]]]


async def measure(arms: Arms, rounds: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            run = await arm()
            print(
                f"  {name}: {run.wall_s:.2f} s, processor {run.cpu_s:.2f} s{'' if turn else ' (warm-up)'}", flush=True
            )
            if turn:
                runs[name].append(run)
    return runs


def _arms_of_demo(before: Path | None) -> Arms:
    arms: Arms = {"tandem up": lambda: up(_ROOT, _DEMO_FLAGS), "tandem demo": lambda: demo(_ROOT)}
    if before is not None:
        arms["tandem up (before)"] = lambda: up(before, _DEMO_FLAGS)
        arms["tandem demo (before)"] = lambda: demo(before)
    return arms


def _arms_of(folder: Path, before: Path | None) -> Arms:
    flags = ("--model", str(folder), *_FLAGS)
    arms: Arms = {"tandem up": lambda: up(_ROOT, flags), "weights": lambda: weights(folder)}
    if before is not None:
        arms["tandem up (before)"] = lambda: up(before, flags)
    return arms


def _arms(name: str, directory: Path, before: Path | None) -> Arms:
    if name == _DEMO:
        return _arms_of_demo(before)
    (model,) = (model for model in MODELS if model.name == name)
    return _arms_of(_saved(model, directory / name), before)


def _saved(model: ModelShape, folder: Path) -> Path:
    """Save a checkpoint of the shape with random weights."""
    model.save(folder)
    dummy = dummy_model(AutoConfig.from_pretrained(folder), torch.bfloat16, "sdpa", torch.device("cpu"))
    dummy.save_pretrained(folder)
    return folder


def as_markdown(models: dict[str, Runs], before: str, machine: dict[str, str]) -> str:
    lines = [
        "# Start",
        "",
        f"{machine['processor']}, {machine['kernel']}; torch {machine['torch']}; commit {machine['commit']}"
        + (f"; before: {before}." if before else "."),
        "From the command to a client's first token, with warm caches; arms in turns, medians with the least and the",
        f"most. Load average {machine['load']}: above the number of cores, others have lengthened the wall times and",
        "processor times count. These are of all processes from start to end. Ratios are paired by round.",
        "",
        f"- demo model: {' '.join(_DEMO_FLAGS)}, one prefill and one decode worker",
        f"- others: {' '.join(_FLAGS)}",
        "- weights: a fresh Python that imports transformers and loads the checkpoint",
        "",
        *totals(models),
        "",
        "## Phases of `tandem up` (s)",
        "",
        "The phases of the command follow one another; those of a worker lie within `workers ready`.",
        "",
        *phases(models),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-start")
    parser.add_argument("--against", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--before", default="", help="what to call that commit in the result")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=[_DEMO, *(model.name for model in MODELS)])
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    arguments = parser.parse_args()
    models: dict[str, Runs] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in arguments.models:
            print(name, flush=True)
            arms = _arms(name, Path(directory), arguments.against)
            models[name] = asyncio.run(measure(arms, arguments.rounds))
    machine = about() | {"load": f"{os.getloadavg()[2]:.1f}"}
    text = as_markdown(models, arguments.before, machine)
    print(text)
    if arguments.write:
        (_RESULTS / "start.md").write_text(text)
        kept = {
            name: {arm: [asdict(run) for run in each] for arm, each in runs.items()} for name, runs in models.items()
        }
        (_RESULTS / "start.json").write_text(json.dumps({"about": machine, "models": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
