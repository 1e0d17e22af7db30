"""Tests that no member is lost while Redis is stopped, emptied, loading, refusing writes or unreachable."""

import asyncio
import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from redis.asyncio import Redis

from cluster.errors import RegistryUnavailable
from cluster.member import MemberState
from cluster.messages import Role
from cluster.registry.redis_server import RedisServer
from cluster.registry.registration import Registration
from cluster.registry.registry import Registry
from tests.system.rigs.members.registry_rig import DEADLINE_S, KEYS, kept, member, until


async def on_own_server(
    act: Callable[[RedisServer, Registry], Awaitable[None]], *, ttl_s: float = 1.0, timeout_s: float = 0.5
) -> None:
    """Run `act` with a Redis of its own. `ttl_s`: longer than a loaded machine keeps this process waiting. `timeout_s`:
    of one command; longer where Redis answers."""
    server = await RedisServer.start()
    registry = Registry(url=server.url, cluster_name="own", ttl_s=ttl_s, keys=KEYS, timeout_s=timeout_s)
    try:
        await act(server, registry)
    finally:
        await registry.close()
        await server.stop()


async def test_after_a_stopped_redis_continues_every_member_is_back() -> None:
    """A Redis that is stopped for longer than the registration TTL has lost all registrations when it continues."""

    async def act(server: RedisServer, registry: Registry) -> None:
        async with kept(registry, member()), aclosing(registry.watch()) as watch, asyncio.timeout(DEADLINE_S):
            assert await anext(watch) == (member(),)
            os.kill(server.pid, signal.SIGSTOP)
            with pytest.raises(RegistryUnavailable):
                await registry.members()
            news = asyncio.ensure_future(anext(watch))
            await asyncio.wait([news], timeout=1.5 * registry.ttl_s)
            assert not news.done()
            assert registry.age_s > registry.ttl_s
            os.kill(server.pid, signal.SIGCONT)
            await registration_seen(registry)
            async with kept(registry, member("d0")):
                assert await news == (member("d0"), member())

    await on_own_server(act)


async def test_members_register_again_after_redis_lost_its_data() -> None:
    async def act(server: RedisServer, registry: Registry) -> None:
        async with kept(registry, member()), aclosing(registry.watch()) as watch, asyncio.timeout(DEADLINE_S):
            assert await anext(watch) == (member(),)
            news = asyncio.ensure_future(anext(watch))
            await server.stop()
            with pytest.raises(RegistryUnavailable):
                await registry.ping()
            successor = await RedisServer.start(server.port)
            await registration_seen(registry)
            assert not news.done()
            async with kept(registry, member("d0")):
                assert await news == (member("d0"), member())
        await successor.stop()

    await on_own_server(act)


async def test_a_member_without_redis_joins_when_redis_is_back() -> None:
    """A worker that took minutes to load its model does not discard it."""

    async def act(server: RedisServer, registry: Registry) -> None:
        await server.stop()
        joining = asyncio.create_task(Registration(registry, member()).join_unless(asyncio.Event()))
        with pytest.raises(RegistryUnavailable):
            await registry.ping()  # as long as it asks, the other has been refused too
        assert not joining.done()
        successor = await RedisServer.start(server.port)
        async with asyncio.timeout(DEADLINE_S):
            await joining
        assert await registry.members() == (member(),)
        await successor.stop()

    await on_own_server(act, ttl_s=2.0)


async def test_a_member_that_waits_for_redis_exits_when_asked() -> None:
    async def act(server: RedisServer, registry: Registry) -> None:
        await server.stop()
        stop = asyncio.Event()
        joining = asyncio.create_task(Registration(registry, member()).join_unless(stop))
        with pytest.raises(RegistryUnavailable):
            await registry.ping()
        stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await joining

    await on_own_server(act)


