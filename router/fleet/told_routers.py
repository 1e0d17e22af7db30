"""Which routers a client is told of: where it goes on when this one is gone. Pure."""

from collections.abc import Iterable

from cluster.member import Member, MemberState
from cluster.messages import Role

_MOST = 32  # a client needs some, not all


def told_routers(itself: Member, members: Iterable[Member]) -> tuple[str, ...]:
    """Addresses: this router's first, then the others that take requests. Where there are too many, those that come
    after it in the circle of ids, so that no router is left out by all."""
    others = [
        member
        for member in members
        if member.role is Role.ROUTER and member.state is MemberState.READY and member.id.id != itself.id.id
    ]
    after = sorted(others, key=lambda member: (member.id < itself.id, member.id))
    return (itself.address, *(member.address for member in after[:_MOST]))
