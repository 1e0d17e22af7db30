"""The tenants of a simulated cluster: their API keys, which routers read from a file, and their shares at workers."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from cluster.accounts.keys import Access, Caller, KeyRecord, KeySet, key_digest, tenant_share
from cluster.auth.keys import ClusterKeys
from cluster.messages import NO_TENANT, TenantShare
from tests.chaos.simulated.machine import machine
from tests.chaos.simulated.machine.loop import current

_READ_S = 0.02
ADMIN_KEY = "operator"
AS_OPERATOR = (("authorization", f"Bearer {ADMIN_KEY}"),)  # metadata of a call; a router without keys ignores it


def as_tenant(number: int) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a tenant's call."""
    return (("authorization", f"Bearer {_key(number)}"),)


def share_of(weights: Sequence[int], number: int) -> TenantShare:
    """Return what workers learn of a tenant of a schedule. `weights`: of all its tenants; none: there is no tenant."""
    return tenant_share(b"", _caller(number, weights[number])) if weights else NO_TENANT


class StoredKeys:
    """The file of the running world's API keys."""

    def __init__(self, _: object) -> None:
        pass

    async def read(self) -> str:
        await asyncio.sleep(_READ_S)
        weights = machine.world().schedule.tenants
        records = (
            KeyRecord(caller.key_id, key_digest(_key(number)).hex(), caller)
            for number, caller in enumerate(map(_caller, range(len(weights)), weights))
        )
        return KeySet(1, tuple(records)).signed(ClusterKeys(machine.world().key_files.at(current().place)))

    async def replace(self, before: str, after: str) -> bool:
        raise AssertionError("no router changes keys")

    async def changes(self) -> AsyncGenerator[None, None]:
        yield
        await asyncio.Event().wait()


def settings_of(weights: Sequence[int]) -> dict[str, Any]:
    """Return the settings of a router by which it serves these tenants alone."""
    return {"keys": "keys.json", "admin_key": ADMIN_KEY} if weights else {}


def _key(number: int) -> str:
    return f"key of tenant {number}"


def _caller(number: int, weight: int) -> Caller:
    return Caller(f"tenant {number}", f"{number:012x}", frozenset({Access.INFERENCE}), weight=weight)
