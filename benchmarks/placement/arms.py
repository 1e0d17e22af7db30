"""The arms of the comparison: how each is started on this machine, and what to ask it. Starts and stops processes."""

import argparse
import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.parties import descendants
from benchmarks.placement.figures.samples import Slo
from benchmarks.placement.figures.verdict import AUTO, COLOCATED, SEPARATE, STATIC, VLLM
from cli.local.local_cluster import LocalCluster
from cli.verbs.clusters import up
from cluster.process import die_with_parent
from cluster.settings.config import RouterConfig

_VLLM_START_S, _VLLM_END_S = 300.0, 30.0
_STATIC_POLICY = ("--placement", "prefix-aware")
_SEPARATE_POOLS = ("--prefill", "1", "--decode", "1")
_STATIC_FLAGS = {
    SEPARATE: (*_SEPARATE_POOLS, *_STATIC_POLICY),
    COLOCATED: ("--colocated", "2", *_STATIC_POLICY),
}


@dataclass(frozen=True, slots=True)
class Served:
    """The model that all arms serve, and its flags of `tandem up` besides the pools."""

    model: Path
    vocab_size: int
    max_model_len: int
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunningArm:
    """`pids` returns the processes that serve requests, by name. `can_be_stopped`: SIGSTOP keeps an idle one from the
    cores; a cluster of several members would lose its heartbeats."""

    name: str
    protocol: str  # of generator.Job
    address: str
    flags: str
    pids: Callable[[], dict[str, int]]
    admin_key: str = ""
    can_be_stopped: bool = False

    @property
    def is_static(self) -> bool:
        return self.name in STATIC


def skipped(vllm_python: str) -> dict[str, str]:
    """Return the arms that cannot run here, with the reason."""
    reasons = {}
    if AUTO not in _choices("placement"):
        reasons[AUTO] = "the router of this commit has no such policy"
    if not vllm_python:
        reasons[VLLM] = "VLLM_PYTHON is not set"
    return reasons


@asynccontextmanager
async def static_arm(name: str, served: Served, folder: Path) -> AsyncIterator[RunningArm]:
    """Start a cluster whose roles are fixed. Raises TandemError if it does not start."""
    async with _tandem(name, (*_STATIC_FLAGS[name], *served.flags), served, folder) as arm:
        yield arm


@asynccontextmanager
async def auto_arm(served: Served, folder: Path, slo: Slo) -> AsyncIterator[RunningArm]:
    """Start a cluster whose router decides per request and knows the SLO. Raises TandemError if it does not start."""
    targets = ("--slo-ttft-ms", f"{1e3 * slo.ttft_s:.1f}", "--slo-tpot-ms", f"{1e3 * slo.tpot_s:.1f}")
    flags = (*_SEPARATE_POOLS, "--placement", AUTO, *targets, *served.flags)
    async with _tandem(AUTO, flags, served, folder) as arm:
        yield arm


@asynccontextmanager
async def vllm_arm(served: Served, python: str) -> AsyncIterator[RunningArm]:
    """Start vLLM on two cores, one thread each. Raises RuntimeError if it does not start."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    process = await asyncio.create_subprocess_exec(
        *(python, str(Path(__file__).with_name("vllm_server.py")), str(served.model), str(served.max_model_len)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": cores},
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_VLLM_START_S):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"{python} could not start vLLM: run vllm_server.py by hand to see why")
        ready = json.loads(line)
        pids = {str(pid): pid for pid in (process.pid, *(pid for pid, _ in descendants(process.pid)))}
        flags = f"vLLM {ready['version']}: {ready['flags']}"
        yield RunningArm(VLLM, "vllm", ready["address"], flags, lambda: pids, can_be_stopped=True)
    finally:
        await _end_session(process)


@contextmanager
def alone(arm: RunningArm, arms: Sequence[RunningArm]) -> Iterator[None]:
    """Stop the other arms that can be stopped, while this one is measured."""
    others = [pid for other in arms if other is not arm and other.can_be_stopped for pid in other.pids().values()]
    try:
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def _choices(setting: str) -> tuple[str, ...]:
    """Return the values that a router's setting may have."""
    choices = {item.name: item.metadata["choices"] for item in dataclasses.fields(RouterConfig)}
    return tuple(choices[setting])


@asynccontextmanager
async def _tandem(name: str, flags: tuple[str, ...], served: Served, folder: Path) -> AsyncIterator[RunningArm]:
    """Run `tandem up` with these flags."""
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    own = ("--model", str(served.model), "--cluster-key-file", str(folder / f"{name}.key"))
    plan, _ = up.plan_from(parser.parse_args([*flags, *own, "--port", "0", "--grpc-port", "0"]))
    cluster = LocalCluster(plan, say=_ignore, echo=_ignore)
    try:
        await cluster.start()
        yield RunningArm(name, "tandem", cluster.grpc, " ".join(("tandem up", *flags)), cluster.pids, plan.admin_key)
    finally:
        await cluster.close()


async def _end_session(process: asyncio.subprocess.Process) -> None:
    """End a process and what it has started in its session."""
    with suppress(ProcessLookupError):
        process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _VLLM_END_S)
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _ignore(*_: str) -> None:
    """The errors of a process that ends are part of the exception."""
