"""A child process of a cluster on this machine: its command, its start, and its output.

A child prints `ready name=value ...` on stdout when it is ready; every other line is log. It cannot outlive its parent,
and it has a session of its own, so that a Ctrl-C in the terminal does not reach it.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.process import die_with_parent


@dataclass(frozen=True, slots=True)
class Pipe:
    """The end of a pipe from which a process's output is read; it closes itself when the pipe has ended."""

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport

    @staticmethod
    async def read(end: int, limit: int) -> "Pipe":
        """Read from this descriptor, which now belongs to the pipe. `limit`: bytes of a line."""
        reader = asyncio.StreamReader(limit)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", 0)
        )
        return Pipe(reader, transport)


class ForkedProcess:
    """A child with the part of `asyncio.subprocess.Process` that its users need. It belongs to the event loop on which
    it was started."""

    def __init__(self, pid: int, stdout: "Pipe", stderr: "Pipe") -> None:
        self.pid = pid
        self.stdout, self.stderr = stdout.reader, stderr.reader
        self._pipes = (stdout, stderr)
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)  # of this process: nothing else waits for it
        self._loop.add_reader(self._pidfd, self._on_end)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Stop reading its output: another process may hold the pipes."""
        for pipe in self._pipes:
            pipe.transport.close()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._pidfd)
        self._ended.set()


MAX_LINE_BYTES = 1 << 20
_KEPT_LINES = 20


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The command of a child. `environment` is added to the parent's."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The module that it runs as `python -m` does; empty for another program."""
        return self.arguments[2] if self.arguments[:2] == (sys.executable, "-m") else ""

    def with_arguments(self, arguments: Sequence[str]) -> "ChildSpec":
        return ChildSpec(self.name, (*self.arguments, *arguments), self.environment)


ChildProcess = asyncio.subprocess.Process | ForkedProcess
Launch = Callable[[ChildSpec], Awaitable[ChildProcess]]


async def executed(spec: ChildSpec) -> ChildProcess:
    """Start a child as a new program."""
    return await asyncio.create_subprocess_exec(
        *spec.arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env=environment_of(spec),
        limit=MAX_LINE_BYTES,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def environment_of(spec: ChildSpec) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment}


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """The end of a child. `status` is negative for a signal, as in subprocess."""

    status: int
    last_lines: tuple[str, ...]


class Child:
    """Reads a process's output. `echo` receives each line of its log."""

    def __init__(self, process: ChildProcess, echo: Callable[[str], None]) -> None:
        self._process = process
        self._echo = echo
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self._take_output)),
            asyncio.create_task(self._read(process.stderr, self._take_log)),
        ]

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> dict[str, str] | None:
        """Wait for the ready line and return its fields; None if the child ended without one."""
        ended = asyncio.ensure_future(self.wait())
        events: list[asyncio.Future[Any]] = [self._ready, ended]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        return self._ready.result() if self._ready.done() else None

    async def wait(self) -> ChildEnd:
        """Wait until it has ended and its output is read."""
        status = await self._process.wait()
        await asyncio.wait(self._readers, timeout=1.0)  # a grandchild may hold the pipe open
        return ChildEnd(status, tuple(self._lines))

    def terminate(self) -> None:
        """Ask it to finish its work and exit."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def close(self) -> None:
        """Stop reading its output, after its end: a grandchild may still hold the pipe."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        if isinstance(self._process, ForkedProcess):
            self._process.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _read(self, stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the limit; the stream continues after it
                continue
            if not line:
                return
            take(line.decode(errors="replace").rstrip("\n"))

    def _take_output(self, line: str) -> None:
        if line.split(" ", 1)[0] == "ready" and not self._ready.done():
            self._ready.set_result(dict(word.split("=", 1) for word in line.split()[1:] if "=" in word))
        else:
            self._take_log(line)

    def _take_log(self, line: str) -> None:
        self._lines.append(line)
        self._echo(line)
