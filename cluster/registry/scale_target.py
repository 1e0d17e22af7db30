"""The desired number of workers of each pool. Pure; cluster/registry/scale_registry.py keeps it in the registry."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.errors import InvalidRequest
from cluster.messages import Role

# The pools by the names that operators use, and the role in which the workers of each one start.
POOLS: Mapping[str, Role] = {"prefill": Role.PREFILL, "decode": Role.DECODE, "colocated": Role.BOTH}
NO_DECODE_WORKER = "decode or colocated must be at least 1: every request ends on a worker that decodes"
# The names in the registry: two hashes and the channel of all changes.
TARGET, COUNTED_ROLES, CHANNEL = "scale:target", "scale:roles", "scale"
_MOST = 256  # workers of one pool; a larger number is taken for a typing error
_NAMES = {role: name for name, role in POOLS.items()}


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """The desired sizes of the pools. `reached`: the newest version that the follower has put into effect; `problem`:
    why it could not put a newer one into effect. `counts_roles`: the follower counts each worker for the pool of its
    present role, and a change of a role moves the sizes; otherwise a worker counts for the pool that it was started in.
    """

    prefill: int
    decode: int
    colocated: int = 0
    version: int = 1
    follower: str = ""
    reached: int = 0
    problem: str = ""
    counts_roles: bool = False

    def size(self, role: Role) -> int:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.colocated}[role]

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.colocated

    def __str__(self) -> str:
        return sizes_text(self.prefill, self.decode, self.colocated)


def pool_name(role: Role) -> str:
    """Return the name of the pool whose workers start in this role."""
    return _NAMES[role]


def sizes_text(prefill: int, decode: int, colocated: int) -> str:
    """Return the sizes as text. Pools that a cluster does without are left out: colocated workers beside separate
    pools, and separate pools beside colocated workers."""
    separate = [f"{prefill} prefill, {decode} decode"] if prefill or decode or not colocated else []
    return ", ".join([*separate, *([f"{colocated} colocated"] if colocated else [])])


def check_sizes(wanted: Mapping[Role, int]) -> None:
    """Check the wanted sizes of the pools. Raises InvalidRequest."""
    if not wanted:
        raise InvalidRequest(f"give the number of workers of a pool: {', '.join(POOLS)}")
    for role, size in wanted.items():
        if not 0 <= size <= _MOST:
            raise InvalidRequest(f"{pool_name(role)} must be from 0 to {_MOST}, not {size}")
