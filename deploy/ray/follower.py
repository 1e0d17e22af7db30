"""Keeps the pools on Ray as large as the scale target says.

Owns the follower's place in the registry. Ray restarts what dies; what the pools should be is the target's. Asks Ray
through pools.py alone, on a thread: its calls block.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress

from cluster.errors import RegistryUnavailable
from cluster.messages import Role
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import Following
from cluster.registry.scale_target import ScaleTarget
from deploy.ray.pools import RayPools

_POOLS = (Role.DECODE, Role.PREFILL)


class RayFollower:
    def __init__(
        self,
        *,
        pools: RayPools,
        registry: Registry,
        loads: Callable[[], Awaitable[Mapping[str, float]]],
        say: Callable[[str], None],
    ) -> None:
        """`loads`: how much each worker has to do, by member id."""
        self._pools = pools
        self._loads = loads
        self._say = say
        first = ScaleTarget(len(pools.members(Role.PREFILL)), len(pools.members(Role.DECODE)))
        name = f"deploy.ray follow on {socket.gethostname()}, process {os.getpid()}"
        self._following = Following(registry, name, first)
        self._reached = 0
        self._problem = ""

    async def run(self) -> None:
        """Until cancelled. A change of the pools that is under way is seen to its end by Ray."""
        change: asyncio.Task[int] | None = None
        try:
            async with aclosing(self._following.news()) as news:
                async for _ in news:
                    if change is not None and change.done():
                        self._take(change)
                        change = None
                    if await self._is_followed_here() and change is None:
                        change = self._begin(self._following.target)
        finally:
            with suppress(RegistryUnavailable):
                await self._following.leave()

    async def _is_followed_here(self) -> bool:
        """Renews the lease, also while the pools change."""
        try:
            return not await self._following.report(self._reached, self._problem)
        except RegistryUnavailable:
            return False

    def _begin(self, target: ScaleTarget) -> "asyncio.Task[int] | None":
        if target.version == self._reached and not self._problem:
            return None
        return asyncio.create_task(self._approach(target), name="scale the pools")

    async def _approach(self, target: ScaleTarget) -> int:
        """Answers the version that the pools have reached."""
        busy = await self._loads()
        for role in _POOLS:
            size = target.size(role)
            if len(self._pools.members(role)) != size:
                self._say(f"scaling {role} to {size}")
            await asyncio.to_thread(self._pools.scale, role, size, busy=busy)
            await asyncio.to_thread(self._pools.wait_ready, role)
        return target.version

    def _take(self, change: "asyncio.Task[int]") -> None:
        error = change.exception()
        if error is None:
            self._reached, self._problem = change.result(), ""
        elif str(error) != self._problem:
            self._problem = str(error) or type(error).__name__
            self._say(f"the pools are not as they should be: {self._problem}")
