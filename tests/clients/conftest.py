"""A real cluster in a thread of its own, and the environment of the clients."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from cluster.registry.redis_server import RedisServer
from tests.system.rigs.processes.local_cluster import LocalCluster

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "build" / "clients"
_TIMEOUT_S = 560.0
_ROUTER = ("--port", "0", "--grpc-port", "0", "--placement", "least-loaded")
_PARSERS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
_BRIEF = 24  # tokens of an answer
T = TypeVar("T")

Run = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.timeout(3600))
        if not (ENVIRONMENT / "bin" / "schemathesis").exists():
            item.add_marker(pytest.mark.skip(reason="needs the clients' environment: make test-clients"))


@pytest.fixture(scope="session")
def on_loop() -> Iterator[Callable[[Coroutine[None, None, object]], object]]:
    """Run coroutines on an event loop that continues between them."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="session")
def cluster(
    on_loop: Callable[[Coroutine[None, None, T]], T], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """Two prefill and two decode workers, and two routers. The second one bounds answers to a few tokens: answers that
    fill the context would be most of the time of a thousand generated requests.
    """
    redis = on_loop(RedisServer.start())  # type: ignore[arg-type]
    directory = tmp_path_factory.mktemp("clients")
    cluster = LocalCluster(redis.url, directory, flags=("--dtype", "float32", "--num-blocks", "512"))  # type: ignore[attr-defined]
    try:
        on_loop(cluster.start(prefill=2, decode=2, router_flags=_PARSERS))  # type: ignore[arg-type]
        brief = (*_ROUTER, *_PARSERS, "--max-output-length", str(_BRIEF))
        on_loop(cluster.start_member("router1", "router", brief))  # type: ignore[arg-type]
        yield cluster
    finally:
        on_loop(cluster.stop())  # type: ignore[arg-type]
        on_loop(redis.stop())  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def url(cluster: LocalCluster) -> str:
    return f"http://{cluster.members['router0'].ready['http']}"


@pytest.fixture(scope="session")
def brief_url(cluster: LocalCluster) -> str:
    """The URL of the router whose answers are brief."""
    return f"http://{cluster.members['router1'].ready['http']}"


@pytest.fixture
def run_client(tmp_path: Path) -> Run:
    """Run a program of the clients' environment to its end in an empty folder. Returns its output."""

    def run(
        program: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = _TIMEOUT_S
    ) -> str:
        finished = subprocess.run(
            [str(ENVIRONMENT / "bin" / program), *arguments],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "COLUMNS": "200"} | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        output = finished.stdout + finished.stderr
        assert finished.returncode == 0, output[-6000:]
        return output

    return run