async def test_emptying_a_running_redis_removes_no_member() -> None:
    """The watcher or another member may register first; the members that are still missing are kept."""

    async def act(server: RedisServer, registry: Registry) -> None:
        worker = Registry(url=server.url, cluster_name="own", ttl_s=registry.ttl_s, keys=KEYS)
        theirs = Registration(worker, member("d0"))
        ours = Registration(registry, router)
        await theirs.join()
        await ours.join()
        async with Redis.from_url(server.url) as redis, aclosing(registry.watch()) as watch:
            async with asyncio.timeout(DEADLINE_S):
                believed = await anext(watch)
                news = asyncio.ensure_future(anext(watch))
                for returning in (ours, theirs):
                    await redis.flushall()
                    await returning.set_state(MemberState.STARTING)
                    await asyncio.wait([news], timeout=registry.ttl_s / 2)  # two looks
                    assert not news.done()
                await ours.set_state(MemberState.READY)
                assert await news == (member("d0"), router.with_state(MemberState.READY))
                assert believed == (member("d0"), router)
        await worker.close()

    router = member("r0", role=Role.ROUTER, fingerprint=None, transports=(), capacity=None)
    await on_own_server(act, ttl_s=2.0)


@pytest.mark.parametrize(
    ("spoil", "mend", "words"),
    [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", "OOM|maxmemory"),
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "READONLY"),
    ],
    ids=["full", "a replica"],
)
async def test_a_redis_that_refuses_writes_counts_as_unavailable_and_no_member_is_removed(
    spoil: str, mend: str, words: str
) -> None:
    """It still answers reads, with fewer and fewer members."""

    async def act(server: RedisServer, registry: Registry) -> None:
        async with Redis.from_url(server.url) as redis, aclosing(registry.watch()) as watch:
            async with kept(registry, member()), asyncio.timeout(DEADLINE_S):
                assert await anext(watch) == (member(),)
                news = asyncio.ensure_future(anext(watch))
                await redis.execute_command(*spoil.split())  # type: ignore[no-untyped-call]
                with pytest.raises(RegistryUnavailable, match=words):
                    await registry.renew(member())
                await asyncio.wait([news], timeout=1.5 * registry.ttl_s)
                assert not news.done()
                await redis.execute_command(*mend.split())  # type: ignore[no-untyped-call]
                await registration_seen(registry)
                async with kept(registry, member("d0")):
                    assert await news == (member("d0"), member())

    await on_own_server(act, timeout_s=DEADLINE_S)


async def test_a_loading_redis_counts_as_unavailable() -> None:
    async def load(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")

    server = await asyncio.start_server(load, "127.0.0.1", 0)
    registry = Registry(
        url=f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", cluster_name="c", ttl_s=1.0, keys=KEYS
    )
    registration = Registration(registry, member())
    await registration.set_state(MemberState.READY)
    with pytest.raises(RegistryUnavailable, match="loading"):
        await registry.register(member())
    await registry.close()
    server.close()


async def test_a_half_open_subscription_is_replaced(redis_url: str, cluster_name: str) -> None:
    """The subscription receives nothing more and reports no error, while everything else works."""
    subscribed: asyncio.Queue[None] = asyncio.Queue()
    number = itertools.count(1)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", int(redis_url.split(":")[2].split("/")[0]))
        answers = asyncio.create_task(answer(there[0], writer))
        while data := await reader.read(65536):
            there[1].write(data)
        answers.cancel()
        there[1].close()
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            if b"subscribe" in data:
                subscribed.put_nowait(None)
                if next(number) == 1:
                    return  # the first subscription receives nothing after its confirmation

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    registry = Registry(url=url, cluster_name=cluster_name, ttl_s=0.5, keys=KEYS)
    async with aclosing(registry.watch()) as watch, asyncio.timeout(DEADLINE_S):
        assert await anext(watch) == ()
        news = asyncio.ensure_future(anext(watch))
        await subscribed.get()
        await subscribed.get()
        async with kept(registry, member()):
            assert await news == (member(),)
    await registry.close()
    server.close()


async def registration_seen(registry: Registry) -> None:
    """Wait until the member that renews is in the registry again."""
    async with aclosing(registry.watch()) as watch:
        await until(watch, lambda members: member() in members)


async def test_an_unreachable_redis_is_named_without_its_password() -> None:
    registry = Registry(url="redis://:secret@127.0.0.1:1/0", cluster_name="c", ttl_s=1.0, keys=KEYS)
    with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:1") as refusal:
        await registry.ping()
    assert "secret" not in refusal.value.message
