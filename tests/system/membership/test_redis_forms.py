"""The registry on every form of Redis that `--redis` may name, and on a Redis that fails."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest

from cluster.errors import Fenced, RegistryUnavailable
from cluster.member import Member, MemberState
from cluster.registry.redis_server import RIGHTS
from cluster.registry.registry import Registry
from tests.system.rigs.members.registry_rig import DEADLINE_S, KEYS, kept, member, until
from tests.system.rigs.processes.redis_processes import HOST, redis_cluster, redis_process, sentinel

_ACL = ("resetchannels", "~{own}:*", "&{own}:*", *RIGHTS)
_CLUSTER_OF_TWO = pytest.param("cluster of two", marks=pytest.mark.slow)  # nodes need seconds to agree
FORMS = ("password", "acl", "socket", "sentinel", "sentinels with passwords", "cluster", _CLUSTER_OF_TWO)


@asynccontextmanager
async def redis_as(form: str, folder: Path) -> AsyncIterator[str]:
    """Run a form of Redis and yield its URL. `secret`: its password."""
    async with AsyncExitStack() as stack:
        if form.startswith("cluster"):
            nodes = await stack.enter_async_context(redis_cluster(folder, 2 if "two" in form else 1, "secret"))
            yield f"redis+cluster://:secret@{','.join(f'{HOST}:{node.port}' for node in nodes)}"
        elif form == "socket":
            options = ("--unixsocket", str(folder / "redis.sock"))
            await stack.enter_async_context(redis_process(folder, *options, password="secret"))
            yield f"unix://:secret@{folder / 'redis.sock'}"
        elif form == "acl":
            server = await stack.enter_async_context(redis_process(folder))
            async with server.client() as client:
                await client.execute_command("ACL SETUSER", "tandem", "on", ">secret", *_ACL)  # type: ignore[no-untyped-call]
                await client.execute_command("ACL SETUSER", "default", "off")  # type: ignore[no-untyped-call]
            yield f"redis://tandem:secret@{HOST}:{server.port}/0"
        else:
            server = await stack.enter_async_context(redis_process(folder, password="secret"))
            if form == "password":
                yield f"redis://:secret@{HOST}:{server.port}/1"
                return
            own = "secret" if "passwords" in form else ""
            watcher = await stack.enter_async_context(
                sentinel(folder, server, "auth-pass mymaster secret", password=own)
            )
            dead = "127.0.0.1:1"  # the first of the list does not answer
            option = f"?sentinel_password={own}" if own else ""
            yield f"redis+sentinel://:secret@{dead},{HOST}:{watcher.port}/mymaster/1{option}"


@pytest.mark.parametrize("form", FORMS)
async def test_registration_events_and_fencing_work_with_every_form_of_redis(form: str, tmp_path: Path) -> None:
    async with redis_as(form, tmp_path) as url:
        registry = Registry(url=url, cluster_name="own", ttl_s=5.0, keys=KEYS)
        async with aclosing(registry.watch()) as watch, asyncio.timeout(DEADLINE_S):
            assert await anext(watch) == ()
            await registry.register(member())
            assert await until(watch, bool) == (member(),)
            await registry.renew(member(state=MemberState.READY))
            await until(watch, lambda members: members[0].state is MemberState.READY)
            await registry.register(member(incarnation="newer"))
            with pytest.raises(Fenced):
                await registry.renew(member())
            await registry.deregister(member(incarnation="newer"))
            assert await registry.members() == ()
        await registry.close()


@pytest.mark.parametrize("form", ["password", "acl", "sentinel", "sentinels with passwords"])
async def test_a_wrong_password_is_reported_without_the_password(form: str, tmp_path: Path) -> None:
    async with redis_as(form, tmp_path) as url:
        registry = Registry(url=url.replace("secret", "hunter2"), cluster_name="own", ttl_s=5.0, keys=KEYS)
        with pytest.raises(RegistryUnavailable, match=r"(?i)auth|password") as refusal:
            await registry.ping()
        assert "hunter2" not in refusal.value.message
        assert "redis.asyncio" not in refusal.value.message
        await registry.close()


async def test_a_master_that_dies_is_replaced_and_the_watcher_misses_no_member(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(redis_process(tmp_path))
        await stack.enter_async_context(redis_process(tmp_path, "--replicaof", HOST, str(master.port)))
        sentinels = await stack.enter_async_context(sentinel(tmp_path, master, num_replicas=1))
        registry = Registry(url=f"redis+sentinel://{HOST}:{sentinels.port}", cluster_name="own", ttl_s=2.0, keys=KEYS)
        await stack.enter_async_context(kept(registry, member("p0"), member("d0")))
        seen: list[tuple[Member, ...]] = []
        async with aclosing(registry.watch()) as watch, asyncio.timeout(DEADLINE_S):
            seen.append(await anext(watch))
            master.process.send_signal(signal.SIGKILL)
            with pytest.raises(RegistryUnavailable):
                await registry.members()
            while len(await _members(registry)) < 2:
                pass
            await stack.enter_async_context(kept(registry, member("d1")))
            seen.append(await until(watch, lambda members: len(members) == 3))
        assert [[found.id.id for found in snapshot] for snapshot in seen] == [["d0", "p0"], ["d0", "d1", "p0"]]
    await registry.close()


async def _members(registry: Registry) -> tuple[Member, ...]:
    try:
        return await registry.members()
    except RegistryUnavailable:
        return ()
