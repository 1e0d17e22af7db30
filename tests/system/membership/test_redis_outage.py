"""Tests that clients notice nothing while Redis dies and comes back empty, stops until every key has expired, or is
emptied.

The cluster is real, on a separate Redis. Clients of both interfaces send requests continuously; each answer must be the
undisturbed one, without a retry.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from cluster.auth.key_file import load_keys
from cluster.process import ExitStatus
from cluster.registry.redis_server import RedisServer
from cluster.registry.registry import Registry
from tests.system.rigs.members.asking import Answer, ask, question
from tests.system.rigs.members.registry_rig import until
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEASE_S = 3.0  # a silent worker is doubted before it is over: long enough for a busy machine
_LONGER_S = 1.2 * LEASE_S
_DEADLINE_S = 60.0
_MEMBERSHIP = ("--registration-ttl-s", str(LEASE_S))
_FLAGS = (*_MEMBERSHIP, "--heartbeat-s", "0.5", "--dtype", "float32", "--num-blocks", "256", "--prefix-caching", "off")
_QUESTION = question(range(30, 110), max_tokens=200, ignore_eos=True)
_BODY = {"model": "demo_model", "prompt": list(range(40, 90)), "max_tokens": 100, "temperature": 0, "stream": True}


@dataclass
class Cluster:
    members: LocalCluster
    redis: RedisServer
    tokens: tuple[int, ...]  # undisturbed
    text: str

    async def registered(self) -> None:
        """Wait until every running member is in the registry."""
        running = {f"{name}@{member.incarnation}" for name, member in self.members.members.items()}
        keys = load_keys(self.members.key_file)
        registry = Registry(url=self.redis.url, cluster_name=self.members.name, ttl_s=LEASE_S, keys=keys)
        async with aclosing(registry.watch()) as watch, asyncio.timeout(_DEADLINE_S):
            await until(watch, lambda found: {str(member.id) for member in found} >= running)
        await registry.close()

    async def http_text(self) -> str:
        """Return the text of a streamed answer, which may come in chunks of any size."""
        events = []
        url = f"http://{self.members.members['router0'].ready['http']}/v1/completions"
        async with httpx.AsyncClient(timeout=_DEADLINE_S) as http, http.stream("POST", url, json=_BODY) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                events.append(line.removeprefix("data: "))
        *chunks, end = filter(None, events)
        assert end == "[DONE]"
        choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        return "".join(choice["text"] for choice in choices)

    @asynccontextmanager
    async def load(self) -> AsyncIterator[list["asyncio.Task[None]"]]:
        """Run clients. On exit each one completes its present request and reports its failures."""
        ending = asyncio.Event()
        num_answered = [0, 0]  # of gRPC, of HTTP

        async def ask_on(client: int) -> None:
            while not ending.is_set():
                if client % 2:
                    assert await self.http_text() == self.text
                else:
                    check(await ask(self.members, _QUESTION))
                num_answered[client] += 1

        def check(answer: Answer) -> None:
            assert answer.token_ids == self.tokens
            assert list(answer.ledger.reasons) == []

        clients = [asyncio.create_task(ask_on(number)) for number in range(len(num_answered))]
        try:
            async with asyncio.timeout(_DEADLINE_S):
                while not all(num_answered):
                    assert not await ended_within(clients, 0.05)
            yield clients
        finally:
            ending.set()
            await asyncio.gather(*clients)
        assert all(member.process.returncode is None for member in self.members.members.values())


async def ended_within(clients: list["asyncio.Task[None]"], duration_s: float) -> list[BaseException | None]:
    """Return the errors of those clients that ended within this time although they should continue."""
    done, _ = await asyncio.wait(clients, timeout=duration_s, return_when=asyncio.FIRST_COMPLETED)
    return [client.exception() for client in done]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    redis = await RedisServer.start()
    members = LocalCluster(redis.url, tmp_path_factory.mktemp("outage"), flags=_FLAGS)
    made = Cluster(members, redis, (), "")
    try:
        await members.start(router_flags=_MEMBERSHIP)
        made.tokens = (await ask(members, _QUESTION)).token_ids
        made.text = await made.http_text()
        yield made
        codes = await members.stop()
        assert set(codes.values()) == {0}, members.output()[-4000:]
    finally:
        await members.stop()
        await made.redis.stop()


async def _gone_for_longer_than_a_lease(cluster: Cluster, back: Awaitable[None]) -> None:
    async with cluster.load() as clients:
        assert not await ended_within(clients, _LONGER_S)
        await back
        await cluster.registered()
        assert not await ended_within(clients, LEASE_S / 2)
    await cluster.members.until_free()


@pytest.mark.slow
async def test_redis_killed_beyond_the_registration_ttl_and_back_empty_loses_no_request(cluster: Cluster) -> None:
    async def start() -> None:
        cluster.redis = await RedisServer.start(cluster.redis.port)

    os.kill(cluster.redis.pid, signal.SIGKILL)
    await cluster.redis.wait()
    await _gone_for_longer_than_a_lease(cluster, start())


@pytest.mark.slow
async def test_a_redis_stopped_until_every_key_has_expired_loses_no_request(cluster: Cluster) -> None:
    async def wake() -> None:
        os.kill(cluster.redis.pid, signal.SIGCONT)

    os.kill(cluster.redis.pid, signal.SIGSTOP)
    await _gone_for_longer_than_a_lease(cluster, wake())


@pytest.mark.slow
async def test_emptying_a_running_redis_loses_no_request(cluster: Cluster) -> None:
    async with cluster.load() as clients, Redis.from_url(cluster.redis.url) as redis:
        for _ in range(3):
            await redis.flushall()
            assert not await ended_within(clients, LEASE_S / 4)
        await cluster.registered()
        assert not await ended_within(clients, LEASE_S / 4)
    await cluster.members.until_free()


@pytest.mark.slow
async def test_a_worker_that_starts_without_redis_reports_it_and_a_later_one_joins(cluster: Cluster) -> None:
    members = cluster.members
    os.kill(cluster.redis.pid, signal.SIGKILL)
    await cluster.redis.wait()
    early = await members.spawn("decode1", "decode_worker", _FLAGS)
    assert early.process.stdout is not None
    said = await asyncio.wait_for(early.process.stdout.read(), _DEADLINE_S)
    last = said.decode().strip().splitlines()[-1]
    assert await early.exit_code() == ExitStatus.REGISTRY
    assert f"127.0.0.1:{cluster.redis.port}" in last
    assert "Traceback" not in said.decode()
    cluster.redis = await RedisServer.start(cluster.redis.port)
    await members.start_member("decode1", "decode_worker", _FLAGS)
    await cluster.registered()
    await members.until_connected()
    assert (await ask(members, _QUESTION)).token_ids == cluster.tokens
