"""Fork servers: processes that have imported the code of members and fork them, so that a start does not import torch
again.

`Forks` starts the children of a cluster through its fork servers, and a child that no server can fork as a new program,
which behaves the same and takes seconds longer. The rest of this module is the server's own program:

    python -m cli.local.fork_server CONTROL PARENT MODULE...

`PARENT` is the process that started it, and `CONTROL` a socket from it. A member is a process as `python -m` starts
one: it runs its module as `__main__` with its own arguments, environment and output, in a session of its own. It is a
child of PARENT, a subreaper, not of this process: it is stopped, waited for and killed with its parent like any other
child, and outlives this process.

The server has one thread and calls nothing that it imports. If an import has started a thread or opened a device, it
ends instead of forking, and its parent starts members as new programs.
"""

import asyncio
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from cli.local.child import MAX_LINE_BYTES, ChildProcess, ChildSpec, ForkedProcess, Pipe, environment_of, executed
from cluster.process import die_with_parent, lasting

# The modules of each kind of child, and modules that they import only when they start.
ROUTER_MODULES = ("router.app", "pydantic.v1")
WORKER_MODULES = (
    *("worker.app", "torch.nn.attention.varlen"),
    *("transformers.modeling_layers", "transformers.processing_utils"),
)
_WORKERS = ("worker", "prefill_worker", "decode_worker")
_SERVER = "cli.local.fork_server"
_MESSAGE_BYTES = 1 << 16
_PID_BYTES = 8
# What `ps` shows of a member is written over the arguments of this process, which end with room for that.
_ROOM = " " * 8192
_DESCRIPTORS = 4  # of an order: stdout, stderr, the permission to go on, and the reply
_ON_INTERRUPT = signal.getsignal(signal.SIGINT)  # of a program that is started as this process was
_HARMLESS_FILES = ("/dev/null", "/dev/urandom")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """A process that imports `modules` and then forks on request. Its children become children of this process, a
    subreaper, and outlive the server. `environment`: the variables that those modules read at import.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        _become_subreaper(True)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-u", "-m", _SERVER, str(theirs.fileno()), str(os.getpid()), *modules, _ROOM),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a module that cannot be imported is reported by the child
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def spawn(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        merged: bool = False,
        limit: int = 1 << 16,
    ) -> ForkedProcess | None:
        """Start `python -m module arguments`. `merged`: its stderr goes to its stdout; `limit`: bytes of a line that
        is read from them. Waits until the server has its imports; None if it has ended."""
        order = json.dumps({"module": module, "arguments": list(arguments), "environment": dict(environment)}).encode()
        if len(order) > _MESSAGE_BYTES:
            return None
        output, log, permission = os.pipe(), os.pipe(), os.pipe()
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = [output[1], output[1] if merged else log[1], permission[0], theirs.fileno()]
        try:
            with theirs, suppress(ConnectionError):  # then nothing can be read from `reply` either
                socket.send_fds(self._control, [order], given)
            pid = int.from_bytes(await _received(reply))
            if not pid:
                return None
            stdout, stderr = [await Pipe.read(os.dup(end), limit) for end in (output[0], log[0])]
            child = ForkedProcess(pid, stdout, stderr)
            with suppress(BrokenPipeError):  # it was killed already
                os.write(permission[1], b"!")  # a child without it ends at once
            return child
        finally:
            reply.close()
            for end in (*output, *log, *permission):
                os.close(end)

    def kill(self) -> None:
        """End the server. Its children stay."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        _become_subreaper(False)  # members that were forked before stay children of this process


