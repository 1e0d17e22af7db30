"""Five faults of a real cluster: the list of faults and an alert name the cause, one alert in a live Prometheus."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
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
from tests.system.alert_rules import Scrapes, fires, needs_promtool, scrapes_of
from tests.system.asking import ask, question
from tests.system.live_prometheus import prometheus_of
from tests.system.local_cluster import LocalCluster
from tests.system.polling import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, needs_promtool, pytest.mark.timeout(400)]

_FLAGS = ("--dtype", "float32", "--num-blocks", "96", "--prefix-caching", "off", "--kv-transports", "tcp")
_ROUTER = ("--port", "0", "--grpc-port", "0", "--placement", "round-robin", "--breaker-failures", "2")
_LONG_S = 180.0
_LIVE_S = 600.0  # the alert needs a mean of five minutes, for two
_SHORT = question([20 + i % 700 for i in range(200)], max_tokens=8, ignore_eos=True)


@dataclass
class Stage:
    cluster: LocalCluster
    redis: RedisServer
    folder: Path

    async def wrong(self) -> str:
        """Return the faults that the page and `tandem top` show."""
        async with self.cluster.channel() as channel:
            answer = await admin_pb2_grpc.AdminStub(channel).Overview(admin_pb2.OverviewRequest(), timeout=60)
        watch = Watch()
        watch.update(answer)
        return "; ".join(watch.faults())

    async def names(self, cause: Callable[[str], bool], alert: str, **labels: str) -> None:
        """Wait until the cause is named in the overview, and by the alert."""
        before = await scrapes_of(self.cluster)
        await until(self.wrong, cause, what="the overview names the cause", deadline_s=_LONG_S)

        async def fired() -> bool:
            return await asyncio.to_thread(self._fires, alert, before, await scrapes_of(self.cluster), labels)

        await until(fired, what=f"{alert} fires", deadline_s=_LONG_S)

    def _fires(self, alert: str, before: Scrapes, now: Scrapes, labels: dict[str, str]) -> bool:
        return fires(alert, before, now, self.folder, **labels)

    @asynccontextmanager
    async def load(self, request: inference_pb2.GenerateRequest, num_clients: int) -> AsyncIterator[None]:
        """Send requests without pause. Some may fail: these tests are about an operator's view."""

        async def keep_asking() -> None:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await ask(self.cluster, request)

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
        yield Stage(cluster, redis, folder)
    finally:
        await cluster.stop()
        await redis.stop()


async def test_a_slow_link_is_named(stage: Stage) -> None:
    async with stage.load(_SHORT, 3):
        await stage.names(
            lambda wrong: "decode-far reads KV from prefill0 by tcp" in wrong, "TandemSlowLink", instance="decode-far"
        )


async def test_an_open_breaker_is_named(stage: Stage) -> None:
    async with stage.load(_SHORT, 3):
        cause = "hand-offs from prefill0 to decode-cut fail"
        await stage.names(lambda wrong: cause in wrong, "TandemPairBreakerOpen", instance="router0")


@pytest.mark.timeout(1_200)
async def test_a_worker_with_a_tenth_of_its_core_is_named(stage: Stage, tmp_path: Path) -> None:
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
        async with (
            prometheus_of(stage.cluster, tmp_path) as prometheus,
            stage.load(question([20 + i for i in range(40)], max_tokens=200, ignore_eos=True), 6),
        ):
            await stage.names(lambda wrong: "decode1 decodes" in wrong, "TandemSlowWorker", worker="decode1")
            await until(
                partial(prometheus.firing, "TandemSlowWorker", "worker"),
                lambda named: named == {"decode1"},
                what="a Prometheus that scrapes the cluster fires the alert for this worker alone",
                deadline_s=_LIVE_S,
                pause_s=1.0,
            )
    finally:
        slowing.cancel()
        await asyncio.gather(slowing, return_exceptions=True)


async def test_a_full_kv_pool_is_named(stage: Stage) -> None:
    await stage.cluster.start_member("decode-small", "decode_worker", (*_FLAGS, "--num-blocks", "24"))
    async with stage.load(question([20 + i for i in range(40)], max_tokens=250, ignore_eos=True), 18):
        cause = "the KV pool of decode-small is full"
        await stage.names(lambda wrong: cause in wrong, "TandemKvPressure", instance="decode-small")


async def test_a_stopped_redis_is_named(stage: Stage) -> None:
    os.kill(stage.redis.pid, signal.SIGSTOP)
    try:
        await stage.names(
            lambda wrong: "router0 has not read the registry" in wrong, "TandemRedisAway", instance="router0"
        )
    finally:
        os.kill(stage.redis.pid, signal.SIGCONT)
