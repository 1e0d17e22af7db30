"""Keeps a set of child processes running, from their first start until all are stopped.

The supervisor restarts a child that dies, after a growing backoff, and reports its last log lines. It replaces a
drained child at once and does not replace a retired one. A child of the first start that has wrong settings or never
becomes ready ends all; a child that was added later is retried without limit. Owns the children and does not depend on
what they do. A Ctrl-C in the terminal does not reach them: the supervisor ends them in order.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from cli.local.child import Child, ChildEnd, ChildSpec, Launch, executed
from cluster.errors import ConfigError, TandemError, Unavailable
from cluster.process import ExitStatus


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """The backoff between two starts of a child, and the number of failed first starts."""

    first_backoff_s: float = 0.5
    max_backoff_s: float = 15.0
    healthy_s: float = 30.0  # a child that ran for this time restarts after the first backoff
    first_starts: int = 3  # failed starts before the first ready line that end all


@dataclass(slots=True)
class _Kept:
    """The state of one child over all its restarts."""

    spec: ChildSpec
    ready: asyncio.Future[dict[str, str]]
    is_vital: bool  # all is ended if it never becomes ready
    child: Child | None = None
    task: asyncio.Task[None] | None = None
    num_failures: int = 0
    is_up: bool = False
    is_leaving: bool = False
    retiring: asyncio.Task[None] | None = None
    problem: str = ""  # why it is not up


class Kept(Protocol):
    """One member over all its restarts. `ready`: the fields of its first ready line. `problem`: why it is not up."""

    ready: asyncio.Future[dict[str, str]]
    is_leaving: bool
    problem: str

    @property
    def is_up(self) -> bool: ...


AnyKept = TypeVar("AnyKept", bound=Kept)


class KeptMembers(Generic[AnyKept]):
    """The members that are kept running, by name, and the error that ends all of them. Owns no process."""

    def __init__(self) -> None:
        self._kept: dict[str, AnyKept] = {}
        self._changed = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def staying(self) -> dict[str, bool]:
        """Return for each member that is not leaving whether it is ready now."""
        return {name: kept.is_up for name, kept in self._kept.items() if not kept.is_leaving}

    def leaving(self) -> list[str]:
        return [name for name, kept in self._kept.items() if kept.is_leaving]

    def problems(self) -> list[str]:
        """Return why members are not ready, where that is known."""
        return [kept.problem for kept in self._kept.values() if kept.problem and not kept.is_leaving]

    async def changed(self) -> None:
        """Wait until a member becomes ready, stops being ready or has left."""
        await self._changed.wait()

    async def ready(self, name: str) -> dict[str, str]:
        """Return the fields of the member's first ready line. Raises the error that ended all."""
        ready = self._kept[name].ready
        events: list[asyncio.Future[Any]] = [ready, self._failed]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()
        return ready.result()

    async def failed(self) -> None:
        """Wait for the error that ends all, and raise it."""
        await asyncio.shield(self._failed)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _end_failures(self) -> None:
        """End the wait of `failed`; an error that it and `ready` have raised to their callers counts as retrieved."""
        self._failed.cancel()
        if not self._failed.cancelled():
            self._failed.exception()


_LEFT = {
    ExitStatus.OK: "was drained",
    ExitStatus.DRAIN_INCOMPLETE: "was drained with work left, which continues elsewhere",
}


