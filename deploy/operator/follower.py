"""Keeps the Deployments of both pools at the sizes of the scale target, so `tandem scale` works on Kubernetes.

Owns the follower's registration. It refuses to start, and ends, where another process or an autoscaler owns a pool.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from cluster.errors import ConfigError, RegistryUnavailable, Unavailable
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import Following
from deploy.operator.api_server import ApiServer, Object
from deploy.operator.owners import refuse_other_owners
from deploy.operator.pools import DEPLOYMENTS, Pools, problems

_LOG = logging.getLogger("tandem.operator")
_COSTS_EVERY_S = 30.0
_RETRY_S = 5.0


async def keep_costs(pools: Pools) -> None:
    """Write the pods' deletion costs every `_COSTS_EVERY_S` until cancelled."""
    while True:
        try:
            await pools.set_costs()
        except Unavailable as error:
            _LOG.warning("the deletion costs of pods were not updated: %s", error.message)
        await asyncio.sleep(_COSTS_EVERY_S)


class DeploymentFollower:
    def __init__(
        self,
        *,
        api: ApiServer,
        pools: Pools,
        registry: Registry,
        namespace: str,
        name: str,
        announce: Callable[[], None],
        retry_s: float = _RETRY_S,
    ) -> None:
        """`announce` is called once the registry has this follower. `retry_s`: the longest time between two looks."""
        self._api, self._pools, self._registry, self._namespace = api, pools, registry, namespace
        self._name, self._announce, self._retry_s = name, announce, retry_s
        self._deployments: dict[str, Object] = {}
        self._reached = 0
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Follow the target until cancelled. Raises ConfigError if a pool has another owner, ApiError, Unavailable and
        RegistryUnavailable at the start."""
        await self._refuse_other_owners()
        following = Following(self._registry, self._name, await self._pools.sizes())
        if other := await following.report(0):
            raise ConfigError(f"{other} follows the scale target already, and only one process may: stop it first")
        self._announce()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(self._pools.deployments_path), name="watch Deployments")
                tasks.create_task(self._hear(following.news()), name="hear of the target")
                await self._follow(following)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            with suppress(RegistryUnavailable):
                await following.unfollow()

    async def _follow(self, following: Following) -> None:
        while True:
            self._wake.clear()
            try:
                await self._look(following)
            except (RegistryUnavailable, Unavailable) as error:
                _LOG.warning("the pools were not scaled: %s", error.message)
            with suppress(TimeoutError):  # not by wait_for: in Python 3.11 it may swallow a cancellation
                async with asyncio.timeout(self._retry_s):
                    await self._wake.wait()

    async def _look(self, following: Following) -> None:
        await self._refuse_other_owners()
        for role in DEPLOYMENTS:
            await self._pools.scale(role, following.target.size(role))
        wrong = problems(self._deployments, following.target)
        if not wrong:
            self._reached = following.target.version
        version = following.target.version
        if other := await following.report(self._reached, "; ".join(wrong)):
            raise ConfigError(f"{other} follows the scale target now")
        if following.target.version != version:
            self._wake.set()

    async def _refuse_other_owners(self) -> None:
        await refuse_other_owners(self._api, self._namespace, DEPLOYMENTS.values())

    async def _watch(self, path: str) -> None:
        async with aclosing(self._api.watch(path)) as states:
            async for self._deployments in states:
                self._wake.set()

    async def _hear(self, news: AsyncGenerator[Any, None]) -> None:
        async with aclosing(news) as received:
            async for _ in received:
                self._wake.set()
