"""The cluster under test: two members of each role, a separate Redis, and everything around them that can fail.

Owns every process, mount, network and file of a run, and ends them all. Members keep their names and routers their
ports when they are restarted, as under a supervisor. Injects no faults.
"""

import asyncio
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from cluster.registry.redis_server import RedisServer, free_port
from tandem.v1 import admin_pb2, admin_pb2_grpc
from tests.chaos.holds import Holds
from tests.contract.rigs.namespaces import FarHost, far_host
from tests.system.rigs.processes.local_cluster import Launch, LocalCluster, Member, executed, forked

ROLES = {"router": "router", "prefill": "tests.chaos.held_worker", "decode": "tests.chaos.held_worker"}
NUM_OF_EACH = 2
_SHIM_SOURCE = Path(__file__).with_name("clock_shim.c")
_DISK_BYTES = 6 << 20
_FLAGS = (
    *("--dtype", "float32", "--max-prefill-tokens", "64", "--num-blocks", "384", "--max-num-seqs", "32"),
    *("--kv-transports", "shm,tcp", "--step-timeout-s", "4"),
)
_TIERS = ("--prefix-host-memory", "2MiB", "--prefix-disk-space", "64MiB")
_WHOLE_S = 60.0
_PAUSE_S = 0.05
_EXIT_S = 45.0


class ChaosCluster:
    """The processes of a cluster. `chaos_cluster` makes it."""

    def __init__(
        self, directory: Path, redis: RedisServer, redis_url: str, holds: Holds, *, far: FarHost | None, launch: Launch
    ) -> None:
        environment = {"HOLD_CONTROL": str(holds.path), "OMP_NUM_THREADS": "1"}
        self.cluster = LocalCluster(redis_url, directory, flags=_FLAGS, environment=environment, launch=launch)
        self.redis = redis
        self.holds = holds
        self.far = far
        self.missing: dict[str, str] = {}  # what cannot be done here, and why
        self.exits: list[tuple[str, int]] = []  # of members that were started again
        self._directory = directory
        self._shim: Path | None = None
        self._disks: dict[str, Path] = {}
        self._ports: dict[str, tuple[int, int]] = {}

    @property
    def members(self) -> dict[str, Member]:
        return self.cluster.members

    def names(self, role: str = "") -> list[str]:
        return [f"{one}{number}" for one in ROLES if one.startswith(role) for number in range(NUM_OF_EACH)]

    def living(self, role: str = "") -> list[str]:
        return [n for n in self.names(role) if n in self.members and self.members[n].process.returncode is None]

    def router_addresses(self) -> dict[str, tuple[str, str]]:
        return {n: (self.members[n].ready["grpc"], self.members[n].ready["http"]) for n in self.names("router")}

    async def start_all(self) -> None:
        self._prepare_disks()
        await asyncio.gather(*(self.start(name) for name in self.names("prefill") + self.names("decode")))
        await asyncio.gather(*(self.start(name) for name in self.names("router")))
        await self.until_whole()

    async def start(self, name: str) -> None:
        """Start the member under its name, which may be new. Raises RuntimeError if it does not become ready."""
        before = self.members.get(name)
        if before is not None:
            self.exits.append((name, await asyncio.wait_for(before.process.wait(), _EXIT_S)))
            if before.reader is not None:
                await before.reader
        role = name.rstrip("0123456789")
        self.set_clock(name, 0.0)
        member = await self.cluster.start_member(name, ROLES[role], self._flags(name), launch=self._launch(name))
        if role == "router":
            grpc_address, http_address = member.ready["grpc"], member.ready["http"]
            self._ports[name] = (int(grpc_address.rpartition(":")[2]), int(http_address.rpartition(":")[2]))

    async def until_whole(self) -> None:
        """Wait until every router is connected to every running worker and all are registered. Raises TimeoutError."""
        async with asyncio.timeout(_WHOLE_S):
            for router in self.living("router"):
                while not await self._knows_all(router):  # noqa: ASYNC110 -- no event is visible from outside
                    await asyncio.sleep(_PAUSE_S)

    async def exit_code(self, name: str) -> int:
        """Raises TimeoutError."""
        return await asyncio.wait_for(self.members[name].process.wait(), _EXIT_S)

    def signal(self, name: str, number: signal.Signals) -> None:
        if self.members[name].process.returncode is None:
            self.members[name].send_signal(number)

    def pid(self, name: str) -> int:
        return self.members[name].process.pid

    def set_clock(self, name: str, offset_s: float) -> None:
        """Set the offset of the member's wall clock."""
        with open(self._clock(name), "r+b" if self._clock(name).exists() else "wb") as file:
            file.write(struct.pack("<d", offset_s))

    def disk(self, name: str) -> Path:
        return self._disks[name]

    async def replace_redis(self) -> None:
        """End Redis and start an empty one at the same address."""
        await self.redis.wait()
        self.redis = await RedisServer.start(self.redis.port)

    async def stop(self) -> None:
        await self.cluster.stop()
        await self.redis.stop()
        self._remove_disks()

    async def _knows_all(self, router: str) -> bool:
        with suppress(Exception):
            async with self.cluster.channel(router) as channel:
                status = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=5)
            seen = {
                m.member_id: m.incarnation
                for m in status.members
                if m.figures or m.role == admin_pb2.MEMBER_ROLE_ROUTER
            }
            return all(seen.get(name) == self.members[name].incarnation for name in self.living())
        return False

    def _flags(self, name: str) -> tuple[str, ...]:
        flags: tuple[str, ...] = ()
        if name.startswith("router"):
            grpc_port, http_port = self._ports.get(name) or (free_port(), free_port())
            flags = ("--grpc-port", str(grpc_port), "--port", str(http_port), "--placement", "least-loaded")
            flags += ("--insecure", "on") if self.far is not None else ()
        else:
            flags = _FLAGS
        if name in self._disks:
            flags += (*_TIERS, "--prefix-disk", str(self._disks[name]))
        if self.far is not None:
            is_far = name == FAR_MEMBER
            flags += ("--host", self.far.side.address if is_far else self.far.near_address)
            flags += ("--kv-transports", "tcp") if is_far else ()
        return flags

    def _launch(self, name: str) -> Launch | None:
        """Return how to start a member that is not started as the others: as a program of its own, so that it can have
        its own clock, or runs on the far host. No process outlives this one."""
        words: tuple[str, ...] = ()
        if self.far is not None and name == FAR_MEMBER:
            words += tuple(self.far.side.command())
        if self._shim is not None:
            words += ("env", f"LD_PRELOAD={self._shim}", f"CLOCK_SHIM={self._clock(name)}")
        if not words:
            return None
        survives_none = ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()
        return partial(executed, wrapper=(*survives_none, *words))

    def _clock(self, name: str) -> Path:
        return self._directory / f"{name}.clock"

    def prepare_shim(self) -> None:
        """Build the library that gives each member a clock of its own, or record why it is missing."""
        if shutil.which("gcc") is None:
            self.missing["clock_jump"] = "no gcc here, for the clock that can jump"
            return
        shim = self._directory / "clock_shim.so"
        built = subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(_SHIM_SOURCE), "-ldl", "-lm"], capture_output=True
        )
        if built.returncode:
            self.missing["clock_jump"] = f"gcc: {built.stderr.decode(errors='replace')[:200]}"
        else:
            self._shim = shim

    def _prepare_disks(self) -> None:
        for name in self.names("prefill"):
            disk = self._directory / f"{name}.disk"
            disk.mkdir()
            mounted = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tandem-chaos", str(disk)], capture_output=True
            )
            if mounted.returncode:
                self.missing["disk_full"] = (
                    f"no tmpfs can be mounted: {mounted.stderr.decode(errors='replace').strip()}"
                )
                return
            self._disks[name] = disk

    def _remove_disks(self) -> None:
        for disk in self._disks.values():
            subprocess.run(["umount", str(disk)], check=False, capture_output=True)


