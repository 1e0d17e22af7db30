"""Members forked from a process that has imported their code already, for tests.

A worker imports torch, transformers and Tandem's modules for 4 s of processor time; that is most of its start. A fork
server imports them once per test process and forks each member from there. A member is a separate process: it runs its
module as `__main__` with its own arguments, environment and output, and is stopped and killed by its id. The server has
one thread and uses nothing of what it imports; gRPC starts with a member's first server or channel.

Forked members share the seed of `hash()` and all that is read before Python code runs, such as LD_PRELOAD and
OMP_NUM_THREADS. `test_tandem_command.py`, `test_tandem_up.py`, `test_router_process.py`, `make soak` and
`make chaos` start members as programs of their own.
"""

import asyncio
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from cli.local.fork_server import ROUTER_MODULES, WORKER_MODULES, run_as_program
from cluster.process import die_with_parent

_MESSAGE_BYTES = 1 << 16
_PID_BYTES = 8
_CLONE_NEWNET = 0x40000000  # of setns(2); os.setns comes with Python 3.12


class ForkedProcess:
    """A member, with the part of `asyncio.subprocess.Process` that tests use. It belongs to the event loop on which it
    was made.
    """

    def __init__(self, pid: int, pidfd: int, report: socket.socket, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._loop.add_reader(report, self._on_report)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):  # its report is on the way
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _on_report(self) -> None:
        status = self._report.recv(_PID_BYTES)  # nothing: the server was killed, and the kernel killed this one with it
        self._loop.remove_reader(self._report)
        self.returncode = int.from_bytes(status, signed=True) if status else -signal.SIGKILL
        self._report.close()
        os.close(self._pidfd)
        self._ended.set()


class ForkServer:
    """The test's side: one process that imports `modules` and then forks on request."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        watched = os.pidfd_open(os.getpid())
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-u", "-m", __name__, str(theirs.fileno()), str(watched), *modules),
                pass_fds=(theirs.fileno(), watched),
                stdin=subprocess.DEVNULL,
            )
        os.close(watched)

    async def spawn(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], *, network: str = ""
    ) -> ForkedProcess:
        """Start `python -m module arguments`, in the network namespace of this name if there is one. Its stdout and
        stderr are on the process's `stdout`."""
        words = {"module": module, "arguments": list(arguments), "environment": dict(environment), "network": network}
        order = json.dumps(words).encode()
        assert len(order) < _MESSAGE_BYTES
        read_end, write_end = os.pipe()
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            with suppress(BrokenPipeError):  # then nothing can be read from `report` either
                socket.send_fds(self._control, [order], [write_end, theirs.fileno()])
            os.close(write_end)
        stdout = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(read_end, "rb", 0))
        report.setblocking(False)
        await _until_readable(report)
        pid, descriptors, _, _ = socket.recv_fds(report, _PID_BYTES, 1)
        if not pid:
            raise RuntimeError(f"the fork server has ended with status {self._process.wait()}")
        return ForkedProcess(int.from_bytes(pid), descriptors[0], report, stdout)

    def kill(self) -> None:
        """End the server and its members."""
        self._process.kill()
        self._process.wait()


@cache
def router_forks() -> ForkServer:
    """The fork server of routers: one per test process, from its first use to the end of that process."""
    return ForkServer(ROUTER_MODULES)


@cache
def worker_forks() -> ForkServer:
    """The fork server of workers: one per test process, from its first use to the end of that process."""
    return ForkServer(WORKER_MODULES)


async def _until_readable(side: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(side, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(side)


class _Server:
    """The process that forks. Its one thread waits for orders and for the ends of members."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent  # a pidfd
        self._reports: dict[int, socket.socket] = {}
        self._wakeup, wake = socket.socketpair()
        for end in (self._wakeup, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the test and its members; they end this one
        self._wake = wake

    def run(self) -> None:
        """Serve until the test's process ends. The kernel then kills the members."""
        watched: list[socket.socket | int] = [self._control, self._parent, self._wakeup]
        while True:
            readable, _, _ = select.select(watched, [], [])
            if self._wakeup in readable:
                self._wakeup.recv(_MESSAGE_BYTES)
                self._report_ended()
            if self._parent in readable:
                return
            if self._control in readable:
                order, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 2)
                if not order:
                    return
                self._fork(json.loads(order), *descriptors)

    def _fork(self, order: dict[str, object], output: int, report: int) -> None:
        pid = os.fork()
        if pid == 0:
            _become(order, output)
        os.close(output)
        self._reports[pid] = side = socket.socket(fileno=report)
        pidfd = os.pidfd_open(pid)  # it cannot be another's: the process is reaped by this thread alone
        with suppress(BrokenPipeError):  # the test has ended
            socket.send_fds(side, [pid.to_bytes(_PID_BYTES)], [pidfd])
        os.close(pidfd)

    def _report_ended(self) -> None:
        while self._reports:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._reports.pop(pid) as side, suppress(BrokenPipeError):  # the test has ended
                side.send(os.waitstatus_to_exitcode(status).to_bytes(_PID_BYTES, signed=True))


def _become(order: dict[str, object], output: int) -> NoReturn:
    """Turns the forked process into the member; `python -m` sets up the same things."""
    die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    module, arguments, environment = order["module"], order["arguments"], order["environment"]
    assert isinstance(module, str) and isinstance(arguments, list) and isinstance(environment, dict)
    if order["network"]:
        _enter(Path("/run/netns") / str(order["network"]))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    run_as_program(module)


def _enter(network: Path) -> None:
    """Enter a network namespace, as `ip netns exec` does."""
    library = ctypes.CDLL(None, use_errno=True)
    with network.open() as entrance:
        if library.setns(entrance.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {network}")


def _serve(control: int, parent: int, modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "no thread survives a fork"
    gc.collect()
    gc.freeze()  # so that no collection in a member writes to the pages that they share
    _Server(socket.socket(fileno=control), parent).run()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
