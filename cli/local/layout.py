"""The processes of a cluster on one machine: their arguments, and which workers to start and to retire so that the
pools reach a target. Pure: this module starts no process."""

import dataclasses
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cli.local.child import ChildSpec
from cluster.errors import ConfigError
from cluster.messages import Role
from cluster.registry.scale_target import POOLS, ScaleTarget, pool_name
from cluster.settings.config import SECRETS, RouterConfig, WorkerConfig
from cluster.settings.worker_settings import flag_of

# Secrets are passed in the environment, because `ps` shows arguments.
_BY_ENVIRONMENT = SECRETS | {"redis"}
_LAST_PORT = 65535
_MODULES = {Role.PREFILL: "prefill_worker", Role.DECODE: "decode_worker", Role.BOTH: "worker"}
_POOLS = (Role.DECODE, Role.BOTH, Role.PREFILL)  # workers that decode first: every request ends on one


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A worker's place in its pool; its name is `decode-2`."""

    role: Role
    number: int

    def __str__(self) -> str:
        return f"{pool_name(self.role)}-{self.number}"

    @staticmethod
    def parse(name: str) -> "Slot":
        pool, _, number = name.rpartition("-")
        return Slot(POOLS[pool], int(number))


@dataclass(frozen=True, slots=True)
class Pools:
    """The number of workers of each pool. Without any other worker the decode workers prefill too."""

    num_prefill: int
    num_decode: int
    num_colocated: int = 0

    @property
    def target(self) -> ScaleTarget:
        return ScaleTarget(self.num_prefill, self.num_decode, self.num_colocated)

    @property
    def num_workers(self) -> int:
        return self.target.num_workers

    def slots(self) -> list[Slot]:
        return [Slot(role, number) for role in POOLS.values() for number in range(self.target.size(role))]

    def rank(self, slot: Slot) -> int:
        """Return the rank of this slot among all workers of the machine. The workers of the first start come first."""
        first = self.slots()
        if slot in first:
            return first.index(slot)
        roles = list(POOLS.values())
        return len(first) + len(roles) * (slot.number - self.target.size(slot.role)) + roles.index(slot.role)

    def __str__(self) -> str:
        return str(self.target)


def threads_per_worker(num_cores: int, num_workers: int) -> int:
    """Divide the cores: workers that share a core would wait for each other at every barrier."""
    return max(1, num_cores // num_workers)


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return the variables that a worker's libraries read when they are loaded. NumPy's BLAS, which no worker uses,
    would start its threads at once, and a process with threads cannot be forked."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`flags` by field name, as given to `tandem up`; each process gets those that it supports. `suffix` is added to
    member ids of workers, and `router_suffix` to those of routers, when the Redis is shared, because plain ids could
    belong to another cluster."""

    flags: Mapping[str, object]
    num_threads: int  # of a worker
    first: Pools  # at the first start
    suffix: str = ""
    router_suffix: str = ""

    def router(self, number: int, ports: "Ports") -> ChildSpec:
        name = f"{Role.ROUTER}-{number}"
        mine = self._known(RouterConfig) | ports.by_setting()
        return _spec(name, "router", {**mine, "member_id": name + self.router_suffix})

    def worker(self, slot: Slot) -> ChildSpec:
        mine = self._known(WorkerConfig)
        mine["num_threads"] = self.num_threads
        mine["port"] = mine["health_port"] = mine["metrics_port"] = 0  # the ports given to `tandem up` are the router's
        mine["local_rank"], mine["local_world_size"] = self.first.rank(slot), self.first.num_workers
        mine["member_id"] = self.member_id(str(slot))
        return _spec(str(slot), _MODULES[slot.role], mine, thread_environment(self.num_threads))

    def member_id(self, name: str) -> str:
        return name + self.suffix

    def _known(self, config_type: type[RouterConfig | WorkerConfig]) -> dict[str, object]:
        known = {item.name for item in dataclasses.fields(config_type)} | {"config"}
        return {name: value for name, value in self.flags.items() if name in known}


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one router. 0: a free port."""

    http: int
    grpc: int
    health: int = 0
    metrics: int = 0

    def by_setting(self) -> dict[str, int]:
        return {
            "port": self.http,
            "grpc_port": self.grpc,
            "health_port": self.health,
            "metrics_port": self.metrics,
        }


def router_ports(first: Ports, count: int) -> list[Ports]:
    """Return the given ports for the first router and the following numbers for the others. Raises ConfigError."""
    given = first.by_setting()
    ports = [Ports(*(port + i if port else 0 for port in given.values())) for i in range(count)]
    told = [port for each in ports for port in each.by_setting().values() if port]
    if len(set(told)) < len(told) or max(told, default=0) > _LAST_PORT:
        shown = " and ".join(f"{flag_of(name)} {port}" for name, port in given.items() if port)
        rule = f"leave no room for {count} routers: each takes the port after the one before"
        raise ConfigError(f"{shown} {rule if count > 1 else 'must be different ports'}")
    return ports


@dataclass(frozen=True, slots=True)
class PoolPlan:
    starts: tuple[Slot, ...] = ()
    retires: tuple[Slot, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.starts or self.retires)


def pool_plan(
    staying: Mapping[Slot, Role], leaving: Iterable[Slot], target: ScaleTarget, busy: Mapping[Slot, float]
) -> PoolPlan:
    """Return which workers to start and which to retire. New workers get the lowest free numbers; the least busy ones
    are retired, the newest among equals. `staying`: the role for which each worker counts, whatever its name. `busy`:
    the load by slot; a slot that is missing has no load.
    """
    taken = {*staying, *leaving}
    starts: list[Slot] = []
    retires: list[Slot] = []
    for role in _POOLS:
        pool = [slot for slot, counted in staying.items() if counted is role]
        missing = target.size(role) - len(pool)
        starts += _free(role, missing, taken)
        retires += sorted(pool, key=lambda slot: (busy.get(slot, 0.0), -slot.number))[: max(0, -missing)]
    return PoolPlan(tuple(starts), tuple(retires))


def worker_slots(names: Iterable[str]) -> list[Slot]:
    """Return the slots of the workers among these names."""
    return [Slot.parse(name) for name in names if not name.startswith(Role.ROUTER)]


def new_suffix() -> str:
    return f"-{secrets.token_hex(2)}"


def _spec(
    name: str, module: str, flags: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> ChildSpec:
    arguments = [sys.executable, "-m", module]
    for flag, value in flags.items():
        if flag not in _BY_ENVIRONMENT:
            arguments.append(f"--{flag.replace('_', '-')}={value}")
    hidden = {f"TANDEM_{flag.upper()}": str(flags[flag]) for flag in _BY_ENVIRONMENT & set(flags)}
    return ChildSpec(name, tuple(arguments), {**(environment or {}), **hidden})


def _free(role: Role, count: int, taken: set[Slot]) -> Sequence[Slot]:
    most = max(0, count)
    return [slot for number in range(len(taken) + most) if (slot := Slot(role, number)) not in taken][:most]
