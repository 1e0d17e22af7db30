"""A process forked by a fork server, as its parent uses it."""

import asyncio
import os
import signal
from dataclasses import dataclass


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
