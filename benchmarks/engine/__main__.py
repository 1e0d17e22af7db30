"""`make bench-engine`: compare Tandem's colocated worker with other engines and with the limits of one core.

All engines serve random weights of the same shapes in bfloat16; the sequences of a load start together. Each load is
timed twice, for one token of every sequence and for all tokens: the first time is prefill, the difference decode.
Tandem is measured as a client sees it: its worker has one core for itself, its router another.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import parties
from benchmarks.engine.limits import Core, Limits
from benchmarks.engine.shapes import LOADS, MODELS, Load, ModelShape
from benchmarks.engine.start import Start, measure_starts
from benchmarks.engine.table import Row, Sample, rates_table, steps_table
from benchmarks.machine import about, commit

_RESULTS = Path(__file__).parents[1] / "results"
_ROOT = Path(__file__).parents[2]


async def compare(
    model: ModelShape, loads: Sequence[Load], rounds: int, peers: Sequence[str], vllm_python: str
) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of the table, and each engine's version and flags."""
    limits = await asyncio.to_thread(_on_model_core, model, loads)
    with tempfile.TemporaryDirectory() as directory:
        folder = model.save(Path(directory) / model.name)
        parts = await asyncio.to_thread(_step_parts, folder, loads)
        async with AsyncExitStack() as stack:
            taking_part = [await stack.enter_async_context(parties.tandem(folder, commit()))]
            if "transformers" in peers:
                taking_part.append(await stack.enter_async_context(parties.transformers(folder)))
            if vllm_python:
                taking_part.append(await stack.enter_async_context(parties.vllm(folder, vllm_python)))
            rows = []
            for load, limit, part in zip(loads, limits, parts, strict=True):
                rows.append(Row(model.name, load, limit, await _in_turns(load, rounds, taking_part), part))
                print(rates_table(rows[-1:], "prefill")[-1], rates_table(rows[-1:], "decode")[-1], sep="\n", flush=True)
            return rows, {party.name: f"{party.version}; {party.flags}" for party in taking_part}


async def _in_turns(load: Load, rounds: int, taking_part: list[parties.Party]) -> dict[str, list[Sample]]:
    ours_and_theirs = [party for party in taking_part if load.sequences <= party.most_sequences]
    samples: dict[str, list[Sample]] = {party.name: [] for party in ours_and_theirs}
    for turn in range(rounds + 1):
        for party in ours_and_theirs:
            with parties.alone(party, taking_part):
                if turn:
                    samples[party.name].append(await party.run(load))
                else:  # whatever is made at the first use of such a batch
                    await party.first_token(Load(load.sequences, 16, 1))
    return samples


def _on_model_core(model: ModelShape, loads: Sequence[Load]) -> list[Limits]:
    """Measure the limits on the core that the engines will use, before they start."""
    allowed = os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {parties.MODEL_CORE})
    try:
        core = Core(model)
        rates = core.rates()
        return [core.limits(load, rates) for load in loads]
    finally:
        os.sched_setaffinity(0, allowed)


def _step_parts(folder: Path, loads: Sequence[Load]) -> list[dict[str, float]]:
    lines = "".join(json.dumps(asdict(load)) + "\n" for load in loads)
    command = (sys.executable, "-m", "benchmarks.engine.steps", "--model", str(folder))
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, cwd=_ROOT)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def as_markdown(rows: Sequence[Row], starts: Sequence[Start], said: dict[str, str]) -> str:
    machine = about()
    lines = [
        "# Engine on one core",
        "",
        f"{machine['processor']}, {machine['kernel']}; torch {machine['torch']}; commit {machine['commit']}.",
        "bfloat16, random weights, tokens per second, medians of samples taken in turns while the others stood still.",
        "The limit is the core's roofline: arithmetic at the best matrix rate, or one reading of weights and KV.",
        "Goals: of prefill the lower of 1.1 vLLM and 90 % of the limit, of decode the lower of 1.5 vLLM (2 at 1 and 4",
        "sequences) and 80 % of the limit.",
        "",
        *(f"- {name}: {text}" for name, text in said.items()),
        "",
        "## Prefill",
        "",
        *rates_table(rows, "prefill"),
        "",
        "## Decode",
        "",
        *rates_table(rows, "decode"),
        "",
        "## Where a decode step's time goes (ms)",
        "",
        *steps_table(rows),
        "",
        *(["## Start (s, warm caches)", "", *(start.line() for start in starts), ""] if starts else []),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-engine")
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON", ""), help="Python of vLLM's environment")
    parser.add_argument("--peers", nargs="*", default=["transformers"], choices=["transformers"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS])
    parser.add_argument("--loads", type=int, default=len(LOADS), help="run only the first N loads")
    parser.add_argument("--starts", type=int, default=3, help="rounds of starts; 0: none")
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    arguments = parser.parse_args()
    rows: list[Row] = []
    said: dict[str, str] = {}
    starts: list[Start] = []
    for model in MODELS:
        if model.name in arguments.models:
            loads = LOADS[: arguments.loads]
            peers = (arguments.peers, arguments.vllm_python)
            found, said = asyncio.run(compare(model, loads, arguments.rounds, *peers))
            rows += found
            starts += measure_starts(model, arguments.starts, arguments.vllm_python) if arguments.starts else []
    text = as_markdown(rows, starts, said)
    print(text)
    if arguments.write:
        _RESULTS.mkdir(exist_ok=True)
        (_RESULTS / "engine.md").write_text(text)
        kept: dict[str, Any] = {"about": about(), "parties": said, "rows": [row.as_json() for row in rows]}
        kept["starts"] = [asdict(start) for start in starts]
        (_RESULTS / "engine.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
