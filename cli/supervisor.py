"""Keeps a set of child processes alive, from their first start to the end of all.

A child that dies is started again, later each time, and reported with its last lines. One whose settings are wrong, or
that never comes up, ends the whole. Owns the children; knows nothing of what they do.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cli.child import Child, ChildEnd, ChildSpec
from cluster.errors import ConfigError, TandemError, Unavailable
from cluster.process import ExitStatus


@dataclass(frozen=True, slots=True)
class Patience:
    first_backoff_s: float = 0.5
    max_backoff_s: float = 15.0
    healthy_s: float = 30.0  # one that lived so long starts again without delay
    first_starts: int = 3  # so often may a child fail before it has ever been ready


@dataclass(slots=True)
class _Kept:
    """One child through all its lives."""

    spec: ChildSpec
    ready: asyncio.Future[dict[str, str]]
    child: Child | None = None
    task: asyncio.Task[None] | None = None
    num_failures: int = 0


class Supervisor:
    """`say` gets what a person should know, `echo(name, line)` the children's logs."""

    def __init__(
        self, *, say: Callable[[str], None], echo: Callable[[str, str], None], patience: Patience | None = None
    ) -> None:
        self._say = say
        self._echo = echo
        self._patience = patience or Patience()
        self._kept: dict[str, _Kept] = {}
        self._stopping = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, specs: Sequence[ChildSpec]) -> None:
        """Begins to keep these children alive; returns at once."""
        loop = asyncio.get_running_loop()
        for spec in specs:
            kept = self._kept[spec.name] = _Kept(spec, loop.create_future())
            kept.task = asyncio.create_task(self._keep(kept), name=f"keep {spec.name}")
            kept.task.add_done_callback(self._on_end)

    async def ready(self, name: str) -> dict[str, str]:
        """The fields of the child's first ready line. Raises what ended the whole."""
        ready = self._kept[name].ready
        events: list[asyncio.Future[Any]] = [ready, self._failed]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()
        return ready.result()

    async def failed(self) -> None:
        """Waits for, and raises, what ends the whole."""
        await asyncio.shield(self._failed)

    def pids(self) -> dict[str, int]:
        """Of the children that run now."""
        return {name: kept.child.pid for name, kept in self._kept.items() if kept.child is not None}

    def restart_with(self, name: str, arguments: Sequence[str]) -> None:
        """Adds arguments from its next start on, such as the ports that it was given at its first."""
        self._kept[name].spec = self._kept[name].spec.with_arguments(arguments)

    async def stop(self, names: Sequence[str], grace_s: float) -> None:
        """Asks these to leave, kills those that have not within the grace, and keeps none of them alive any more."""
        self._stopping = True
        leaving = [self._kept[name] for name in names if name in self._kept]
        for kept in leaving:
            if kept.child is not None:
                kept.child.terminate()
        ends = [asyncio.ensure_future(kept.child.wait()) for kept in leaving if kept.child is not None]
        if ends:
            _, late = await asyncio.wait(ends, timeout=grace_s)
            for end in late:
                end.cancel()
        for kept in leaving:
            if kept.child is not None:
                kept.child.kill()  # nothing, if it left

    def kill(self) -> None:
        """All of them, now."""
        self._stopping = True
        for kept in self._kept.values():
            if kept.child is not None:
                kept.child.kill()

    async def close(self) -> None:
        """Nothing is left when this returns."""
        self.kill()
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for kept in self._kept.values():
            if kept.task is not None and kept.child is None:  # between two lives; the others end with their child
                kept.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._failed.cancel()
        if not self._failed.cancelled():
            self._failed.exception()  # seen: whoever waited has it

    async def _keep(self, kept: _Kept) -> None:
        backoff_s = self._patience.first_backoff_s
        while not self._stopping:
            began_s = time.monotonic()
            end = await self._live(kept)
            if self._stopping:
                return
            if time.monotonic() - began_s >= self._patience.healthy_s:
                backoff_s = self._patience.first_backoff_s
            error = self._fatal(kept, end)
            if error is not None:
                self._fail(error)
                return
            self._say(_obituary(kept.spec.name, end, f"starting it again in {backoff_s:g} s"))
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._patience.max_backoff_s)

    async def _live(self, kept: _Kept) -> ChildEnd:
        """One life of a child."""
        child = await Child.start(kept.spec, lambda line: self._echo(kept.spec.name, line))
        kept.child = child
        try:
            fields = await child.ready()
            if fields is not None and kept.ready.done():
                self._say(f"{kept.spec.name} is back")
            elif fields is not None:
                kept.ready.set_result(fields)
            return await child.wait()
        finally:
            kept.child = None
            child.kill()
            await child.close()

    def _fatal(self, kept: _Kept, end: ChildEnd) -> TandemError | None:
        """Why the whole cannot go on, if this end says so."""
        if kept.ready.done():
            return None
        kept.num_failures += 1
        if end.status == ExitStatus.CONFIG:
            return ConfigError(_obituary(kept.spec.name, end, "its settings are refused"))
        if kept.num_failures >= self._patience.first_starts:
            return Unavailable(_obituary(kept.spec.name, end, f"it did not start in {kept.num_failures} tries"))
        return None

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Nobody awaits these tasks while the whole runs: what breaks one must not pass in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)


def _obituary(name: str, end: ChildEnd, then: str) -> str:
    how = f"was killed by signal {-end.status}" if end.status < 0 else f"ended with status {end.status}"
    lines = "".join(f"\n    {name} | {line}" for line in end.last_lines)
    return f"{name} {how}; {then}{'; its last lines:' if lines else ''}{lines}"
