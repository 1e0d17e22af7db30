"""The faults: each is applied to the real system, lasts its time, and is undone where possible.

Owns nothing; processes, networks and disks belong to the cluster. A call returns when the fault is over and every ended
process has been restarted.
"""

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from redis.asyncio import Redis

from tests.chaos.members import ChaosCluster
from tests.chaos.plan import Kind, Round

_SPARE_BYTES = 1 << 20  # of address space, under pressure
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FILLER = "filler"


async def strike(chaos: ChaosCluster, one: Round, victim: str, struck: Callable[[], None]) -> str:
    """Perform the fault, and call `struck` once it is in effect. Returns a description of it."""
    blows: dict[Kind, Callable[[], Awaitable[str]]] = {
        Kind.NOTHING: lambda: _nothing(one.for_s, struck),
        Kind.SIGKILL: lambda: _killed(chaos, victim, struck),
        Kind.SIGTERM: lambda: _asked_to_leave(chaos, victim, struck),
        Kind.SIGSTOP: lambda: _stopped(chaos, victim, one.for_s, struck),
        Kind.REDIS_KILLED: lambda: _redis_killed(chaos, one.for_s, struck),
        Kind.REDIS_EMPTIED: lambda: _redis_emptied(chaos, struck),
        Kind.REDIS_STOPPED: lambda: _redis_stopped(chaos, one.for_s, struck),
        Kind.LINK_CUT: lambda: _link_cut(chaos, one.for_s, struck),
        Kind.DISK_FULL: lambda: _disk_full(chaos, one.for_s, struck),
        Kind.CLOCK_JUMP: lambda: _clock_jump(chaos, victim, one, struck),
        Kind.STEP_HUNG: lambda: _step_hung(chaos, victim, one.for_s, struck),
        Kind.MEMORY_PRESSURE: lambda: _memory_pressure(chaos, victim, one.for_s, struck),
    }
    return await blows[one.fault.kind]()


async def _nothing(for_s: float, struck: Callable[[], None]) -> str:
    struck()
    await asyncio.sleep(for_s)
    return ""


async def _killed(chaos: ChaosCluster, victim: str, struck: Callable[[], None]) -> str:
    chaos.signal(victim, signal.SIGKILL)
    struck()
    await chaos.start(victim)
    return ""


async def _asked_to_leave(chaos: ChaosCluster, victim: str, struck: Callable[[], None]) -> str:
    chaos.signal(victim, signal.SIGTERM)
    chaos.signal(victim, signal.SIGCONT)
    struck()
    status = await chaos.exit_code(victim)
    await chaos.start(victim)
    return f"exit status {status}"


async def _stopped(chaos: ChaosCluster, victim: str, for_s: float, struck: Callable[[], None]) -> str:
    struck()
    await asyncio.sleep(for_s)
    chaos.signal(victim, signal.SIGCONT)
    return await _started_again_if_dead(chaos, victim)


async def _redis_killed(chaos: ChaosCluster, for_s: float, struck: Callable[[], None]) -> str:
    os.kill(chaos.redis.pid, signal.SIGKILL)
    struck()
    await asyncio.sleep(for_s)
    await chaos.replace_redis()
    return ""


async def _redis_emptied(chaos: ChaosCluster, struck: Callable[[], None]) -> str:
    async with Redis.from_url(chaos.redis.url) as redis:
        await redis.flushall()
    struck()
    return ""


async def _redis_stopped(chaos: ChaosCluster, for_s: float, struck: Callable[[], None]) -> str:
    os.kill(chaos.redis.pid, signal.SIGSTOP)
    struck()
    try:
        await asyncio.sleep(for_s)
    finally:
        os.kill(chaos.redis.pid, signal.SIGCONT)
    return ""


async def _link_cut(chaos: ChaosCluster, for_s: float, struck: Callable[[], None]) -> str:
    assert chaos.far is not None
    chaos.far.cut()
    struck()
    try:
        await asyncio.sleep(for_s)
    finally:
        chaos.far.heal()
    return ""


async def _disk_full(chaos: ChaosCluster, for_s: float, struck: Callable[[], None]) -> str:
    fillers = [chaos.disk(name) / _FILLER for name in chaos.names("prefill")]
    for filler in fillers:
        _fill(filler)
    struck()
    try:
        await asyncio.sleep(for_s)
    finally:
        for filler in fillers:
            filler.unlink()
    return ""


async def _clock_jump(chaos: ChaosCluster, victim: str, one: Round, struck: Callable[[], None]) -> str:
    chaos.set_clock(victim, one.jump_s)
    struck()
    await asyncio.sleep(one.for_s)
    chaos.set_clock(victim, 0.0)
    return f"by {one.jump_s:+g} s"


async def _step_hung(chaos: ChaosCluster, victim: str, for_s: float, struck: Callable[[], None]) -> str:
    worker = chaos.holds.workers[victim]
    await worker.hang()
    struck()
    await asyncio.sleep(for_s)
    worker.tell("wake")
    return await _started_again_if_dead(chaos, victim)


async def _memory_pressure(chaos: ChaosCluster, victim: str, for_s: float, struck: Callable[[], None]) -> str:
    """Make every allocation that needs new address space fail."""
    pid = chaos.pid(victim)
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    used_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * _PAGE_BYTES
    resource.prlimit(pid, resource.RLIMIT_AS, (used_bytes + _SPARE_BYTES, before[1]))
    struck()
    died = asyncio.create_task(chaos.members[victim].process.wait())
    try:
        await asyncio.wait([died], timeout=for_s)
        if not died.done():
            resource.prlimit(pid, resource.RLIMIT_AS, before)
    finally:
        died.cancel()
    return await _started_again_if_dead(chaos, victim)


async def _started_again_if_dead(chaos: ChaosCluster, victim: str) -> str:
    status = chaos.members[victim].process.returncode
    if status is None:
        return ""
    await chaos.start(victim)
    return f"ended with status {status}"


def _fill(filler: Path) -> None:
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