class Forks:
    """The fork servers of a cluster on this machine, one for routers, which never have torch, and one for workers. They
    begin their imports at once. `threads`: the environment that makes workers use their number of threads."""

    def __init__(self, threads: Mapping[str, str]) -> None:
        self._threads = dict(threads)
        self._workers = ForkServer(WORKER_MODULES, threads)
        self._routers = ForkServer(ROUTER_MODULES, {})

    async def launch(self, spec: ChildSpec) -> ChildProcess:
        """Start a child: a Launch for the supervisor."""
        environment = environment_of(spec)
        server = None
        if spec.module == "router":
            server = self._routers
        elif spec.module in _WORKERS and self._threads.items() <= environment.items():
            server = self._workers
        arguments = spec.arguments[3:]
        child = await server.spawn(spec.module, arguments, environment, limit=MAX_LINE_BYTES) if server else None
        return child or await executed(spec)

    def close(self) -> None:
        """End the servers. Their members keep running."""
        self._routers.kill()
        self._workers.kill()


def _become_subreaper(is_one: bool) -> None:
    """Start or stop being a subreaper: the parent of descendants whose own parents have ended."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(is_one), 0, 0, 0)


async def _received(reply: socket.socket) -> bytes:
    """Return the next message; nothing if the other side has ended."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    reply.setblocking(False)
    loop.add_reader(reply, readable.set)
    try:
        await readable.wait()
        return reply.recv(_PID_BYTES)
    finally:
        loop.remove_reader(reply)


def serve(control: socket.socket, parent: int) -> None:
    """Fork a member per order until the parent ends."""
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _DESCRIPTORS)
        if not order:
            return
        pid = _fork_twice(json.loads(order), descriptors, parent)
        with socket.socket(fileno=descriptors[-1]) as reply, suppress(BrokenPipeError):  # then it does not go on
            reply.send(pid.to_bytes(_PID_BYTES))
        for descriptor in descriptors[:-1]:
            os.close(descriptor)


def _fork_twice(order: dict[str, object], descriptors: Sequence[int], parent: int) -> int:
    """Fork a process that forks the member and ends, and return the member's process id, or 0 if there is none. When
    this returns, the member is a child of the parent."""
    output, log, permission, _ = descriptors
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            member = os.fork()
            if member == 0:
                _become(order, output, log, permission, parent)
            os.write(write_end, member.to_bytes(_PID_BYTES))
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(between, 0)
    pid = int.from_bytes(os.read(read_end, _PID_BYTES))
    os.close(read_end)
    return pid


def _become(order: dict[str, object], output: int, log: int, permission: int, parent: int) -> NoReturn:
    """Turn the forked process into the member, once the parent has its process id."""
    _close_all_but({0, 1, 2, output, log, permission})  # the parent would not see that the server has ended
    if not os.read(permission, 1):  # the parent no longer wants it
        os._exit(0)
    die_with_parent()
    if os.getppid() != parent:  # it ended before
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, _ON_INTERRUPT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (log, 2)):
        os.dup2(source, target)
    _close_all_but({0, 1, 2})
    module, arguments, environment = order["module"], order["arguments"], order["environment"]
    assert isinstance(module, str) and isinstance(arguments, list) and isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    show_arguments((sys.executable, "-m", module, *arguments))
    run_as_program(module)


def _close_all_but(kept: set[int]) -> None:
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with suppress(OSError):  # the listing's own
            os.close(descriptor)


def run_as_program(module: str) -> NoReturn:
    """Run a module as `python -m` does, and end this process with its status."""
    status = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
    except BaseException:  # noqa: BLE001 -- the interpreter would print it and end likewise
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def show_arguments(arguments: Sequence[str]) -> None:
    """Write over the arguments that the kernel shows for this process, cut to their length."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5); the third is first here
    text = b"".join(argument.encode() + b"\0" for argument in arguments)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


def why_not_forked() -> str:
    """Return why a child of this process would lack something that its modules have begun, or an empty string."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "an import has started a thread"
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            file = os.readlink(f"/proc/self/fd/{descriptor}")
            if file.startswith("/dev/") and file not in _HARMLESS_FILES:
                return f"an import has opened {file}"
    return ""


def main(control: int, parent: int, modules: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with lasting():  # no collection in a member writes to the pages that they share
        for module in modules:
            import_module(module)
    show_arguments((sys.executable, "-m", _SERVER, *modules))
    if why := why_not_forked():
        sys.exit(f"fork server: {why}")
    serve(socket.socket(fileno=control), parent)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:-1])
