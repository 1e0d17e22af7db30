"""Members that stay registered, and a wait for a snapshot of a registry."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from cluster.auth.keys import ClusterKeys
from cluster.member import Capacity, Member
from cluster.messages import LayoutFingerprint, MemberId, Role
from cluster.registry.registration import Registration
from cluster.registry.registry import Registry
from router.running import running

DEADLINE_S = 20.0
KEYS = ClusterKeys(b"k" * 32)  # of all members here
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


@asynccontextmanager
async def kept(registry: Registry, *members: Member) -> AsyncIterator[None]:
    """Register members and renew their registrations until the `with` block ends: without renewal they could expire, on
    a loaded machine, before the watcher has read them. Fails if a renewal ends.
    """
    registrations = [Registration(registry, registered) for registered in members]
    for registration in registrations:
        await registration.join()
    async with AsyncExitStack() as stack:
        keepers = [await stack.enter_async_context(running(registration.keep())) for registration in registrations]
        yield
        for keeper in keepers:
            assert not keeper.done(), keeper


async def until(
    watch: AsyncIterator[tuple[Member, ...]], holds: Callable[[tuple[Member, ...]], bool]
) -> tuple[Member, ...]:
    """Return the first snapshot for which the condition holds. Fails at the deadline with the last one."""
    members: tuple[Member, ...] | None = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            async for members in watch:
                if holds(members):
                    return members
    except TimeoutError:
        raise AssertionError(f"no such snapshot within {DEADLINE_S:g} s; the last one is {members}") from None
    raise AssertionError(f"the watch ended after {members}")
