"""Keeps the pools at the sizes of the scale target: starts workers and drains the least busy ones.

Owns the follower's registration. A worker counts for the pool of its role. When an operator changes the role, the
target moves with it (cluster/registry/scale_registry.py), so no worker is started or drained. `Workers` restart one
that dies or that an operator drains, because the target still includes it; it joins with the role for which it counts.
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Protocol

from cli.local.child import ChildSpec
from cli.local.layout import Layout, Pools, Slot, pool_plan, worker_slots
from cluster.errors import RegistryUnavailable
from cluster.messages import Role
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import Following, WorkerUse
from cluster.registry.scale_target import ScaleTarget


class Workers(Protocol):
    """The methods by which workers are started, scaled and stopped. `Supervisor` implements and documents them."""

    def start(self, specs: Sequence[ChildSpec]) -> None: ...

    def add(self, spec: ChildSpec) -> None: ...

    def retire(self, name: str, grace_s: float) -> None: ...

    def staying(self) -> dict[str, bool]: ...

    def leaving(self) -> list[str]: ...

    def problems(self) -> list[str]: ...

    def pids(self) -> dict[str, int]: ...

    async def changed(self) -> None: ...

    async def ready(self, name: str) -> dict[str, str]: ...

    async def failed(self) -> None: ...

    async def stop(self, names: Sequence[str], grace_s: float) -> None: ...

    async def close(self) -> None: ...


class PoolFollower:
    def __init__(
        self,
        *,
        workers: Workers,
        registry: Registry,
        layout: Layout,
        first: Pools,
        loads: Callable[[], Awaitable[Mapping[str, WorkerUse]]],
        grace_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`first`: the present pools. `loads` returns the use of each worker by member id. `grace_s`: the time that a
        drained worker has to leave."""
        name = f"tandem up on {socket.gethostname()}, process {os.getpid()}"
        self._following = Following(registry, name, first.target)
        self._workers = workers
        self._layout = layout
        self._loads = loads
        self._grace_s = grace_s
        self._say = say
        self._reached = 0
        self._other = ""  # name of another process that follows the target

    async def run(self) -> None:
        """Follow the target until cancelled."""
        try:
            async with _waking(self._following.news(), self._workers.changed) as wake:
                while True:
                    wake.clear()
                    await self._look()
                    await wake.wait()
        finally:
            with suppress(RegistryUnavailable):
                await self._following.unfollow()

    async def _look(self) -> None:
        before, _ = self._slots()
        started = {self._layout.member_id(str(slot)): slot.role for slot in before}
        try:
            other = await self._following.report(self._reached, self._problem(), started)
        except RegistryUnavailable:
            return
        if other != self._other:
            self._other = other
            self._say(
                f"the scale target is followed by {other}: these pools stay as they are"
                if other
                else "these pools follow the scale target from now on"
            )
        if other:
            return
        self._say_changes(before)
        await self._approach(self._following.target)
        if self._is_there(self._following.target) and self._reached != self._following.target.version:
            self._reached = self._following.target.version
            await self._look()

    def _say_changes(self, before: Mapping[Slot, Role]) -> None:
        """Report each worker that counts for another pool than before."""
        staying, _ = self._slots()
        for slot, role in staying.items():
            if role is not before.get(slot, role):
                self._say(f"{slot} has the role {role} now: the target is {self._following.target}")

    async def _approach(self, target: ScaleTarget) -> None:
        staying, leaving = self._slots()
        if not pool_plan(staying, leaving, target, {}):
            return
        loads = await self._loads()
        staying, leaving = self._slots()
        busy = {slot: use.load for slot in staying if (use := loads.get(self._layout.member_id(str(slot))))}
        plan = pool_plan(staying, leaving, target, busy)
        sizes = f"the target is {target}"
        for slot in plan.starts:
            self._say(f"starting {slot}: {sizes}")
            self._workers.add(self._layout.worker(slot))
        for slot in plan.retires:
            self._say(f"draining {slot}: {sizes}")
            self._workers.retire(str(slot), self._grace_s)

    def _is_there(self, target: ScaleTarget) -> bool:
        staying, leaving = self._slots()
        is_up = self._workers.staying()
        return not leaving and not pool_plan(staying, leaving, target, {}) and all(is_up[str(slot)] for slot in staying)

    def _slots(self) -> tuple[dict[Slot, Role], list[Slot]]:
        """Return the slots of workers that stay, with the role for which each counts, and of workers that leave."""
        counted, member_id = self._following.roles, self._layout.member_id
        staying = {slot: counted.get(member_id(str(slot)), slot.role) for slot in worker_slots(self._workers.staying())}
        return staying, worker_slots(self._workers.leaving())

    def _problem(self) -> str:
        return "; ".join(self._workers.problems())


@asynccontextmanager
async def _waking(
    news: AsyncGenerator[None, None], changed: Callable[[], Awaitable[None]]
) -> AsyncGenerator[asyncio.Event, None]:
    """Yield an event that is set by a change in the registry or in the supervised workers."""
    wake = asyncio.Event()

    async def by_news() -> None:
        async with aclosing(news) as received:
            async for _ in received:
                wake.set()

    async def by_changes() -> None:
        while True:
            await changed()
            wake.set()

    tasks = [asyncio.create_task(by_news()), asyncio.create_task(by_changes())]
    try:
        yield wake
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
