"""Manages Tandem's pools as sets of named, detached Ray actors, each in its own placement group.

Keeps no state in this process: the members are read from Ray's table of named actors, so one driver can scale what
another one started. Only this file and actors.py call Ray.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import ConfigError, DeadlineExceeded, TandemError
from cluster.messages import Role
from cluster.registry.scale_target import POOLS, pool_name
from deploy.ray.actors import MemberProcess

_DRAIN_S = 60.0
_ANSWER_S = 10.0  # for an actor's answer, beyond the time that it may take for what it is asked


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one member on its node."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def bundle(self) -> dict[str, float]:
        bundle = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in bundle.items() if amount > 0}


class RayPools:
    """`settings` are settings of cluster/settings/config.py for every member; a pool's own settings override them."""

    def __init__(
        self,
        *,
        namespace: str,
        settings: Mapping[str, object],
        resources: Mapping[Role, Resources],
        start_timeout_s: float = 300.0,
    ) -> None:
        self._namespace = namespace
        self._settings = dict(settings)
        self._resources = dict(resources)
        self._start_timeout_s = start_timeout_s

    def members(self, role: Role) -> list[str]:
        """The names of the pool's actors, sorted by number."""
        prefix = f"{actor_name(role)}-"
        names = [
            item["name"]
            for item in ray.util.list_named_actors(all_namespaces=True)
            if item["namespace"] == self._namespace and item["name"].startswith(prefix)
        ]
        return sorted(names, key=_number)

    def scale(
        self,
        role: Role,
        size: int,
        own_settings: Mapping[str, object] | None = None,
        *,
        busy: Mapping[str, float] | None = None,
    ) -> list[str]:
        """Start members, or drain the least busy ones (the newest among equals), until the pool has `size`. `busy` is
        the load of each worker by member id. Return the ready lines of new members.

        Raises DeadlineExceeded, which names members that are not ready in time, and the error of a member that cannot
        start."""
        if size < 0:
            raise ConfigError(f"a pool cannot have {size} members")
        present = self.members(role)
        for name in self._least_busy(present, busy or {})[: max(0, len(present) - size)]:
            self._end(name)
        first = _number(present[-1]) + 1 if present else 0
        new = [f"{actor_name(role)}-{first + i}" for i in range(size - len(present))]
        actors = {name: self._start(role, name, self._settings | dict(own_settings or {})) for name in new}
        return self._ready_lines(role, actors)

    def wait_ready(self, role: Role) -> None:
        """Wait until all members are ready. Raises as `scale` does."""
        self._ready_lines(role, {name: self.actor(name) for name in self.members(role)})

    def actor(self, name: str) -> "ActorHandle[MemberProcess]":
        return ray.get_actor(name, namespace=self._namespace)

    def stop(self) -> None:
        """End every member, routers first, so that no request reaches a closing pool."""
        for role in (Role.ROUTER, *POOLS.values()):
            for name in self.members(role):
                self._end(name)

    def _ready_lines(self, role: Role, actors: "Mapping[str, ActorHandle[MemberProcess]]") -> list[str]:
        asked: dict[Any, str] = {actor.ready.remote(self._start_timeout_s): name for name, actor in actors.items()}
        if not asked:
            return []
        _, pending = ray.wait(list(asked), num_returns=len(asked), timeout=self._start_timeout_s + _ANSWER_S)
        if pending:
            names = ", ".join(sorted(asked[one] for one in pending))
            bundle = self._resources.get(role, Resources()).bundle()
            raise DeadlineExceeded(
                f"Ray has not started {names} within {self._start_timeout_s:g} s: each needs a node with {bundle} free;"
                " `ray status` shows what is free"
            )
        try:
            return ray.get(list(asked))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TandemError):
                raise error.cause from None
            raise

    def _least_busy(self, present: list[str], busy: Mapping[str, float]) -> list[str]:
        loads = {name: busy.get(self._member_id(name), 0.0) if busy else 0.0 for name in present}
        return sorted(present, key=lambda name: (loads[name], -_number(name)))

    def _member_id(self, name: str) -> str:
        """The member id of an actor; empty if it is not ready."""
        try:
            line = str(ray.get(self.actor(name).ready.remote(0.0)))
        except ray.exceptions.RayError:  # not ready, refused settings, or gone
            return ""
        fields = dict(word.partition("=")[::2] for word in line.split())
        return fields.get("member", "").partition("@")[0]

    def _start(self, role: Role, name: str, settings: Mapping[str, object]) -> "ActorHandle[MemberProcess]":
        resources = self._resources.get(role, Resources())
        group = placement_group([resources.bundle()], strategy="PACK", name=self._group(name), lifetime="detached")
        options = {
            "name": name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "max_restarts": -1,  # Ray always restarts it
            "max_concurrency": 4,  # `drain` must run while `ready` waits
            "num_cpus": resources.num_cpus,
            "num_gpus": resources.num_gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        }
        # No member id: a restarted actor must not compete with its predecessor's registration.
        # By Ray's stubs `remote` of a class with options may return the class itself; it never does.
        actor = ray.remote(MemberProcess).options(**options).remote(str(role), dict(settings))
        assert isinstance(actor, ActorHandle)
        return actor

    def _end(self, name: str) -> None:
        actor = self.actor(name)
        with suppress(ray.exceptions.GetTimeoutError):  # it does not drain, or Ray has never started it
            ray.get(actor.drain.remote(_DRAIN_S), timeout=_DRAIN_S + _ANSWER_S)
        ray.kill(actor, no_restart=True)
        for group_id, row in placement_group_table().items():
            if row["name"] == self._group(name) and row["state"] != "REMOVED":
                remove_placement_group(_group_handle(group_id))

    def _group(self, name: str) -> str:
        return f"{self._namespace}/{name}"


def actor_name(role: Role) -> str:
    """Return the beginning of the names of this role's actors: that of the pool, or "router"."""
    return pool_name(role) if role.is_worker else str(role)


def _group_handle(group_id: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id)))


def _number(name: str) -> int:
    return int(name.rsplit("-", 1)[1])
