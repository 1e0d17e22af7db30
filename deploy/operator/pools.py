"""The pools as Deployments: their sizes, which follow the scale target so that `tandem scale` works on Kubernetes, and
what it costs to end each of their pods.

`DeploymentFollower` owns its registration. It refuses to start, and ends, where another process or an autoscaler owns
a pool.

A Deployment that shrinks ends the pods with the lowest `pod-deletion-cost` first
(https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost): the cost of a worker is the
number of blocks that it holds for requests and of sequences that wait there. A worker that does not do the work of its
Deployment any more, because an operator has changed its role, costs less than all others: otherwise a pool that shrinks
could keep it and lose its last worker that does. A pod's name is its worker's member id.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from typing import Any

from cluster.errors import ConfigError, RegistryUnavailable, Unavailable
from cluster.messages import Role
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import Following, WorkerUse
from cluster.registry.scale_target import ScaleTarget
from deploy.operator.api_server import ApiError, ApiServer, Object

DEPLOYMENTS: Mapping[Role, str] = {Role.PREFILL: "tandem-prefill", Role.DECODE: "tandem-decode"}
COST = "controller.kubernetes.io/pod-deletion-cost"
LABEL = "app.kubernetes.io/name"
_CONFLICT, _GONE = 409, 404
_NUM_WRITES = 8
_OTHER_ROLE = -1_000_000_000  # costs are numbers of 32 bits

Loads = Callable[[], Awaitable[Mapping[str, WorkerUse]]]
_NO_SUCH_KIND = 404  # KEDA is not installed
# The path of each kind that scales Deployments. A ScaledObject without a kind in its reference means a Deployment.
_SCALERS = {
    "HorizontalPodAutoscaler": "/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers",
    "ScaledObject": "/apis/keda.sh/v1alpha1/namespaces/{namespace}/scaledobjects",
}
_LOG = logging.getLogger("tandem.operator")
_COSTS_EVERY_S = 30.0
_RETRY_S = 5.0


class Pools:
    def __init__(self, api: ApiServer, namespace: str, loads: Loads) -> None:
        """`loads`: the use of each worker by member id; nothing where no router answers."""
        self._api, self._loads = api, loads
        self.deployments_path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        self._pods_path = f"/api/v1/namespaces/{namespace}/pods"

    async def sizes(self) -> ScaleTarget:
        """Return the wanted sizes of the Deployments. Raises ApiError and Unavailable."""
        prefill, decode = [
            _replicas(await self._api.get(self._scale_path(role))) for role in (Role.PREFILL, Role.DECODE)
        ]
        return ScaleTarget(prefill, decode)

    async def scale(self, role: Role, size: int) -> None:
        """Set the size of a pool. Costs are set before it shrinks. Raises ApiError and Unavailable."""
        for number in range(_NUM_WRITES):
            scale = await self._api.get(self._scale_path(role))
            if _replicas(scale) == size:
                return
            if _replicas(scale) > size and number == 0:
                await self.set_costs()
            scale["spec"]["replicas"] = size
            try:
                await self._api.replace(self._scale_path(role), scale)
            except ApiError as error:
                if error.status != _CONFLICT or number == _NUM_WRITES - 1:
                    raise
            else:
                return

    async def set_costs(self) -> None:
        """Write the cost of ending each worker's pod, where it has changed. Raises ApiError and Unavailable."""
        loads = await self._loads()
        if not loads:
            return
        for pod in (await self._api.get(self._pods_path))["items"]:
            name, deployment = pod["metadata"]["name"], pod["metadata"].get("labels", {}).get(LABEL)
            pool = next((role for role in DEPLOYMENTS if DEPLOYMENTS[role] == deployment), None)
            known = pod["metadata"].get("annotations", {}).get(COST, "0")
            if pool is None or known == (cost := str(_cost(loads.get(name), pool))):
                continue
            try:
                await self._api.patch(f"{self._pods_path}/{name}", {"metadata": {"annotations": {COST: cost}}})
            except ApiError as error:
                if error.status != _GONE:
                    raise

    def _scale_path(self, role: Role) -> str:
        return f"{self.deployments_path}/{DEPLOYMENTS[role]}/scale"


def problems(deployments: Mapping[str, Object], target: ScaleTarget) -> list[str]:
    """Return why the Deployments do not have the target's workers yet; nothing: they have them, ready."""
    found = []
    if target.colocated:
        found.append(f"no Deployment runs colocated workers, and the target has {target.colocated}")
    for role, name in DEPLOYMENTS.items():
        if name not in deployments:
            found.append(f"there is no Deployment {name}")
            continue
        status = deployments[name].get("status", {})
        ready, present, wanted = status.get("readyReplicas", 0), status.get("replicas", 0), target.size(role)
        if (ready, present) != (wanted, wanted):
            found.append(f"{name} has {ready} of {wanted} workers ready, and {present} in all")
    return found


def _cost(use: WorkerUse | None, pool: Role) -> int:
    if use is None:
        return 0
    return round(use.load) + (0 if use.role.does(pool) else _OTHER_ROLE)


def _replicas(scale: Object) -> int:
    return int(scale["spec"].get("replicas", 0))


async def refuse_other_owners(api: ApiServer, namespace: str, deployments: Collection[str]) -> None:
    """Raise ConfigError if an autoscaler owns one of these Deployments. Raises ApiError and Unavailable."""
    for kind, path in _SCALERS.items():
        try:
            found = await api.get(path.format(namespace=namespace))
        except ApiError as error:
            if error.status != _NO_SUCH_KIND:
                raise
            continue
        for item in found["items"]:
            target = item["spec"]["scaleTargetRef"]
            if target.get("kind", "Deployment") == "Deployment" and target["name"] in deployments:
                name = item["metadata"]["name"]
                raise ConfigError(
                    f"{kind} {name} sets the replicas of {target['name']}, and a pool has one owner: delete it to scale"
                    " with `tandem scale`, or run this with --follow off"
                )


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
        await self._report(following)  # first: a process that was replaced scales nothing
        version = following.target.version
        for role in DEPLOYMENTS:
            await self._pools.scale(role, following.target.size(role))
        if not problems(self._deployments, following.target):
            self._reached = version
        await self._report(following)
        if following.target.version != version:
            self._wake.set()

    async def _report(self, following: Following) -> None:
        wrong = problems(self._deployments, following.target)
        if other := await following.report(self._reached, "; ".join(wrong)):
            raise ConfigError(f"{other} follows the scale target now")

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
