"""The Ray actor of one worker: supervises the worker's process on the node where Ray has placed the actor.

Ray places the actor and starts it elsewhere when its node is lost. The supervisor restarts the worker's process with a
growing backoff, as `tandem up` does on one machine, so a worker that crashes at each start is no loop of actor starts.
The kernel ends the worker's process with the actor's. Nothing that a request needs goes through the actor.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from cli.local.child import ChildSpec
from cli.local.supervisor import Supervisor
from cluster.errors import TandemError

_ANY_ADDRESS = frozenset({"0.0.0.0", "::"})
_NEXT_TRY_S = 15.0  # after settings were refused: a file may appear on the node

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class HostView:
    """The state of an actor's worker. `fields` are those of its last first ready line; `refusal` is why it cannot start
    until an operator changes something."""

    node: str
    is_up: bool
    pid: int
    fields: Mapping[str, str]
    problem: str
    refusal: str


class MemberHost:
    """The actor. It has no coroutine of its own: Ray would run all its methods on one event loop, one at a time."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """`arguments` as in `ChildSpec`; they run with this node's Python, at this node's address."""
        context = ray.get_runtime_context()
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        own = (*_address_flags(arguments, address), "--local-rank=0", "--local-world-size=1")
        self._loop = asyncio.SelectorEventLoop()
        self._host = _Host(
            ChildSpec(name, (sys.executable, *arguments[1:], *own), dict(environment)), str(context.get_node_id())
        )
        started: Future[None] = Future()
        threading.Thread(target=self._run, args=(started,), name="supervisor", daemon=True).start()
        started.result()

    def view(self, seen: HostView | None, timeout_s: float) -> HostView:
        """Return the state as soon as it differs from `seen`, at the latest after `timeout_s`."""
        return self._on_loop(self._host.view(seen, timeout_s))

    def drain(self, grace_s: float) -> None:
        """Drain the worker, kill it after `grace_s`, and return when it has ended. It is not started again."""
        self._on_loop(self._host.drain(grace_s))

    def _on_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run(self, started: "Future[None]") -> None:
        # Ray installs uvloop, whose policy watches children on the main thread only.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        asyncio.set_event_loop(self._loop)
        self._supervising = self._loop.create_task(self._host.supervise(started))
        self._loop.run_forever()


class _Host:
    """The supervisor of one worker and its state. Everything runs on one event loop."""

    def __init__(self, spec: ChildSpec, node: str) -> None:
        self._spec = spec
        self._node = node
        self._fields: dict[str, str] = {}
        self._refusal = _missing_key(spec.arguments)
        self._is_drained = False

    async def supervise(self, started: "Future[None]") -> None:
        self._changed = asyncio.Event()
        self._supervisor = Supervisor(say=_say, echo=lambda _, line: _say(line))
        started.set_result(None)
        while self._refusal:
            await asyncio.sleep(_NEXT_TRY_S)
            self._set_refusal(_missing_key(self._spec.arguments))
        if self._is_drained:
            return
        self._supervisor.start([self._spec])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_changes())
            tasks.create_task(self._follow_ready())
            tasks.create_task(self._follow_failure())

    async def view(self, seen: HostView | None, timeout_s: float) -> HostView:
        try:
            async with asyncio.timeout(timeout_s):
                while self._now() == seen:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self._now()

    async def drain(self, grace_s: float) -> None:
        self._is_drained = True
        name = self._spec.name
        if name in self._supervisor.staying():
            self._supervisor.retire(name, grace_s)
        while name in self._supervisor.leaving():
            await self._supervisor.changed()

    async def _follow_changes(self) -> None:
        while True:
            await self._supervisor.changed()
            self._notify()

    async def _follow_ready(self) -> None:
        try:
            self._fields = await self._supervisor.ready(self._spec.name)
        except TandemError:
            return  # `_follow_failure` reports it
        self._notify()

    async def _follow_failure(self) -> None:
        """A first start that fails for good ends the supervisor's attempts: report it, then try without an end."""
        try:
            await self._supervisor.failed()
        except TandemError as error:
            self._set_refusal(error.message)
        await asyncio.sleep(_NEXT_TRY_S)
        self._set_refusal("")
        if not self._is_drained:
            self._supervisor.add(self._spec)

    def _now(self) -> HostView:
        name = self._spec.name
        problem = "; ".join(self._supervisor.problems())
        is_up = self._supervisor.staying().get(name, False)
        pid = self._supervisor.pids().get(name, 0)
        return HostView(self._node, is_up, pid, dict(self._fields), problem, self._refusal)

    def _set_refusal(self, refusal: str) -> None:
        self._refusal = refusal
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _address_flags(arguments: Sequence[str], address: str) -> Sequence[str]:
    """Return the flags by which others reach the worker: those of `tandem up` are the addresses of its routers."""
    hosts = [value for value in _values(arguments, "--host") if value in _ANY_ADDRESS]
    return f"--host={hosts[-1] if hosts else address}", f"--advertise-host={address}"


def _missing_key(arguments: Sequence[str]) -> str:
    """A worker without the cluster's key file would create a key that no other member has. Return the refusal."""
    for path in _values(arguments, "--cluster-key-file"):
        if not Path(path).expanduser().is_file():
            return f"--cluster-key-file {path} is not on node {os.uname().nodename}: copy it to every node of Ray"
    return ""


def _values(arguments: Sequence[str], flag: str) -> list[str]:
    return [word.partition("=")[2] for word in arguments if word.startswith(f"{flag}=")]


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
