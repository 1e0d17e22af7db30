"""`tandem up --ray`: a cluster whose routers are processes of this machine and whose workers are actors of Ray."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from cli.local.layout import Pools, worker_slots
from cli.local.local_cluster import LocalCluster, Plan
from cluster.errors import ConfigError
from cluster.registry.scale_target import POOLS
from deploy.ray.options import RayOptions
from deploy.ray.placement import NodeNeeds, connect, disconnect
from deploy.ray.workers import RayWorkers


class RayCluster(LocalCluster):
    """Made by `ray_cluster`; leaves Ray when it is closed."""

    async def close(self) -> None:
        await super().close()
        disconnect()


async def ray_cluster(
    plan: Plan,
    options: RayOptions,
    *,
    num_threads: int,
    key_file: Path,
    say: Callable[[str], None],
    echo: Callable[[str, str], None],
) -> RayCluster:
    """Connect to Ray and find the workers that an earlier process has left; `plan.pools` are started if there are none.
    `key_file` holds the cluster's key on every node. `num_threads` of each worker; 0: by its CPUs.
    Raises ConfigError and Unavailable."""
    if not plan.redis:
        raise ConfigError("--ray needs --redis: the URL of a Redis that every node of Ray reaches")
    placement = connect(options.address, f"tandem-{plan.cluster_name}")
    workers = RayWorkers(
        placement,
        needs={role: _needs(options, pool) for pool, role in POOLS.items()},
        arguments=(f"--cluster-key-file={key_file}",),
        num_threads=num_threads,
        grace_s=plan.drain_grace_s,
        keep_at_stop=options.keep_at_stop,
        say=say,
    )
    found = worker_slots(await workers.adopt())
    if found:
        pools = Pools(*(sum(slot.role is role for slot in found) for role in POOLS.values()))
        say(f"found {pools} on Ray; `tandem scale` changes their number")
        plan = dataclasses.replace(plan, pools=pools)
    return RayCluster(plan, say=say, echo=echo, workers=workers)


def _needs(options: RayOptions, pool: str) -> NodeNeeds:
    resources = {"CPU": 1.0, **options.resources.get(pool, {})}
    return NodeNeeds(resources, dict(options.labels.get(pool, {})))
