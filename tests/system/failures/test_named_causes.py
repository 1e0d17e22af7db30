"""Five faults of a real cluster: the list of faults names the cause, and so does one alert of a live Prometheus."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from cli.top.watch import Watch
from cluster.registry.redis_server import RedisServer
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from tests.polling import until
from tests.system.rigs.members.asking import ask, question
from tests.system.rigs.processes.live_prometheus import LivePrometheus, needs_prometheus, prometheus_of
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, needs_prometheus, pytest.mark.timeout(1_200)]

_FLAGS = ("--dtype", "float32", "--num-blocks", "96", "--prefix-caching", "off", "--kv-transports", "tcp")
_ROUTER = ("--port", "0", "--grpc-port", "0", "--placement", "round-robin", "--breaker-failures", "2")
_LONG_S = 180.0
_LIVE_S = 600.0  # most alerts need a mean of five minutes, for two
_SHORT = question([20 + i % 700 for i in range(200)], max_tokens=8, ignore_eos=True)


async def faults_of(cluster: LocalCluster) -> str:
    """Return the faults that the page and `tandem top` show."""
    async with cluster.channel() as channel:
        answer = await admin_pb2_grpc.AdminStub(channel).Overview(admin_pb2.OverviewRequest(), timeout=60)
    watch = Watch()
    watch.update(answer)
    return "; ".join(watch.faults())


@dataclass
class Stage:
    cluster: LocalCluster
    redis: RedisServer
    prometheus: LivePrometheus

    async def names(self, cause: str, alert: str, **labels: str) -> None:
        """Wait until the overview names the cause, and until the alert fires with these labels and for nothing else."""
        await until(
            partial(faults_of, self.cluster),
            lambda faults: cause in faults,
            what="the overview names the cause",
            deadline_s=_LONG_S,
            pause_s=0.5,
        )
        await until(
            partial(self.prometheus.firing, alert),
            lambda firing: len(firing) == 1 and labels.items() <= firing[0].items(),
            what=f"a Prometheus that scrapes the cluster fires {alert} for {labels} alone",
            deadline_s=_LIVE_S,
            pause_s=1.0,
        )


@asynccontextmanager
async def load(cluster: LocalCluster, request: inference_pb2.GenerateRequest, num_clients: int) -> AsyncIterator[None]:
    """Send requests without pause. Some may fail: these tests are about an operator's view."""

    async def keep_asking() -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):
                await ask(cluster, request)

    clients = [asyncio.create_task(keep_asking()) for _ in range(num_clients)]
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Run three workers that decode well, a worker whose KV is read slowly, and a worker whose KV is never read."""
    folder = tmp_path_factory.mktemp("causes")
    redis = await RedisServer.start()
    cluster = LocalCluster(redis.url, folder, flags=_FLAGS)
    try:
        await cluster.start_member("prefill0", "prefill_worker", _FLAGS)
        for number in range(3):
            await cluster.start_member(f"decode{number}", "decode_worker", _FLAGS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FAULT_LATE_S", "0.2")
            for name, fault in (("decode-far", "late"), ("decode-cut", "refused")):
                patch.setenv("FAULT_ALWAYS", fault)
                await cluster.start_member(name, "tests.faults.faulty_decode", _FLAGS)
        await cluster.start_member("router0", "router", _ROUTER)
        async with prometheus_of(cluster, folder) as prometheus:
            yield Stage(cluster, redis, prometheus)
    finally:
        await cluster.stop()
        await redis.stop()


async def test_a_slow_link_is_named(stage: Stage) -> None:
    async with load(stage.cluster, _SHORT, 3):
        await stage.names(
            "decode-far reads KV from prefill0 by tcp",
            "TandemSlowLink",
            importer="decode-far",
            exporter="prefill0",
            transport="tcp",
        )


async def test_an_open_breaker_is_named(stage: Stage) -> None:
    async with load(stage.cluster, _SHORT, 3):
        await stage.names(
            "hand-offs from prefill0 to decode-cut fail",
            "TandemPairBreakerOpen",
            exporter="prefill0",
            importer="decode-cut",
        )


async def test_a_worker_with_a_tenth_of_its_core_is_named(stage: Stage) -> None:
    slow = stage.cluster.members["decode1"]

    async def slow_down() -> None:
        """Let the process run for a tenth of the time, in slices of about a step."""
        try:
            while True:
                slow.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.09)
                slow.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.01)
        finally:
            slow.send_signal(signal.SIGCONT)

    slowing = asyncio.create_task(slow_down())
    try:
        async with load(stage.cluster, question([20 + i for i in range(40)], max_tokens=200, ignore_eos=True), 6):
            await stage.names("decode1 decodes", "TandemSlowWorker", worker="decode1", leg="decode")
    finally:
        slowing.cancel()
        await asyncio.gather(slowing, return_exceptions=True)


async def test_a_full_kv_pool_is_named(stage: Stage) -> None:
    await stage.cluster.start_member("decode-small", "decode_worker", (*_FLAGS, "--num-blocks", "24"))
    await stage.prometheus.scrape(stage.cluster)
    async with load(stage.cluster, question([20 + i for i in range(40)], max_tokens=250, ignore_eos=True), 18):
        await stage.names("the KV pool of decode-small is full", "TandemKvPressure", member="decode-small")


async def test_a_stopped_redis_is_named(stage: Stage) -> None:
    os.kill(stage.redis.pid, signal.SIGSTOP)
    try:
        await stage.names("router0 has not read the registry", "TandemRedisAway", member="router0")
    finally:
        os.kill(stage.redis.pid, signal.SIGCONT)


async def test_the_only_link_of_a_cluster_is_named_once_it_is_slow_and_no_longer_when_it_recovers(
    redis_url: str, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    cluster = LocalCluster(redis_url, tmp_path, flags=_FLAGS)

    async def names(what: str, *, is_slow: bool = True) -> None:
        await until(
            partial(faults_of, cluster),
            lambda faults: ("decode0 reads KV from prefill0 by tcp" in faults) == is_slow,
            what=what,
            deadline_s=_LONG_S,
            pause_s=0.5,
        )

    try:
        await cluster.start_member("prefill0", "prefill_worker", _FLAGS)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("ALWAYS", "late"), ("LATE_S", "0.3"), ("WHILE", str(slow))):
                patch.setenv(f"FAULT_{name}", value)
            await cluster.start_member("decode0", "tests.faults.faulty_decode", _FLAGS)
        await cluster.start_member("router0", "router", _ROUTER)
        for _ in range(40):  # what its reads take at their fastest
            await ask(cluster, _SHORT)
        async with load(cluster, _SHORT, 3):
            slow.touch()
            await names("the only link is named")
            slow.unlink()
            await names("the only link is not named any more", is_slow=False)
    finally:
        await cluster.stop()
