"""Which processes a cluster on one machine is made of, and with which arguments. Decides; starts nothing."""

import dataclasses
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from cli.child import ChildSpec
from cluster.config import RouterConfig, WorkerConfig

# A secret goes where `ps` does not show it.
_BY_ENVIRONMENT = frozenset({"api_key", "redis"})


@dataclass(frozen=True, slots=True)
class Pools:
    """How many workers. Without a prefill pool the decode workers prefill too: the colocated baseline."""

    num_prefill: int
    num_decode: int

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    def __str__(self) -> str:
        if self.num_prefill == 0:
            return f"{self.num_decode} colocated"
        return f"{self.num_prefill} prefill + {self.num_decode} decode"


def threads_per_worker(num_cores: int, num_workers: int) -> int:
    """Workers that share a core stall at each other's barriers: each gets its own."""
    return max(1, num_cores // num_workers)


def router_spec(flags: Mapping[str, object]) -> ChildSpec:
    """`flags` by field name, as given to `tandem up`; each process takes those it knows."""
    known = {item.name for item in dataclasses.fields(RouterConfig)}
    mine = {name: value for name, value in flags.items() if name in known | {"config"}}
    return _spec("router", "router", mine)


def worker_specs(pools: Pools, flags: Mapping[str, object], *, num_threads: int, is_shared: bool) -> list[ChildSpec]:
    """`is_shared`: others register in the same Redis, so plain names could be taken."""
    known = {item.name for item in dataclasses.fields(WorkerConfig)}
    mine = {name: value for name, value in flags.items() if name in known | {"config"}}
    mine.setdefault("num_threads", num_threads)
    mine["port"] = mine["health_port"] = 0  # those of `tandem up` are the router's
    suffix = f"-{secrets.token_hex(2)}" if is_shared else ""
    names = [f"prefill-{number}" for number in range(pools.num_prefill)]
    names += [f"decode-{number}" for number in range(pools.num_decode)]
    threads = {"OMP_NUM_THREADS": str(mine["num_threads"]), "TOKENIZERS_PARALLELISM": "false"}
    return [
        _spec(name, f"{name.partition('-')[0]}_worker", {**mine, "member_id": name + suffix}, threads) for name in names
    ]


def _spec(
    name: str, module: str, flags: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> ChildSpec:
    arguments = [sys.executable, "-m", module]
    for flag, value in flags.items():
        if flag not in _BY_ENVIRONMENT:
            arguments.append(f"--{flag.replace('_', '-')}={value}")
    hidden = {f"TANDEM_{flag.upper()}": str(flags[flag]) for flag in _BY_ENVIRONMENT & set(flags)}
    return ChildSpec(name, tuple(arguments), {**(environment or {}), **hidden})
