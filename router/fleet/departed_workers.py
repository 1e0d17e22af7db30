"""Workers that are no longer registered, for a while: a worker that is restarted is not there for a moment. Pure."""

from collections.abc import Iterable

from cluster.member import Member

KEPT_S = 60.0


class DepartedWorkers:
    def __init__(self) -> None:
        self._present: dict[str, Member] = {}  # by member id: a restarted worker replaces its former incarnation
        self._departed: dict[str, tuple[Member, float]] = {}

    def note(self, present: Iterable[Member], now_s: float) -> None:
        """The workers that are registered now."""
        former, self._present = self._present, {member.id.id: member for member in present}
        gone = {name: (member, now_s) for name, member in former.items()}
        kept = (self._departed | gone).items()
        self._departed = {
            name: (member, since_s)
            for name, (member, since_s) in kept
            if name not in self._present and now_s - since_s < KEPT_S
        }

    def members(self, now_s: float) -> list[Member]:
        """Those that left less than `KEPT_S` ago."""
        return [member for member, since_s in self._departed.values() if now_s - since_s < KEPT_S]
