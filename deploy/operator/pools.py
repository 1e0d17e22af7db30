"""The pools as Deployments: their sizes, and what it costs to end each of their pods.

A Deployment that shrinks ends the pods with the lowest `pod-deletion-cost` first
(https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost): the cost of a worker is the
number of blocks that it holds for requests and of sequences that wait there. A worker that does not do the work of its
Deployment any more, because an operator has changed its role, costs less than all others: otherwise a pool that shrinks
could keep it and lose its last worker that does. A pod's name is its worker's member id.
"""

from collections.abc import Awaitable, Callable, Mapping

from cluster.messages import Role
from cluster.registry.scale_registry import WorkerUse
from cluster.registry.scale_target import ScaleTarget
from deploy.operator.api_server import ApiError, ApiServer, Object

DEPLOYMENTS: Mapping[Role, str] = {Role.PREFILL: "tandem-prefill", Role.DECODE: "tandem-decode"}
COST = "controller.kubernetes.io/pod-deletion-cost"
LABEL = "app.kubernetes.io/name"
_CONFLICT, _GONE = 409, 404
_NUM_WRITES = 8
_OTHER_ROLE = -1_000_000_000  # costs are numbers of 32 bits

Loads = Callable[[], Awaitable[Mapping[str, WorkerUse]]]


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
