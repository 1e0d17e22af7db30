"""The workers that left recently, and the routers that clients receive: derived from the registered members. Pure."""

from collections.abc import Iterable

from cluster.member import Member, MemberState
from cluster.messages import Role

ABSENCE_S = 60.0  # a worker that is restarted, or cut off from the registry, is back by then


class DeregisteredWorkers:
    """Workers that were registered until recently. A worker that restarts is absent for a short time."""

    def __init__(self, absence_s: float = ABSENCE_S) -> None:
        self._absence_s = absence_s
        self._present: dict[str, Member] = {}  # by member id: a restarted worker replaces its former incarnation
        self._deregistered: dict[str, tuple[Member, float]] = {}

    def note(self, present: Iterable[Member], now_s: float) -> None:
        """Record the workers that are registered now."""
        former, self._present = self._present, {member.id.id: member for member in present}
        gone = {name: (member, now_s) for name, member in former.items()}
        kept = (self._deregistered | gone).items()
        self._deregistered = {
            name: (member, since_s)
            for name, (member, since_s) in kept
            if name not in self._present and now_s - since_s < self._absence_s
        }

    def members(self, now_s: float) -> list[Member]:
        """Return the workers that left less than `absence_s` ago."""
        return [member for member, since_s in self._deregistered.values() if now_s - since_s < self._absence_s]


_MOST = 32  # a client needs some, not all


def advertised_routers(itself: Member, members: Iterable[Member]) -> tuple[str, ...]:
    """Return the addresses of routers that a client may use: this router's first, then those that accept requests.
    Above `_MOST` routers, it returns those that follow this router in the circle of ids, so that every router is
    advertised by some."""
    others = [
        member
        for member in members
        if member.role is Role.ROUTER and member.state is MemberState.READY and member.id.id != itself.id.id
    ]
    after = sorted(others, key=lambda member: (member.id < itself.id, member.id))
    return (itself.address, *(member.address for member in after[:_MOST]))
