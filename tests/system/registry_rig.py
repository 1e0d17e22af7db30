"""A member, and a wait for a snapshot of a registry."""

import asyncio
from collections.abc import AsyncIterator, Callable

from cluster.member import Capacity, Member
from cluster.messages import LayoutFingerprint, MemberId, Role

DEADLINE_S = 20.0
FINGERPRINT = LayoutFingerprint("weights-a", "config-a", "float32", "table-a")


def member(name: str = "p0", incarnation: str = "first", role: Role = Role.PREFILL, **values: object) -> Member:
    defaults: dict[str, object] = {
        "id": MemberId(name, incarnation),
        "role": role,
        "address": "127.0.0.1:1",
        "model": "demo",
        "fingerprint": FINGERPRINT,
        "transports": ("shm", "tcp"),
        "capacity": Capacity(64, 16, 8, 1024),
    }
    return Member(**{**defaults, **values})  # type: ignore[arg-type]


async def until(
    watch: AsyncIterator[tuple[Member, ...]], holds: Callable[[tuple[Member, ...]], bool]
) -> tuple[Member, ...]:
    """Return the first snapshot for which the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        async for members in watch:
            if holds(members):
                return members
    raise AssertionError("the watch ended")
