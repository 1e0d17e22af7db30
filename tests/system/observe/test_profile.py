"""`tandem profile` of a worker that serves: a trace of its steps, without a restart and without text."""

import asyncio
import gzip
import json
from pathlib import Path

import grpc
import pytest

from cli.__main__ import main
from tandem.v1 import admin_pb2, admin_pb2_grpc
from tests.system.rigs.members.asking import ask, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")
_PROMPT = list(range(20, 84))


async def test_a_profile_has_the_steps_of_a_worker_that_serves(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, before = tmp_path / "trace.json.gz", cluster.members["decode0"].incarnation
    address = cluster.members["router0"].grpc_address
    arguments = ["profile", "decode0", "--steps", "6", "--timeout", "60", "--output", str(file), "--json"]
    profiling = asyncio.create_task(asyncio.to_thread(main, [*arguments, "--address", address]))
    while not profiling.done():
        await ask(cluster, question(_PROMPT, max_tokens=16, ignore_eos=True))
    assert await profiling == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["steps"], printed["member"]) == (6, f"decode0@{before}")
    trace = gzip.decompress(file.read_bytes())
    events = json.loads(trace)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert sum(name.startswith("step: ") for name in names) >= 6
    assert any(event.get("cat") == "cpu_op" for event in events)


async def test_a_router_has_no_steps_to_profile(cluster: LocalCluster) -> None:
    request = admin_pb2.ProfileRequest(member_id="router0", num_steps=5, timeout_s=1.0)
    async with cluster.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin_pb2_grpc.AdminStub(channel).Profile(request, timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
