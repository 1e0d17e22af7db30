"""Starts children by forking processes that have imported their modules (`fork_server.py`).

Owns the fork servers. A child that no server can fork is started as a new program, which behaves the same and takes
seconds longer.
"""

import asyncio
import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from cli.local.child import MAX_LINE_BYTES, ChildProcess, ChildSpec, ForkedProcess, Pipe, environment_of, executed
from cli.local.fork_server import MESSAGE_BYTES, PID_BYTES, ROOM
from cluster.process import die_with_parent

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_CHILD_SUBREAPER = 36
_SERVER = "cli.local.fork_server"
# The modules of each kind of child, and what they import only while they start.
ROUTER_MODULES = ("router.app", "pydantic.v1")
WORKER_MODULES = (
    *("worker.app", "torch.nn.attention.varlen"),
    *("transformers.modeling_layers", "transformers.processing_utils"),
)
_WORKERS = ("worker", "prefill_worker", "decode_worker")


class ForkServer:
    """A process that imports `modules` and then forks on request. Its children become children of this process, a
    subreaper, and outlive the server. `environment`: what those modules read while they are imported.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        _become_subreaper(True)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-u", "-m", _SERVER, str(theirs.fileno()), str(os.getpid()), *modules, ROOM),
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
        if len(order) > MESSAGE_BYTES:
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
        _become_subreaper(False)  # what is forked already stays a child of this process


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
        """End the servers; what they have forked stays."""
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
        return reply.recv(PID_BYTES)
    finally:
        loop.remove_reader(reply)
