"""The engines of the benchmark: Tandem's colocated worker, vLLM, and the model's own `generate`.

Each engine has its model on one core and its client on another. Only one computes at a time: the processes of the
others are stopped by SIGSTOP, because some of them spin while they wait.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

from benchmarks.engine.shapes import Load, prompt
from benchmarks.engine.table import Sample
from tandem.client import AsyncClient

MODEL_CORE, OTHER_CORE = 0, 1
_UP_TIMEOUT_S = 300.0
_LONG_LEASE_S = "3600"  # a stopped worker is not a dead one


class Party(Protocol):
    """One engine. `flags`: what it was started with; they become part of the result."""

    name: str
    version: str
    flags: str
    most_sequences: int  # of a load that it takes part in

    async def run(self, load: Load) -> Sample: ...

    async def first_token(self, load: Load) -> None:
        """Compute one token of every sequence; return the seconds."""
        ...

    @property
    def stoppable(self) -> list[int]:
        """Processes that may take the model's core."""
        ...


@contextmanager
def alone(party: Party, parties: Sequence[Party]) -> Iterator[None]:
    """Stop the other engines while this one computes."""
    others = [pid for other in parties if other is not party for pid in other.stoppable]
    try:
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


class Tandem:
    """`tandem up --colocated 1` with its worker pinned to a core, measured through its API."""

    name = "tandem"
    most_sequences = 64

    def __init__(self, client: AsyncClient, version: str, flags: str, worker: int) -> None:
        self._client = client
        self.version, self.flags = version, flags
        self.stoppable = [worker]

    async def run(self, load: Load) -> Sample:
        return Sample(await self._seconds(load, 1), await self._seconds(load, load.tokens_out))

    async def first_token(self, load: Load) -> None:
        await self._seconds(load, 1)

    async def _seconds(self, load: Load, tokens_out: int) -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.gather(*(self._generate(prompt(load, index), tokens_out) for index in range(load.sequences)))
        return loop.time() - began_s

    async def _generate(self, token_ids: list[int], tokens_out: int) -> None:
        generation = self._client.generate(token_ids=token_ids, max_tokens=tokens_out, temperature=0.0, ignore_eos=True)
        result = await generation.result()
        assert len(result.choices[0].token_ids) == tokens_out


class Scripted:
    """A program that answers each line with a load by one line with its seconds."""

    most_sequences = 64

    def __init__(self, name: str, process: asyncio.subprocess.Process, said: dict[str, str]) -> None:
        self.name, self.version, self.flags = name, said["version"], said["flags"]
        self._process = process

    @property
    def stoppable(self) -> list[int]:
        return [self._process.pid, *(pid for pid, _ in descendants(self._process.pid))]

    async def run(self, load: Load) -> Sample:
        return Sample(await self._seconds(load, 1), await self._seconds(load, load.tokens_out))

    async def first_token(self, load: Load) -> None:
        await self._seconds(load, 1)

    async def _seconds(self, load: Load, tokens_out: int) -> float:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        prompts = [prompt(load, index) for index in range(load.sequences)]
        stdin.write((json.dumps({"prompts": prompts, "tokens_out": tokens_out}) + "\n").encode())
        return float(await stdout.readline())


@asynccontextmanager
async def tandem(folder: Path, version: str, load_format: str = "dummy") -> AsyncIterator[Party]:
    flags = (
        f"--colocated 1 --load-format {load_format} --dtype bfloat16 --max-model-len 2048 --max-num-seqs 64"
        " --kv-cache-memory 2GiB --prefix-caching off --num-threads 1"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "up", "--model", str(folder), *flags.split()),
        *("--port", "0", "--grpc-port", "0", "--registration-ttl-s", _LONG_LEASE_S),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_UP_TIMEOUT_S):
            address = await _ready_address(process)
        below = descendants(process.pid)
        (worker,) = (pid for pid, command in below if "worker" in command.split())
        for pid, _ in below:
            pin(pid, MODEL_CORE if pid == worker else OTHER_CORE)
        async with AsyncClient(address) as client:
            yield Tandem(client, version, flags, worker)
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def vllm(folder: Path, python: str, load_format: str = "dummy") -> AsyncIterator[Party]:
    """Start vLLM. `python`: the Python of vLLM's environment."""
    environment = {
        "LOAD_FORMAT": load_format,
        "LD_PRELOAD": ":".join(_preloads(python)),
        "VLLM_CPU_OMP_THREADS_BIND": str(MODEL_CORE),
    }
    async with _scripted("vllm", python, folder, environment) as party:
        front, *engine = party.stoppable
        pin(front, OTHER_CORE)
        for pid in engine:
            pin(pid, MODEL_CORE)
        yield party


@asynccontextmanager
async def transformers(folder: Path) -> AsyncIterator[Party]:
    async with _scripted("transformers", sys.executable, folder, {"OMP_NUM_THREADS": "1"}) as party:
        party.most_sequences = 16  # it would take minutes
        for pid in party.stoppable:
            pin(pid, MODEL_CORE)
        yield party


@asynccontextmanager
async def _scripted(name: str, python: str, folder: Path, environment: dict[str, str]) -> AsyncIterator[Scripted]:
    script = Path(__file__).with_name(f"{name}_party.py")
    process = await asyncio.create_subprocess_exec(
        *(python, str(script), str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | environment,
        limit=1 << 24,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        async with asyncio.timeout(_UP_TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            raise SystemExit(f"{python} could not start {name}: run {script.name} by hand to see why")
        yield Scripted(name, process, json.loads(line))
    finally:
        process.stdin.close()
        await process.wait()


def _preloads(python: str) -> list[str]:
    """Return the libraries that vLLM's documentation for CPUs recommends to preload and that exist here: Intel's OpenMP
    and tcmalloc."""
    openmp = sorted(Path(python).absolute().parents[1].rglob("libiomp5.so"))[:1]
    tcmalloc = sorted(Path("/usr/lib").rglob("libtcmalloc_minimal.so.4"))[:1]
    return [str(path) for path in (*tcmalloc, *openmp)]


async def _ready_address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        words = line.decode().split()
        if words[:1] == ["ready"]:
            return dict(word.split("=", 1) for word in words[1:] if "=" in word)["grpc"]
    raise SystemExit("`tandem up` ended before it was ready")


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return (process id, command line) of every descendant of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [(int(child), Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")) for child in children]
    return found + [below for child in children for below in descendants(int(child))]


def pin(pid: int, core: int) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})
