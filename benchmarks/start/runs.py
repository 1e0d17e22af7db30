"""One start of a cluster, or of a process that only loads the weights, with its seconds."""

import asyncio
import re
import resource
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cli.verbs.clusters.demo import PROMPT
from tandem.client import AsyncClient

_TIMEOUT_S = 600.0
_FIRST_PROMPT = list(range(10, 26))
_WEIGHTS = """
import sys, torch, transformers
torch.set_num_threads(1)
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
"""
_WORKER_PHASE = re.compile(r"(\w+)_s=([0-9.e+-]+)")


@dataclass(slots=True)
class Run:
    """One start. `wall_s`: from the command to the first token; `cpu_s`: of all its processes, their end included."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # in their order; those of `tandem up`, then a worker's


async def up(checkout: Path, flags: Sequence[str]) -> Run:
    """Start `tandem up` of a checkout, send one request of one token, and stop it."""
    run, began_s, cpu_s = Run(), time.perf_counter(), _cpu_s()
    async with _command(checkout, "up", "--port", "0", "--grpc-port", "0", *flags) as process:
        assert process.stdout is not None and process.stderr is not None
        clock = _Clock(run, began_s)
        log = asyncio.create_task(_read_log(process.stderr, clock))
        async for line in process.stdout:
            words = line.decode().split()
            if words[:1] == ["ready"]:
                break
        clock.end("router ready")
        async with AsyncClient(dict(word.split("=", 1) for word in words[1:])["grpc"]) as client:
            generation = client.generate(token_ids=_FIRST_PROMPT, max_tokens=1, temperature=0.0, ignore_eos=True)
            await generation.result()
        clock.end("first request")
        run.wall_s = time.perf_counter() - began_s
    await log
    run.cpu_s = _cpu_s() - cpu_s
    return run


async def demo(checkout: Path) -> Run:
    """Start `tandem demo` of a checkout; its first token is the first text after the prompt."""
    run, began_s, cpu_s = Run(), time.perf_counter(), _cpu_s()
    async with _command(checkout, "demo") as process:
        assert process.stdout is not None and process.stderr is not None
        log = asyncio.create_task(_read_log(process.stderr, _Clock(run, began_s)))
        said = b""
        while PROMPT.encode() not in said or said.endswith(PROMPT.encode()):
            part = await process.stdout.read(1 << 12)
            if not part:
                raise SystemExit("`tandem demo` ended without a token")
            said += part
        run.wall_s = time.perf_counter() - began_s
        await process.stdout.read()
        await process.wait()
    await log
    run.cpu_s = _cpu_s() - cpu_s
    return run


async def weights(folder: Path) -> Run:
    """Load the checkpoint in a fresh Python, with its imports, and do nothing else."""
    began_s, cpu_s = time.perf_counter(), _cpu_s()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _WEIGHTS, str(folder)), stderr=asyncio.subprocess.DEVNULL
    )
    if await process.wait():
        raise SystemExit(f"{folder} cannot be loaded")
    return Run(time.perf_counter() - began_s, _cpu_s() - cpu_s)


class _Clock:
    def __init__(self, run: Run, began_s: float) -> None:
        self._run, self._last_s = run, began_s

    def end(self, phase: str) -> None:
        """Add the seconds since the phase before to this one."""
        now_s = time.perf_counter()
        self._run.phases[phase] = self._run.phases.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def worker(self, line: str) -> None:
        """Keep the phases that a worker has logged; of several workers those of the last one to be ready."""
        for name, seconds in _WORKER_PHASE.findall(line):
            self._run.phases[f"worker: {name}"] = float(seconds)


async def _read_log(log: asyncio.StreamReader, clock: _Clock) -> None:
    """End the phases of `tandem up` that lines of its log tell."""
    async for raw in log:
        line = raw.decode(errors="replace")
        if line.startswith("tandem: starting "):
            clock.end("command, Redis")
        elif "INFO tandem.worker starting" in line:
            clock.end("imports, fork")
        elif "INFO tandem.worker ready " in line:
            clock.worker(line)
        elif line.startswith("tandem: router-0 is ready"):
            continue
        elif line.startswith("tandem: ") and " is ready after " in line:
            clock.end("workers ready")


@asynccontextmanager
async def _command(checkout: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `tandem` of a checkout, with this Python and its libraries."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-m", "cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=checkout,  # `-m` looks there first
        limit=1 << 20,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
