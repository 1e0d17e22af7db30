"""The real Redis, one per run of the tests, and clusters in it. Starting four workers costs seconds: a test that can
share one does, on the event loop of the session. The fixture restarts members that a test ended."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.registry.redis_server import RedisServer
from tests.system.local_cluster import LocalCluster


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A running redis-server."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(RedisServer.start())
    yield server.url
    loop.run_until_complete(server.stop())
    loop.close()


@pytest.fixture
def cluster_name() -> str:
    """A name that no other test uses."""
    return f"test-{secrets.token_hex(6)}"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shm_cluster(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    async with _two_and_two(redis_url, tmp_path_factory.mktemp("shm"), "shm") as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tcp_cluster(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    async with _two_and_two(redis_url, tmp_path_factory.mktemp("tcp"), "tcp") as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(shm_cluster: LocalCluster) -> LocalCluster:
    """A complete and idle cluster; its caches are as the test before left them. Two prefill and two decode workers,
    float32."""
    await shm_cluster.mend()
    await shm_cluster.until_free()
    return shm_cluster


@asynccontextmanager
async def _two_and_two(redis_url: str, directory: Path, transport: str) -> AsyncIterator[LocalCluster]:
    flags = ("--dtype", "float32", "--kv-transports", transport, "--max-prefill-tokens", "64", "--num-blocks", "512")
    cluster = LocalCluster(redis_url, directory, flags=flags)
    try:
        yield await cluster.start(prefill=2, decode=2, router_flags=("--placement", "least-loaded"))
        living = {name for name, member in cluster.members.items() if member.process.returncode is None}
    finally:
        codes = await cluster.stop()
    assert {name: codes[name] for name in living} == dict.fromkeys(living, 0), cluster.output()[-4000:]
