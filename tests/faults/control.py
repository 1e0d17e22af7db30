"""Faults on command: a test orders a fault, and a worker in another process reports when it has happened.

One Unix socket. The worker sends `hello NAME`; the test sends `inject FAULT`, and the worker answers `ordered` and
later `injected FAULT`. It answers `ask` with `asked`. Everything that is held continues after the test sends `go`.
"""

import asyncio
from pathlib import Path

from tests.faults.faulty_transport import Fault


class OrderedFaults:
    """The worker's end: a FaultSource with at most one order at a time."""

    def __init__(self) -> None:
        self._ordered: Fault | None = None
        self._go_on = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    async def connect(self, path: str, name: str) -> None:
        reader, self._writer = await asyncio.open_unix_connection(path)
        self._say(f"hello {name}")
        self._listening = asyncio.create_task(self._listen(reader))

    def next(self, transport: str) -> Fault | None:
        fault, self._ordered = self._ordered, None
        return fault

    def injected(self, fault: Fault) -> None:
        self._say(f"injected {fault}")

    async def may_go_on(self) -> None:
        await self._go_on.wait()
        self._go_on.clear()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            word, _, fault = line.decode().strip().partition(" ")
            if word == "go":
                self._go_on.set()
            elif word == "ask":
                self._say("asked")
            else:
                self._go_on.clear()  # of an earlier hold that ended before it was let go
                self._ordered = Fault(fault)
                self._say("ordered")

    def _say(self, what: str) -> None:
        assert self._writer is not None
        self._writer.write(f"{what}\n".encode())


class Worker:
    """A connected worker, as the test sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def order(self, fault: Fault) -> None:
        """Inject a fault into the next channel that opens, or into the next read of an open one."""
        self._writer.write(f"inject {fault}\n".encode())
        assert await self._hear() == ["ordered"]

    async def injected(self) -> Fault:
        """Wait until the order has been carried out."""
        word, fault = await self._hear()
        assert word == "injected"
        return Fault(fault)

    async def has_injected(self) -> bool:
        """Return whether the order had been carried out when this question reached the worker."""
        self._writer.write(b"ask\n")
        heard = [await self._hear()]
        while heard[-1] != ["asked"]:
            heard.append(await self._hear())
        return len(heard) > 1

    async def _hear(self) -> list[str]:
        line = await self._reader.readline()
        assert line, "the worker is gone"
        return line.decode().split()

    def let_go(self) -> None:
        self._writer.write(b"go\n")


class FaultControl:
    """The test's end: a socket at `path`, and the connected workers by member id. A restarted worker replaces its
    predecessor."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "faults"
        self._workers: dict[str, Worker] = {}
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, str(self.path))

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def worker(self, name: str) -> Worker:
        async with self._changed:
            await self._changed.wait_for(lambda: name in self._workers)
        return self._workers[name]

    def forget(self, name: str) -> None:
        """Forget a worker that is about to die. The next call of `worker` waits for its successor."""
        self._workers.pop(name, None)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = (await reader.readline()).decode().split()[1]
        async with self._changed:
            self._workers[name] = Worker(reader, writer)
            self._changed.notify_all()
