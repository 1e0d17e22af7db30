"""Named, detached Ray actors, each in a placement group of its own. All calls block.

Keeps no state: the actors are read from Ray's table, so a process can manage what an earlier one has started. Groups
that Ray cannot place yet are pending, and Ray's autoscaler adds nodes for them.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cli.local.child import ChildSpec
from cluster.errors import ConfigError, Unavailable
from deploy.ray.member_host import MemberHost

_NUM_CALLS = 4  # at once: a view that waits, a drain, and views of a caller that has been replaced


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """The needs of a worker of its node: amounts by Ray's resource names, and the node's labels."""

    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_threads(self) -> int:
        return max(1, int(self.resources.get("CPU", 1.0)))

    def __str__(self) -> str:
        words = [f"{name}:{amount:g}" for name, amount in self.resources.items()]
        return ",".join([*words, *(f"label {name}={value}" for name, value in self.labels.items())])


class ActorPlacement:
    """The actors of one Ray namespace. Methods raise ray.exceptions.RayError while Ray's head does not answer."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def names(self) -> list[str]:
        """Return the names of all actors, and remove groups that have none: their creator ended in between."""
        listed = ray.util.list_named_actors(all_namespaces=True)
        names = [item["name"] for item in listed if item["namespace"] == self._namespace]
        for group_name, group in self._groups():
            if group_name not in names:
                remove_placement_group(group)
        return names

    def actor(self, name: str) -> "ActorHandle[MemberHost]":
        """Raises ValueError if there is none."""
        return ray.get_actor(name, namespace=self._namespace)

    def start(self, spec: ChildSpec, needs: NodeNeeds) -> "ActorHandle[MemberHost]":
        """Create the actor of this worker; Ray starts it when a node has what it needs."""
        group = placement_group(
            [dict(needs.resources)],
            name=self._group_name(spec.name),
            lifetime="detached",
            bundle_label_selector=[dict(needs.labels)] if needs.labels else None,
        )
        in_bundle = {name: amount for name, amount in needs.resources.items() if name not in ("CPU", "GPU")}
        options = {
            "name": spec.name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "max_restarts": -1,  # on another node when its node is lost
            "max_concurrency": _NUM_CALLS,
            "num_cpus": needs.resources.get("CPU", 0.0),
            "num_gpus": needs.resources.get("GPU", 0.0),
            "resources": in_bundle,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        }
        # By Ray's stubs `remote` of a class with options may return the class itself; it never does.
        actor = ray.remote(MemberHost).options(**options).remote(spec.name, spec.arguments, dict(spec.environment))
        assert isinstance(actor, ActorHandle)
        return actor

    def remove(self, name: str) -> None:
        """End the actor, and with it the worker's process, and remove its group."""
        with suppress(ValueError):
            ray.kill(self.actor(name), no_restart=True)
        for group_name, group in self._groups():
            if group_name == name:
                remove_placement_group(group)

    def is_placed(self, name: str) -> bool:
        """Return whether Ray has found a node for this worker."""
        rows = placement_group_table().values()
        return any(row["name"] == self._group_name(name) and row["state"] == "CREATED" for row in rows)

    def draining_nodes(self) -> Mapping[str, float]:
        """Return the ids of nodes that Ray drains, with the time at which each ends (seconds since the epoch; 0: none
        is set)."""
        nodes = ray._private.state.state.get_draining_nodes()  # Ray has no public call for this
        return {node: deadline_ms / 1e3 for node, deadline_ms in nodes.items()}

    def _groups(self) -> Sequence[tuple[str, PlacementGroup]]:
        """Return this namespace's groups by the names of their workers."""
        prefix = self._group_name("")
        return [
            (row["name"].removeprefix(prefix), PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))
            for group_id, row in placement_group_table().items()
            if row["name"].startswith(prefix) and row["state"] != "REMOVED"
        ]

    def _group_name(self, name: str) -> str:
        return f"{self._namespace}/{name}"


def connect(address: str, namespace: str) -> ActorPlacement:
    """Connect this process to the Ray cluster; `local` starts one on this machine. Raises ConfigError, and Unavailable
    if no Ray answers there."""
    try:
        ray.init(
            address=address,
            namespace=namespace,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, TimeoutError, RuntimeError) as error:
        raise Unavailable(
            f"no Ray cluster answers at --ray {address}, which a node of it must run on: start one with `ray start "
            f"--head`, and `ray start --address HEAD:6379` on this machine ({error})"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--ray {address}: {error}") from error
    return ActorPlacement(namespace)


def disconnect() -> None:
    ray.shutdown()
