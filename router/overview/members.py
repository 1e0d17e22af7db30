"""Describes the members of the cluster for operators, with the figures that each worker reports when it is asked."""

import asyncio
from collections.abc import Callable

from cluster.errors import TandemError
from cluster.member import Member
from cluster.protocol.report_wire import link_speeds_to_wire
from router.fleet.fleet import Fleet
from tandem.enum_words import MEMBER_ROLES, MEMBER_STATES
from tandem.v1 import admin_pb2

_RECENT_S = 0.9
_PATIENCE_S = 1.0  # an overview does not wait longer for a worker that does not answer


def member_to_wire(member: Member) -> admin_pb2.MemberStatus:
    """Describe a member as the registry has it."""
    return admin_pb2.MemberStatus(
        member_id=member.id.id,
        incarnation=member.id.incarnation,
        role=MEMBER_ROLES.number(member.role),
        state=MEMBER_STATES.number(member.state),
        address=member.address,
        model=member.model,
        kv_transports=member.transports,
        metrics_address=member.metrics_address,
        http_address=member.http_address,
    )


class MemberStatuses:
    """The statuses of all members."""

    def __init__(self, fleet: Fleet, now_s: Callable[[], float]) -> None:
        """`now_s`: a monotonic clock."""
        self._fleet, self._now_s = fleet, now_s
        self._asked: asyncio.Task[list[admin_pb2.MemberStatus]] | None = None
        self._asked_s = 0.0

    async def fresh(self, patience_s: float | None = None) -> list[admin_pb2.MemberStatus]:
        """Ask every worker now, for `patience_s` at most. One that does not answer is listed without figures, with the
        time since it last answered."""
        return await asyncio.gather(*(self._status(member, patience_s) for member in self._fleet.members()))

    async def recent(self) -> list[admin_pb2.MemberStatus]:
        """Return statuses that are at most a second old. All callers of that time share one question to each worker."""
        now_s = self._now_s()
        if self._asked is None or (self._asked.done() and now_s - self._asked_s >= _RECENT_S):
            self._asked, self._asked_s = asyncio.create_task(self.fresh(_PATIENCE_S)), now_s
        return await asyncio.shield(self._asked)

    async def _status(self, member: Member, patience_s: float | None) -> admin_pb2.MemberStatus:
        figures: dict[str, float] = {}
        last_seen_s = 0.0
        peer = self._fleet.peer(member.id)
        if peer is not None:
            try:
                async with asyncio.timeout(patience_s):
                    inspected = await peer.inspect()
                figures = dict(inspected.figures) | {f"blocks_{k}": float(v) for k, v in inspected.blocks.items()}
            except (TandemError, TimeoutError):
                last_seen_s = peer.silent_s
                figures = {"step_s": peer.stream.heartbeat.step_s}
        status = member_to_wire(member)
        status.last_seen_s = last_seen_s
        status.figures.update(figures)
        status.links.extend(link_speeds_to_wire(self._fleet.links(member.id)))
        return status
