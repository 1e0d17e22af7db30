"""`make bench-engine`: Tandem's colocated worker and vLLM on one core, in turns, beside what the core allows.

Both serve the same random weights in bfloat16 from the same folder; the sequences of a load start together. A load is
timed twice by each, for one token of every sequence and for all: the first is prefill, the difference decode. Tandem is
asked as a client asks it: its worker is alone on the core, its router on another.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.engine_limits import Core
from benchmarks.engine_shapes import LOADS, MODELS, Load, ModelShape
from benchmarks.engine_table import Row, Sample, as_markdown
from benchmarks.machine import about
from tandem.client import AsyncClient

_RESULTS = Path(__file__).parent / "results"
_CORE, _OTHER_CORE = 0, 1
_UP_TIMEOUT_S = 300.0


class Party(Protocol):
    name: str

    async def run(self, load: Load) -> Sample: ...


class Tandem:
    """`tandem up --colocated 1`, its worker pinned."""

    name = "tandem"

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def run(self, load: Load) -> Sample:
        return Sample(await self._seconds(load, 1), await self._seconds(load, load.tokens_out))

    async def _seconds(self, load: Load, tokens_out: int) -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.gather(
            *(self._generate(sequence, load.tokens_in, tokens_out) for sequence in range(load.sequences))
        )
        return loop.time() - began_s

    async def _generate(self, sequence: int, tokens_in: int, tokens_out: int) -> None:
        prompt = [(7 * i + 13 * sequence) % 40000 + 10 for i in range(tokens_in)]
        generation = self._client.generate(token_ids=prompt, max_tokens=tokens_out, temperature=0.0, ignore_eos=True)
        result = await generation.result()
        assert len(result.choices[0].token_ids) == tokens_out


class Vllm:
    """benchmarks/engine_vllm.py under the Python of vLLM's environment."""

    name = "vllm"

    def __init__(self, process: asyncio.subprocess.Process, version: str) -> None:
        self._process = process
        self.version = version

    async def run(self, load: Load) -> Sample:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write((json.dumps(asdict(load)) + "\n").encode())
        answer = json.loads(await stdout.readline())
        return Sample(answer["first_s"], answer["all_s"])


@asynccontextmanager
async def tandem(folder: Path) -> AsyncIterator[Tandem]:
    flags = ("--colocated", "1", "--port", "0", "--grpc-port", "0", "--load-format", "dummy", "--dtype", "bfloat16")
    sizes = ("--max-model-len", "2048", "--max-num-seqs", "64", "--kv-cache-memory", "2GiB", "--prefix-caching", "off")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "up", "--model", str(folder), *flags, *sizes),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_UP_TIMEOUT_S):
            address = await _ready_address(process)
        for pid, command in _descendants(process.pid):
            _pin(pid, _CORE if "decode_worker" in command else _OTHER_CORE)
        async with AsyncClient(address) as client:
            yield Tandem(client)
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def vllm(folder: Path, python: str) -> AsyncIterator[Vllm]:
    process = await asyncio.create_subprocess_exec(
        *(python, str(Path(__file__).with_name("engine_vllm.py")), str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"LD_PRELOAD": ":".join(_preloads(python))},
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        async with asyncio.timeout(_UP_TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            raise SystemExit(f"{python} could not start vLLM: run benchmarks/engine_vllm.py by hand to see why")
        yield Vllm(process, json.loads(line)["version"])
    finally:
        process.stdin.close()
        await process.wait()


def _preloads(python: str) -> list[str]:
    """What vLLM's page for CPUs says to load first, as far as it is here: Intel's OpenMP and tcmalloc."""
    openmp = sorted(Path(python).absolute().parents[1].rglob("libiomp5.so"))[:1]
    tcmalloc = sorted(Path("/usr/lib").rglob("libtcmalloc_minimal.so.4"))[:1]
    return [str(path) for path in (*tcmalloc, *openmp)]


async def compare(model: ModelShape, loads: Sequence[Load], rounds: int, vllm_python: str) -> list[Row]:
    limits = await asyncio.to_thread(_limits, model, loads)
    with tempfile.TemporaryDirectory() as directory:
        folder = model.save(Path(directory) / model.name)
        async with tandem(folder) as ours:
            if not vllm_python:
                return await _in_turns(model, loads, rounds, [ours], limits)
            async with vllm(folder, vllm_python) as theirs:
                return await _in_turns(model, loads, rounds, [ours, theirs], limits)


async def _in_turns(
    model: ModelShape, loads: Sequence[Load], rounds: int, parties: Sequence[Party], limits: dict[str, Any]
) -> list[Row]:
    rows = []
    for load in loads:
        samples: dict[str, list[Sample]] = {party.name: [] for party in parties}
        for party in parties:
            await party.run(Load(load.sequences, load.tokens_in, 2))  # whatever is made at the first use
        for _ in range(rounds):
            for party in parties:
                samples[party.name].append(await party.run(load))
        rows.append(Row(model.name, load, limits[load.name], samples))
        print(rows[-1].line(), flush=True)
    return rows


def _limits(model: ModelShape, loads: Sequence[Load]) -> dict[str, Any]:
    """On the core that the parties will have, before they come."""
    allowed = os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {_CORE})
    try:
        core = Core(model)
        return {load.name: core.limits(load) for load in loads}
    finally:
        os.sched_setaffinity(0, allowed)


async def _ready_address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        words = line.decode().split()
        if words[:1] == ["ready"]:
            return dict(word.split("=", 1) for word in words[1:] if "=" in word)["grpc"]
    raise SystemExit("`tandem up` ended before it was ready")


def _descendants(pid: int) -> list[tuple[int, str]]:
    """(process id, command line) of everything below a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [(int(child), Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")) for child in children]
    return found + [below for child in children for below in _descendants(int(child))]


def _pin(pid: int, core: int) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-engine")
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON", ""), help="Python of vLLM's environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS])
    parser.add_argument("--loads", type=int, default=len(LOADS), help="only the first so many")
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results/")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for model in MODELS:
        if model.name in arguments.models:
            compared = compare(model, LOADS[: arguments.loads], arguments.rounds, arguments.vllm_python)
            rows += asyncio.run(compared)
    text = as_markdown(rows, about())
    print(text)
    if arguments.write:
        _RESULTS.mkdir(exist_ok=True)
        (_RESULTS / "engine.md").write_text(text)
        kept = {"about": about(), "rows": [row.as_json() for row in rows]}
        (_RESULTS / "engine.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
