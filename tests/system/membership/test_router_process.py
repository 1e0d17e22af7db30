"""The router as a program of its own: its settings and its exit. What it refuses at its start: test_bad_input.py."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.auth.key_file import load_keys
from cluster.process import ExitStatus, die_with_parent
from cluster.registry.registry import Registry
from cluster.serving.serving import open_channel
from tandem.v1 import inference_pb2_grpc
from tests.system.rigs.members.router_harness import DEMO_MODEL
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import SECRET, Store
from tests.system.rigs.members.served_router import generate_request

_FLAGS = ("--model", str(DEMO_MODEL), "--port", "0", "--grpc-port", "0")


async def _spawn(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent,
    )


@asynccontextmanager
async def _router(
    redis_url: str, cluster_name: str, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    process = await _spawn(*_FLAGS, "--redis", redis_url, "--cluster-name", cluster_name, *flags)
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        assert line.startswith("ready "), line
        yield process, dict(word.split("=", 1) for word in line.split()[1:])
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_sigterm_finishes_live_requests_refuses_others_and_exits_0(
    redis_url: str, cluster_name: str, tmp_path: Path
) -> None:
    key_file = tmp_path / "cluster.key"
    key_file.touch(0o600)
    key_file.write_text(SECRET.hex())
    registry = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=60, keys=load_keys(key_file))
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ScriptedDecode("d0", Store()))
        worker.pause_at = 3
        await registry.register(worker.member)
        process, addresses = await stack.enter_async_context(
            _router(redis_url, cluster_name, "--cluster-key-file", str(key_file))
        )
        stub = inference_pb2_grpc.InferenceStub(await stack.enter_async_context(open_channel(addresses["grpc"])))
        live = stub.Generate(generate_request(), timeout=60)
        async with asyncio.timeout(20):
            await worker.paused.wait()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            while (reason := await _refusal(stub)) is None:
                pass
        assert "draining" in reason
        async with httpx.AsyncClient(base_url=f"http://{addresses['http']}", timeout=20) as http:
            refused = await http.post("/v1/completions", json={"model": "demo_model", "prompt": "x", "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            assert [(await http.get(path)).status_code for path in ("/ready", "/health")] == [503, 200]
        worker.resumed.set()
        responses = [response async for response in live]
        assert responses[-1].HasField("summary")
        assert await asyncio.wait_for(process.wait(), 20) == ExitStatus.OK
        assert [member.id for member in await registry.members()] == [worker.id]
    await registry.close()


async def test_length_limits_of_the_router_apply_to_grpc_and_http(redis_url: str, cluster_name: str) -> None:
    flags = ("--max-input-length", "5", "--max-output-length", "7")
    async with AsyncExitStack() as stack:
        _, addresses = await stack.enter_async_context(_router(redis_url, cluster_name, *flags))
        stub = inference_pb2_grpc.InferenceStub(await stack.enter_async_context(open_channel(addresses["grpc"])))
        with pytest.raises(
            grpc.aio.AioRpcError, match="max_tokens is 8; --max-output-length allows at most 7"
        ) as refusal:
            await stub.Generate(generate_request(max_tokens=8), timeout=20).read()
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{addresses['http']}"))
        answer = await http.post("/v1/completions", json={"prompt": [5] * 6, "max_tokens": 1})
        assert answer.status_code == 400
        assert "6 tokens; --max-input-length allows at most 5" in answer.json()["error"]["message"]


async def _refusal(stub: inference_pb2_grpc.InferenceStub) -> str | None:
    """Return how a new request is refused; None while requests are still accepted."""
    call = stub.Generate(generate_request(max_tokens=1), timeout=20)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.details()
    call.cancel()
    return None


async def test_an_insecure_router_starts_and_reports_it_in_its_log_and_a_metric(
    redis_url: str, cluster_name: str
) -> None:
    open_flags = ("--host", "0.0.0.0", "--advertise-host", "127.0.0.1")
    async with _router(redis_url, cluster_name, *open_flags, "--insecure") as (process, addresses):
        async with httpx.AsyncClient(timeout=20) as http:
            metrics = (await http.get(f"http://{addresses['metrics']}/metrics")).text
        assert "tandem_insecure_ports 1.0" in metrics
        process.terminate()
        async with asyncio.timeout(30):
            _, log = await process.communicate()
        assert b"uses this router without a key" in log
