"""A prefill worker that drains while its KV is being read stays until that ticket is settled."""

import asyncio
import signal
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.observe.health import READINESS
from cluster.process import ExitStatus
from tests.faults.control import FaultControl
from tests.faults.faulty_transport import Fault
from tests.system.rigs.members.asking import ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

_QUESTION = question(range(20, 220), max_tokens=6, ignore_eos=True)
_FLAGS = (
    *("--dtype", "float32", "--num-blocks", "96", "--prefix-caching", "off"),
    *("--read-timeout-s", "100", "--drain-grace-s", "100"),
)
_DEADLINE_S = 60.0


async def _until_not_ready(cluster: LocalCluster, name: str) -> None:
    async with cluster.channel(name) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
        while (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING:
            pass
        watch.cancel()


async def test_a_draining_prefill_worker_stays_until_its_ticket_is_settled(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, cluster = FaultControl(tmp_path), LocalCluster(redis_url, tmp_path)
    await control.start()
    monkeypatch.setenv("FAULT_CONTROL", str(control.path))
    monkeypatch.setenv("FAULT_LATE_S", "0")
    try:
        await cluster.start_member("prefill0", "prefill_worker", _FLAGS)
        await cluster.start_member("decode0", "tests.faults.faulty_decode", _FLAGS)
        await cluster.start_member("router0", "router", ("--port", "0", "--grpc-port", "0"))
        undisturbed = await ask(cluster, _QUESTION)
        reader, leaving = await control.worker("decode0"), cluster.members["prefill0"]
        async with asyncio.timeout(_DEADLINE_S), asked(cluster, _QUESTION) as answer:
            await reader.order(Fault.HELD)
            await reader.injected()
            await answer.until(1)  # its prefill is done; only the ticket is left
            leaving.send_signal(signal.SIGTERM)
            await _until_not_ready(cluster, "prefill0")
            assert (await cluster.inspect("prefill0")).figures["live_tickets"] == 1
            assert len(answer.token_ids) == 1 and leaving.process.returncode is None

            reader.let_go()
            await answer.end()
        assert answer.choices == undisturbed.choices and not answer.ledger.reasons
        assert await leaving.exit_code() == ExitStatus.OK, "".join(leaving.output)
        await cluster.until_free()
    finally:
        codes = await cluster.stop()
        await control.stop()
    assert set(codes.values()) == {0}, cluster.output()[-4000:]
