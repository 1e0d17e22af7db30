"""Scales the pools on Ray to the scale target.

Owns the follower's registration. Ray restarts members that die; the target decides the sizes of the pools. All calls to
Ray go through pools.py, on a thread, because they block.
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
from cluster.registry.scale_target import POOLS, ScaleTarget, pool_name
from deploy.ray.pools import RayPools

_POOLS = (Role.DECODE, Role.BOTH, Role.PREFILL)


class RayFollower:
    def __init__(
        self,
        *,
        pools: RayPools,
        registry: Registry,
        loads: Callable[[], Awaitable[Mapping[str, float]]],
        say: Callable[[str], None],
    ) -> None:
        """`loads` returns the load of each worker by member id."""
        self._pools = pools
        self._loads = loads
        self._say = say
        prefill, decode, colocated = (len(pools.members(role)) for role in POOLS.values())
        first = ScaleTarget(prefill, decode, colocated)
        name = f"deploy.ray follow on {socket.gethostname()}, process {os.getpid()}"
        self._following = Following(registry, name, first)
        self._reached = 0
        self._problem = ""

    async def run(self) -> None:
        """Follow the target until cancelled. Ray completes a change that is in progress."""
        change: asyncio.Task[int] | None = None
        try:
            async with aclosing(self._following.news()) as news:
                async for _ in news:
                    if change is not None and change.done():
                        self._note_result(change)
                        change = None
                    if await self._is_followed_here() and change is None:
                        change = self._begin(self._following.target)
        finally:
            with suppress(RegistryUnavailable):
                await self._following.unfollow()

    async def _is_followed_here(self) -> bool:
        """Return whether this process is the follower. Renews its registration, also while the pools change."""
        try:
            return not await self._following.report(self._reached, self._problem)
        except RegistryUnavailable:
            return False

    def _begin(self, target: ScaleTarget) -> "asyncio.Task[int] | None":
        if target.version == self._reached and not self._problem:
            return None
        return asyncio.create_task(self._approach(target), name="scale the pools")

    async def _approach(self, target: ScaleTarget) -> int:
        """Scale the pools and return the version that they have reached."""
        busy = await self._loads()
        for role in _POOLS:
            size = target.size(role)
            if len(self._pools.members(role)) != size:
                self._say(f"scaling {pool_name(role)} to {size}")
            await asyncio.to_thread(self._pools.scale, role, size, busy=busy)
            await asyncio.to_thread(self._pools.wait_ready, role)
        return target.version

    def _note_result(self, change: "asyncio.Task[int]") -> None:
        error = change.exception()
        if error is None:
            self._reached, self._problem = change.result(), ""
        elif str(error) != self._problem:
            self._problem = str(error) or type(error).__name__
            self._say(f"the pools do not have the target's sizes: {self._problem}")
