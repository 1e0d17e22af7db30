"""The device of an idle worker hangs: its own canary detects it, and the worker exits or reports it to its supervisor.

One worker alone, without a router: every step in it is a canary's.
"""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.observe.health import LIVENESS
from cluster.process import ExitStatus
from tests.faults.control import FaultControl
from tests.faults.faulty_transport import Fault
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

_FLAGS = (
    *("--dtype", "float32", "--num-blocks", "64", "--canary-interval-s", "0.1"),
    *("--step-timeout-s", "1", "--stuck-exit-s", "3"),
)
_DEADLINE_S = 60.0


async def _is_alive(health_address: str) -> bool:
    """Return the liveness that an orchestrator's probe receives."""
    async with grpc.aio.insecure_channel(health_address) as channel:
        request = health_pb2.HealthCheckRequest(service=LIVENESS)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("name", ["prefill0", "decode0"])
async def test_a_canary_finds_an_idle_device_that_hangs_and_the_worker_exits(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    control, cluster = FaultControl(tmp_path), LocalCluster(redis_url, tmp_path)
    await control.start()
    monkeypatch.setenv("FAULT_CONTROL", str(control.path))
    try:
        member = await cluster.start_member(name, "tests.faults.hanging_worker", _FLAGS)
        order = await control.worker(name)
        async with asyncio.timeout(_DEADLINE_S):
            while not (await cluster.inspect(name)).figures["steps"]:  # the first one may take longer
                pass
            assert await _is_alive(member.ready["health"])

            await order.order(Fault.HELD)
            assert await order.injected() is Fault.HELD, "no canary came"
            while await _is_alive(member.ready["health"]):
                pass

        assert await member.exit_code() == ExitStatus.STUCK
        assert "has run for" in "".join(member.output)
    finally:
        await cluster.stop()
        await control.stop()
