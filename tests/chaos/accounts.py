"""Reads the resources that remain after a round when the cluster is idle: blocks, mappings, descriptors, threads,
memory."""

import asyncio
import contextlib
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tests.chaos.views import Views

_FREE_S = 75.0  # a ticket without an importer ends by itself after a minute
_PAUSE_S = 0.05
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MORE_FILES, _MORE_THREADS = 24, 16  # above the first looks: connections and pools that were not needed before
_FIRST_LOOKS = 3  # until most peers of a process have connected
_NOBODYS = ("free", "cached")
_LISTENING, _CONNECTION_STATES = "0A", {"01": "open", "08": "closed by the other end"}  # in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class ProcessUse:
    files: int
    threads: int
    mapped_pools: int  # its own shared memory and that of others
    rss_mb: float


@dataclass(frozen=True, slots=True)
class Account:
    """`leaked`: blocks that are neither free nor cached, by worker and state."""

    leaked: dict[str, dict[str, int]]
    violations: dict[str, str]
    remains: tuple[str, ...]  # what a process has kept, in words
    free_after_s: float
    uses: dict[str, ProcessUse] = field(default_factory=dict)


async def workers_account(views: Views, workers: list[str]) -> tuple[dict[str, dict[str, int]], dict[str, str], float]:
    """Return leaked blocks, violations, and the time until there were none. A worker that does not answer counts as
    leaking."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    leaked: dict[str, dict[str, int]] = {}
    violations: dict[str, str] = {}
    waiting = list(workers)
    while waiting and loop.time() < began_s + _FREE_S:
        for name in tuple(waiting):
            try:
                report = await views.inspect(name)
            except grpc.RpcError as error:
                leaked[name] = {str(error.code()): 1} if isinstance(error, grpc.aio.AioRpcError) else {"silent": 1}
                continue
            if report.violation:
                violations[name] = report.violation
            leaked[name] = {state: num for state, num in report.blocks.items() if state not in _NOBODYS and num}
            if not leaked[name]:
                del leaked[name]
                waiting.remove(name)
        if waiting:
            await asyncio.sleep(_PAUSE_S)
    return leaked, violations, loop.time() - began_s


class ProcessBook:
    """The resource use of every process at its first rests, and now."""

    def __init__(self) -> None:
        self.first: dict[int, ProcessUse] = {}
        self.last: dict[int, ProcessUse] = {}
        self.names: dict[int, str] = {}
        self.num_looks: dict[int, int] = {}
        self._most: dict[int, tuple[int, int]] = {}  # files and threads at the first looks

    def look(self, pids: dict[str, int]) -> tuple[dict[str, ProcessUse], tuple[str, ...]]:
        """Return the resource use by member name, and what has grown."""
        uses, remains = {}, []
        for name, pid in pids.items():
            use = uses[name] = process_use(pid)
            self.first.setdefault(pid, use)
            self.last[pid], self.names[pid] = use, name
            self.num_looks[pid] = self.num_looks.get(pid, 0) + 1
            num_files, num_threads = self._at_first(pid, use)
            if use.files > num_files + _MORE_FILES:
                remains.append(f"{name}: {use.files} files, {num_files} before; now {_files_by_kind(pid)}")
            if use.threads > num_threads + _MORE_THREADS:
                remains.append(f"{name}: {use.threads} threads, {num_threads} before")
            if use.mapped_pools > len(pids):
                remains.append(f"{name}: {use.mapped_pools} pools are mapped")
        return uses, tuple(remains)

    def _at_first(self, pid: int, use: ProcessUse) -> tuple[int, int]:
        """Return the most files and threads of the process at its first looks. `use`: of this one."""
        if self.num_looks[pid] <= _FIRST_LOOKS:
            num_files, num_threads = self._most.get(pid, (0, 0))
            self._most[pid] = max(num_files, use.files), max(num_threads, use.threads)
        return self._most[pid]

    def longest(self) -> dict[str, tuple[ProcessUse, ProcessUse, int]]:
        """Return for each member the process that was measured most often: first value, last value, number of
        measurements."""
        best: dict[str, int] = {}
        for pid, name in self.names.items():
            if name not in best or self.num_looks[pid] > self.num_looks[best[name]]:
                best[name] = pid
        return {name: (self.first[pid], self.last[pid], self.num_looks[pid]) for name, pid in sorted(best.items())}


def process_use(pid: int) -> ProcessUse:
    process = Path(f"/proc/{pid}")
    pools = set(re.findall(r" (\d+) +/memfd:", (process / "maps").read_text()))
    return ProcessUse(
        files=len(os.listdir(process / "fd")),
        threads=len(os.listdir(process / "task")),
        mapped_pools=len(pools),
        rss_mb=round(int((process / "statm").read_text().split()[1]) * _PAGE_BYTES / 1e6, 1),
    )


def _files_by_kind(pid: int) -> str:
    """Return how many open files of each kind a process has. Connections are told apart by the server's port."""
    process, links = Path(f"/proc/{pid}"), list[str]()
    for file in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(file))
    sockets = _sockets(process)
    kinds = Counter(sockets.get(link, re.sub(r"[0-9]+", "#", link)) for link in links)
    return ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())


def _sockets(process: Path) -> dict[str, str]:
    """Return what each TCP socket is, by its link under /proc/PID/fd."""
    found, connections, served = dict[str, str](), list[tuple[str, str, int, int]](), set[int]()
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            _, local, remote, state, *_, inode = line.split()[:10]
            local_port, remote_port = (int(end.rsplit(":")[-1], 16) for end in (local, remote))
            if state == _LISTENING:
                found[f"socket:[{inode}]"] = "listening"
                served.add(local_port)
            else:
                connections.append((inode, _CONNECTION_STATES.get(state, "closing"), local_port, remote_port))
    for inode, state, local_port, remote_port in connections:
        where = f"served at port {local_port}" if local_port in served else f"opened to port {remote_port}"
        found[f"socket:[{inode}]"] = f"{where} and {state}"
    return found
