"""Which workers to start and which to retire so that the pools reach a target. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.messages import Role
from cluster.registry.scale_target import ScaleTarget

_POOLS = (Role.DECODE, Role.PREFILL)  # decode workers first: every request ends on one


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A worker's place in its pool; its name is `decode-2`."""

    role: Role
    number: int

    def __str__(self) -> str:
        return f"{self.role}-{self.number}"

    @staticmethod
    def parse(name: str) -> "Slot":
        role, _, number = name.rpartition("-")
        return Slot(Role(role), int(number))


@dataclass(frozen=True, slots=True)
class PoolPlan:
    starts: tuple[Slot, ...] = ()
    retires: tuple[Slot, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.starts or self.retires)


def pool_plan(
    staying: Iterable[Slot], leaving: Iterable[Slot], target: ScaleTarget, busy: Mapping[Slot, float]
) -> PoolPlan:
    """New workers take the lowest free numbers; the least busy ones are retired, the newest among equals. `busy`: how
    much each has to do; what is not in it has nothing."""
    taken = {*staying, *leaving}
    starts: list[Slot] = []
    retires: list[Slot] = []
    for role in _POOLS:
        pool = [slot for slot in staying if slot.role is role]
        missing = target.size(role) - len(pool)
        starts += _free(role, missing, taken)
        retires += sorted(pool, key=lambda slot: (busy.get(slot, 0.0), -slot.number))[: max(0, -missing)]
    return PoolPlan(tuple(starts), tuple(retires))


def _free(role: Role, count: int, taken: set[Slot]) -> Sequence[Slot]:
    most = max(0, count)
    return [slot for number in range(len(taken) + most) if (slot := Slot(role, number)) not in taken][:most]
