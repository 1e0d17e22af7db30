"""A process in which one side of a read runs, to be stopped, killed and cut off. Forked from a server that has imported
everything but NIXL's library, so that a start costs no imports."""

import asyncio
import ctypes
import multiprocessing
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

DEADLINE_S = 60.0

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["tests.contract.rigs.processes.nixl_process", "tests.contract.rigs.processes.short_exporter_process"]
)
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
# What the process runs, with its end of the connection and an argument.
Role = Callable[["Connection[object, object]", Any], None]


class Process:
    """The test's end of the process. One question is in progress at a time."""

    def __init__(self, connection: "Connection[object, object]", process_id: int) -> None:
        self._connection, self.process_id = connection, process_id

    def signal(self, number: int) -> None:
        os.kill(self.process_id, number)

    async def answer(self) -> object:
        return await asyncio.to_thread(self._receive)

    async def ask(self, *words: object) -> object:
        self._connection.send(words)
        return await self.answer()

    def _receive(self) -> object:
        assert self._connection.poll(DEADLINE_S), "no answer"
        return self._connection.recv()


@asynccontextmanager
async def process(
    role: Role,
    argument: object,
    *,
    environment: Mapping[str, str] | None = None,
    namespace: str = "",
) -> AsyncIterator[Process]:
    """Run the process, and kill it at the end. `namespace`: of its network, if not that of this process."""
    mine, theirs = _FORKS.Pipe()
    started = _FORKS.Process(target=_begin, args=(role, theirs, argument, environment or {}, namespace), daemon=True)
    await asyncio.to_thread(started.start)
    theirs.close()
    assert started.pid is not None
    try:
        yield Process(mine, started.pid)
    finally:
        started.kill()
        await asyncio.to_thread(started.join)
        mine.close()


def _begin(
    role: Role,
    connection: "Connection[object, object]",
    argument: object,
    environment: Mapping[str, str],
    namespace: str,
) -> None:
    for name in [name for name in os.environ if name.startswith("UCX_")]:  # of the test that started the server
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    if namespace:
        _enter(namespace)
    role(connection, argument)


def _enter(namespace: str) -> None:
    """Enter the network namespace as `ip netns exec` does: with its own view of /sys, where UCX looks for
    interfaces."""
    library = ctypes.CDLL(None)
    with Path("/run/netns", namespace).open() as entrance:
        assert library.setns(entrance.fileno(), _CLONE_NEWNET) == 0
    assert library.unshare(_CLONE_NEWNS) == 0
    for mount in (["--make-rslave", "/"], ["-t", "sysfs", namespace, "/sys"]):
        subprocess.run(["mount", *mount], check=True)