FAR_MEMBER = "decode1"  # the one on the far host, where there is one


@asynccontextmanager
async def chaos_cluster(directory: Path) -> AsyncIterator[ChaosCluster]:
    """Start a complete cluster, each member as a program of its own. On exit all of it is removed."""
    async with AsyncExitStack() as exits:
        far, no_far = exits.enter_context(_far_host_if_any())
        chaos = await exits.enter_async_context(_prepared(directory, far=far, launch=executed))
        if far is None:
            chaos.missing["link_cut"] = no_far
        chaos.prepare_shim()
        await chaos.start_all()
        yield chaos


@asynccontextmanager
async def forked_cluster(directory: Path) -> AsyncIterator[ChaosCluster]:
    """Start a cluster whose members are forked, which takes a fifth of the processor time. On exit all of it is
    removed."""
    async with _prepared(directory, far=None, launch=forked) as chaos:
        chaos.missing |= dict.fromkeys(("link_cut", "clock_jump"), "forked members share one network and one clock")
        await chaos.start_all()
        yield chaos


@asynccontextmanager
async def _prepared(directory: Path, *, far: FarHost | None, launch: Launch) -> AsyncIterator[ChaosCluster]:
    """Start what a cluster needs beside its members."""
    async with AsyncExitStack() as exits:
        redis = await RedisServer.start()
        url = redis.url
        if far is not None:
            url = await exits.enter_async_context(_forwarded(redis.port, far.near_address))
        holds = Holds(directory)
        await holds.start()
        exits.push_async_callback(holds.stop)
        chaos = ChaosCluster(directory, redis, url, holds, far=far, launch=launch)
        exits.push_async_callback(chaos.stop)
        yield chaos


@contextmanager
def _far_host_if_any() -> Iterator[tuple[FarHost | None, str]]:
    made = far_host()
    try:
        host = made.__enter__()
    except pytest.skip.Exception as reason:
        yield None, str(reason)
        return
    try:
        yield host, ""
    finally:
        made.__exit__(*sys.exc_info())


@asynccontextmanager
async def _forwarded(port: int, address: str) -> AsyncIterator[str]:
    """Make Redis, which listens on loopback only, reachable from the far host. A connection that cannot be
    forwarded is refused."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))
        finally:
            writer.close()
            other_writer.close()

    server = await asyncio.start_server(forward, address)
    try:
        yield f"redis://{address}:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
