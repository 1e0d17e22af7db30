"""The Redis of `tandem up` serves the members of its cluster alone, and they need no more than their rights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from cluster.accounts.key_store import RecordedKeys, RedisKeyStore
from cluster.accounts.keys import Gate, KeySet
from cluster.accounts.limits import TenantLimits
from cluster.accounts.usage import Usage, UsageMeter
from cluster.auth.keys import ClusterKeys
from cluster.clock import MonotonicClock
from cluster.messages import Role
from cluster.registry.redis_server import RIGHTS, RedisServer
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import Following, ScaleTargets
from cluster.registry.scale_target import ScaleTarget
from router.accounts import SharedUse, stored_usage
from tests.system.registry_rig import DEADLINE_S, member, until

_KEYS = ClusterKeys(bytes(32))


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    server = await RedisServer.start(cluster_name="own")
    yield server
    await server.stop()


async def test_the_redis_of_tandem_up_serves_no_client_without_its_password(server: RedisServer) -> None:
    for url in (f"redis://127.0.0.1:{server.port}/0", f"redis://tandem:wrong@127.0.0.1:{server.port}/0"):
        async with Redis.from_url(url) as stranger:
            with pytest.raises(AuthenticationError):
                await stranger.get("{own}:members")
    async with Redis.from_url(server.url) as insider:
        for command in ("FLUSHALL", "CONFIG GET *", "ACL LIST", "KEYS *", "GET {other}:members", "SHUTDOWN"):
            with pytest.raises(NoPermissionError):
                await insider.execute_command(*command.split())  # type: ignore[no-untyped-call]


async def test_everything_that_members_keep_in_redis_works_with_the_rights_of_members(server: RedisServer) -> None:
    registry = Registry(url=server.url, cluster_name="own", ttl_s=5.0, keys=_KEYS)
    async with asyncio.timeout(DEADLINE_S):
        async with aclosing(registry.watch()) as watch:
            assert await anext(watch) == ()
            await registry.register(member())
            assert await until(watch, bool) == (member(),)
            await registry.renew(member())
            await registry.deregister(member())

        store, gate = RedisKeyStore(registry), Gate(has_records=True)
        async with aclosing(store.changes()) as changes:
            await anext(changes)
            await RecordedKeys(store, gate, _KEYS).change(lambda keys: KeySet(keys.version + 1))
            await anext(changes)
        assert (gate.keys.version, bool(await store.read())) == (1, True)

        meter = UsageMeter()
        meter.record("acme", "k", Usage(requests=1))
        use = SharedUse(registry, TenantLimits(), meter, router="r@1", clock=MonotonicClock())
        await use.share()
        await use.store()
        assert [each.usage.requests for each in await stored_usage(registry)] == [1]

        follower = Following(registry, "up", ScaleTarget(1, 1))
        await follower.report(0)
        targets = ScaleTargets(registry)
        changed = await targets.set({Role.DECODE: 2})
        assert changed == await targets.read() and changed.size(Role.DECODE) == 2
        await follower.unfollow()
    await registry.close()


def test_the_documented_rights_are_those_of_members() -> None:
    page = (Path(__file__).parents[2] / "docs" / "membership.md").read_text()
    assert " ".join(RIGHTS) in " ".join(page.split())
