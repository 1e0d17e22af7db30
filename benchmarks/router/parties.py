"""The processes of `make bench-router`: Redis, the paced workers, the routers that are compared, the load generator."""

import asyncio
import json
import os
import shutil
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.router.load import Job, Result
from cli.verbs.access.certs import make_authority, make_certificate
from cli.verbs.clusters.up import DEMO_MODEL
from cluster.process import die_with_parent
from cluster.registry.redis_server import RedisServer

_ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 1 << 17
_LINE_BYTES = 64 << 20
_START_S = 60.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of the comparison: the router of a checkout, in one process or in several that share the HTTP port."""

    checkout: Path
    num_processes: int = 1
    module: str = "router"  # that is started


@dataclass(frozen=True, slots=True)
class Router:
    """One router of a checkout; `processes` has more than one where several serve one port."""

    arm: str
    http: str
    grpc: str
    processes: tuple[Process, ...]
    is_tls: bool

    def cpu_s(self) -> float:
        """Return the CPU time that its processes have used: user and system, of all threads."""
        return sum(time.clock_gettime(_cpu_clock(process.pid)) for process in self.processes)

    async def switch(self, what: str, state: str) -> None:
        """Switch the "metrics" or the "proofs" of a switchable router "on" or "off"."""
        [process] = self.processes
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{what} {state}\n".encode())
        assert await process.stdout.readline() == f"{what} {state}\n".encode()


def _cpu_clock(pid: int) -> int:
    """Return the CPU-time clock of a process: clock_getcpuclockid(3), which Python does not have."""
    return (~pid << 3) | 2


class Workers:
    """The paced workers of one cluster."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def set_step(self, step_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"step_s={step_s}\n".encode())


class LoadGenerator:
    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._in, self._out = process.stdin, process.stdout

    async def run(self, job: Job, router: Router) -> tuple[Result, float]:
        """Return the result and the CPU seconds that the router used for the requests."""
        self._in.write(json.dumps(asdict(job)).encode() + b"\n")
        line = await self._out.readline()
        assert line == b"connected\n", line
        began_s = router.cpu_s()
        self._in.write(b"go\n")
        line = await self._out.readline()
        assert line, "the load generator failed"
        return Result(**json.loads(line)), router.cpu_s() - began_s


@dataclass(frozen=True, slots=True)
class Parties:
    """`routers` and `workers` by whether they use TLS; one router per arm."""

    load: LoadGenerator
    workers: dict[bool, Workers]
    routers: dict[bool, list[Router]]
    steps_files: dict[bool, str]
    ca_file: str


@asynccontextmanager
async def parties(arms: dict[str, Arm], folder: Path, with_tls: Sequence[bool]) -> AsyncIterator[Parties]:
    """Start everything. `folder` is for files of this run."""
    async with AsyncExitStack() as stack:
        redis = await RedisServer.start()
        stack.push_async_callback(redis.stop)
        authority = make_authority(folder, days=2)
        pair = make_certificate(folder, authority, "member", ("localhost", "127.0.0.1"), days=2)
        tls_flags = [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", f"--tls-ca={authority.cert}"]
        steps_files = {tls: str(folder / f"steps-{tls}") for tls in with_tls}
        workers: dict[bool, Workers] = {}
        routers: dict[bool, list[Router]] = {}
        for tls in with_tls:
            flags = [f"--redis={redis.url}", f"--cluster-name=bench-{tls}", f"--model={_model(folder)}"]
            flags += tls_flags if tls else []
            steps_flags = ["--steps", steps_files[tls]]
            process = await _start(stack, _ROOT, ["benchmarks.router.worker", *flags, *steps_flags])
            await _ready(process)
            workers[tls] = Workers(process)
            routers[tls] = [await _router(stack, name, arm, flags, tls) for name, arm in arms.items()]
        load = await _start(stack, _ROOT, ["benchmarks.router.load"])
        yield Parties(LoadGenerator(load), workers, routers, steps_files, str(authority.cert))


def _model(folder: Path) -> Path:
    """Return the demo model with room for long prompts; nothing here computes with it."""
    model = folder / DEMO_MODEL.name
    if not model.exists():
        shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_MODEL_LEN}))
    return model


async def _router(stack: AsyncExitStack, name: str, arm: Arm, flags: list[str], tls: bool) -> Router:
    processes, http, grpc = list[Process](), "", ""
    for _ in range(arm.num_processes):
        port = http.rpartition(":")[2] or "0"
        sharing = ["--share-port=on"] if arm.num_processes > 1 else []
        arguments = [arm.module, *flags, f"--port={port}", "--grpc-port=0", "--log-level=error", *sharing]
        process = await _start(stack, arm.checkout, arguments)
        fields = await _ready(process)
        http, grpc = fields["http"], grpc or fields["grpc"]
        processes.append(process)
    return Router(name, http, grpc, tuple(processes), tls)


async def _start(stack: AsyncExitStack, checkout: Path, arguments: list[str]) -> Process:
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments),
        cwd=checkout,
        env=environment,
        stdin=PIPE,
        stdout=PIPE,
        limit=_LINE_BYTES,
        preexec_fn=die_with_parent,
    )
    stack.push_async_callback(_stop, process)
    return process


async def _ready(process: Process) -> dict[str, str]:
    assert process.stdout is not None
    async with asyncio.timeout(_START_S):
        while line := (await process.stdout.readline()).decode():
            if line.startswith("ready"):
                return dict(field.split("=", 1) for field in line.split()[1:])
    raise RuntimeError("a process ended before it was ready")


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