class Supervisor(KeptMembers[_Kept]):
    """Keeps child processes running. `say` receives messages for the user, `echo(name, line)` the log lines of the
    children. `launch` starts the process of a child.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        echo: Callable[[str, str], None],
        limits: RestartLimits | None = None,
        launch: Launch = executed,
    ) -> None:
        super().__init__()
        self._say = say
        self._echo = echo
        self._limits = limits or RestartLimits()
        self._launch = launch
        self._stopping = False

    def start(self, specs: Sequence[ChildSpec]) -> None:
        """Start these children and keep them running. Returns at once."""
        for spec in specs:
            self._begin(spec, is_vital=True)

    def add(self, spec: ChildSpec) -> None:
        """Start a child as `start` does, but keep the others running if its start fails."""
        self._begin(spec, is_vital=False)

    def retire(self, name: str, grace_s: float) -> None:
        """Terminate this child, kill it after `grace_s`, report how it ended and do not restart it. Returns at once.
        The name can be used again when `leaving` no longer contains it."""
        kept = self._kept[name]
        kept.is_leaving = True
        kept.retiring = asyncio.create_task(self._retire(kept, grace_s), name=f"retire {name}")
        kept.retiring.add_done_callback(self._on_end)

    def pids(self) -> dict[str, int]:
        """Return the process ids of the children that run now."""
        return {name: kept.child.pid for name, kept in self._kept.items() if kept.child is not None}

    def restart_with(self, name: str, arguments: Sequence[str]) -> None:
        """Add arguments from the child's next start on, such as the ports that it chose at its first start."""
        self._kept[name].spec = self._kept[name].spec.with_arguments(arguments)

    async def stop(self, names: Sequence[str], grace_s: float) -> None:
        """Terminate these children, kill those that still run after `grace_s`, and restart none."""
        self._stopping = True
        leaving = [self._kept[name] for name in names if name in self._kept]
        for kept in leaving:
            if kept.child is not None and not kept.is_leaving:  # a second signal would end it at once
                kept.child.terminate()
        ends = [asyncio.ensure_future(kept.child.wait()) for kept in leaving if kept.child is not None]
        if ends:
            _, late = await asyncio.wait(ends, timeout=grace_s)
            for end in late:
                end.cancel()
        for kept in leaving:
            if kept.child is not None:
                kept.child.kill()  # has no effect if it has ended

    def kill(self) -> None:
        """Kill all children now."""
        self._stopping = True
        for kept in self._kept.values():
            if kept.child is not None:
                kept.child.kill()

    async def close(self) -> None:
        """Kill all children. No process is left when this returns."""
        self.kill()
        tasks = [task for kept in self._kept.values() for task in (kept.task, kept.retiring) if task is not None]
        for kept in self._kept.values():
            if kept.retiring is not None:
                kept.retiring.cancel()
            if kept.task is not None and kept.child is None:  # between two starts; the other tasks end with their child
                kept.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._end_failures()

    def _begin(self, spec: ChildSpec, *, is_vital: bool) -> None:
        kept = self._kept[spec.name] = _Kept(spec, asyncio.get_running_loop().create_future(), is_vital)
        kept.task = asyncio.create_task(self._keep(kept), name=f"keep {spec.name}")
        kept.task.add_done_callback(self._on_end)

    async def _keep(self, kept: _Kept) -> None:
        backoff_s = self._limits.first_backoff_s
        while not self._stopping:
            began_s = time.monotonic()
            was_up, end = await self._live(kept)
            if self._stopping or kept.is_leaving:
                return
            if was_up and end.status in _LEFT:
                self._say(f"{kept.spec.name} {_LEFT[ExitStatus(end.status)]}; starting it again")
                continue
            if time.monotonic() - began_s >= self._limits.healthy_s:
                backoff_s = self._limits.first_backoff_s
            error = self._fatal(kept, end)
            if error is not None:
                self._fail(error)
                return
            self._say(_end_report(kept.spec.name, end, f"starting it again in {backoff_s:g} s"))
            kept.problem = f"{kept.spec.name} {_how(end)}"
            self._notify()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._limits.max_backoff_s)

    async def _live(self, kept: _Kept) -> tuple[bool, ChildEnd]:
        """Run the child once. Return whether it became ready, and how it ended."""
        child = Child(await self._launch(kept.spec), lambda line: self._echo(kept.spec.name, line))
        kept.child = child
        try:
            fields = await child.ready()
            if fields is not None and kept.ready.done():
                self._say(f"{kept.spec.name} is back")
            elif fields is not None:
                kept.ready.set_result(fields)
            if fields is not None:
                kept.is_up, kept.problem = True, ""
                self._notify()
            return fields is not None, await child.wait()
        finally:
            kept.child, kept.is_up = None, False
            self._notify()
            child.kill()
            await child.close()

    async def _retire(self, kept: _Kept, grace_s: float) -> None:
        became, child = "was not running", kept.child  # which is None once it has ended, maybe as its time passes
        if child is not None:
            child.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    became = _retirement(await child.wait())
            except TimeoutError:
                became = "did not leave in time and was killed"
                child.kill()
        elif kept.task is not None:  # between two starts
            kept.task.cancel()
        if kept.task is not None:
            await asyncio.wait([kept.task])
        del self._kept[kept.spec.name]
        self._say(f"{kept.spec.name} {became}")
        self._notify()

    def _fatal(self, kept: _Kept, end: ChildEnd) -> TandemError | None:
        """Return the error that ends all, if this end of a child is fatal."""
        if kept.ready.done() or not kept.is_vital:
            return None
        kept.num_failures += 1
        if end.status == ExitStatus.CONFIG:
            reason = f": {end.last_lines[-1]}" if end.last_lines else ""  # one line, with the remedy
            return ConfigError(f"{kept.spec.name} {_how(end)}; its settings were refused{reason}")
        if kept.num_failures >= self._limits.first_starts:
            return Unavailable(
                _end_report(kept.spec.name, end, f"it did not become ready in {kept.num_failures} starts")
            )
        return None

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Report an exception of a task. No caller awaits these tasks while the cluster runs."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


def _end_report(name: str, end: ChildEnd, then: str) -> str:
    lines = "".join(f"\n    {name} | {line}" for line in end.last_lines)
    return f"{name} {_how(end)}; {then}{'; its last lines:' if lines else ''}{lines}"


def _how(end: ChildEnd) -> str:
    return f"was killed by signal {-end.status}" if end.status < 0 else f"ended with status {end.status}"


def _retirement(end: ChildEnd) -> str:
    """Return a message about the end of a retired child."""
    if end.status in _LEFT:
        return _LEFT[ExitStatus(end.status)]
    return f"{_how(end)} instead of leaving in order"
