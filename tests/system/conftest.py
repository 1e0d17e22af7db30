"""The real Redis, one per run of the tests; each test has its own cluster in it."""

import asyncio
import secrets
from collections.abc import Iterator

import pytest

from cluster.redis_server import RedisServer


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
    """No other test's."""
    return f"test-{secrets.token_hex(6)}"
