"""The real Redis, one per run of the tests, and clusters in it. Starting four workers costs seconds: a test that can
share one does, on the event loop of the session. The fixture restarts members that a test ended."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.registry.redis_server import RedisServer
from tests.system.rigs.processes.local_cluster import LocalCluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the last output of every member of a failed test's clusters."""
    report = yield
    if report.failed and call.excinfo is not None:
        frames = (entry.frame.f_locals.values() for entry in call.excinfo.traceback)
        for cluster in _clusters(chain(item.funcargs.values(), *frames)):
            report.sections.append((f"Members of {cluster.name}", cluster.last_words()))
    return report


def _clusters(found: Iterable[object]) -> list[LocalCluster]:
    """Return the clusters among these objects and their attributes, each once."""
    objects = list(found)
    parts = (getattr(thing, "__dict__", {}).values() for thing in objects)
    return list(dict.fromkeys(thing for thing in chain(objects, *parts) if isinstance(thing, LocalCluster)))


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
    verify = ("--kv-verify", "keyed") if transport == "tcp" else ()
    cluster = LocalCluster(redis_url, directory, flags=(*flags, *verify))
    try:
        yield await cluster.start(prefill=2, decode=2)
        living = {name for name, member in cluster.members.items() if member.is_running}
    finally:
        codes = await cluster.stop()
    assert {name: codes[name] for name in living} == dict.fromkeys(living, 0), cluster.output()[-4000:]
