"""A flood, slow clients and a router that does not read cost bounded memory, leave nothing, and delay no other client.

Processes are observed from outside, by /proc and by their own metrics.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from cluster.messages import DecodeJob, MemberId, Sampling, SequenceStart, TokenStops
from cluster.protocol import wire
from cluster.serving.rpc_errors import RETRY_AFTER_S
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from tests.polling import until
from tests.system.rigs.members.asking import ask, question
from tests.system.rigs.processes.local_cluster import LocalCluster, Member

pytestmark = pytest.mark.asyncio(loop_scope="session")

_DEADLINE_S = 60.0
_FLOOD_S = 240.0
_MAX_LIVE = 16
_LONG_TOKENS = 300  # takes longer than refusing a few hundred
_MOST_GROWN_BYTES = 48 << 20  # of one process; the allocator keeps some of what a peak took
_MOST_LEFT_FDS = 4


@dataclass(frozen=True, slots=True)
class _Taken:
    rss_bytes: int
    num_fds: int
    num_threads: int


def _taken(member: Member) -> _Taken:
    proc = Path("/proc") / str(member.process.pid)
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
    rss_bytes = int(status["VmRSS"].split()[0]) << 10
    return _Taken(rss_bytes, len(os.listdir(proc / "fd")), int(status["Threads"]))


@asynccontextmanager
async def _small_router(cluster: LocalCluster) -> AsyncIterator[Member]:
    """Start one more router with low limits and short timeouts."""
    flags = ("--port", "0", "--grpc-port", "0", "--max-live-requests", str(_MAX_LIVE), "--max-buffered-tokens", "3000")
    name = f"router-{secrets.token_hex(3)}"
    router = await cluster.start_member(name, "router", (*flags, "--client-stall-s", "5", "--log-level", "error"))
    try:
        yield router
    finally:
        del cluster.members[name]
        router.send_signal(signal.SIGTERM)
        assert await router.exit_code() == 0, "".join(router.output)
        assert "Traceback" not in "".join(router.output)


async def _asked(
    cluster: LocalCluster, channel: grpc.aio.Channel, number: int, untold: set[int]
) -> grpc.aio.AioRpcError | None:
    """Keep the place of every served request until all requests have been answered, so that each request has a separate
    place."""
    asked = question((5, 6, 7, number % 900), max_tokens=_LONG_TOKENS, ignore_eos=True, cache_salt=str(number))
    call = cluster.inference(channel).Generate(asked, timeout=_FLOOD_S)
    try:
        async for _ in call:
            untold.discard(number)
            if not untold:
                call.cancel()
                return None
    except grpc.aio.AioRpcError as error:
        return error
    finally:
        untold.discard(number)
    return None


async def _flood(cluster: LocalCluster, router: Member, num_requests: int) -> tuple[int, list[grpc.aio.AioRpcError]]:
    """Send all requests at once; return how many were served, and the errors of the others."""
    untold = set(range(num_requests))
    async with cluster.channel(router.name) as channel:
        ended = await asyncio.gather(*(_asked(cluster, channel, number, untold) for number in range(num_requests)))
    refusals = [end for end in ended if end is not None]
    return num_requests - len(refusals), refusals


def _slow_client(router: Member) -> socket.socket:
    """Ask for a long answer and read nothing of it."""
    host, _, port = router.ready["http"].rpartition(":")
    body = {"model": "", "prompt": [5, 6, 7], "n": 2, "max_tokens": 300, "ignore_eos": True, "logprobs": 20}
    content = json.dumps(body | {"stream": True, "cache_salt": secrets.token_hex(4)}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(_DEADLINE_S)
    client.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
    return client


async def _live_requests(cluster: LocalCluster, router: Member) -> int:
    async with cluster.channel(router.name) as channel:
        status = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=10)
    return int(status.live_requests)


async def _survives(cluster: LocalCluster, *, num_requests: int, num_slow: int) -> None:
    async with _small_router(cluster) as router:
        members = [router, *(cluster.members[name] for name in cluster.workers())]
        await _flood(cluster, router, _MAX_LIVE)  # what a process takes once, it takes now
        before = {member.name: _taken(member) for member in members}
        prompts_done = (await cluster.figures("prefill"))["prompts_done"]

        num_served, refusals = await _flood(cluster, router, num_requests)
        told = [refusal for refusal in refusals if refusal.code() is not grpc.StatusCode.CANCELLED]
        # Of a thousand calls that it has not accepted yet gRPC itself drops some.
        assert _MAX_LIVE <= num_served < num_requests / 4 and told
        assert {refusal.code() for refusal in told} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all(float(dict(refusal.trailing_metadata() or ())[RETRY_AFTER_S]) > 0 for refusal in told)
        assert (await cluster.figures("prefill"))["prompts_done"] - prompts_done == num_served

        with ExitStack() as clients:
            for _ in range(num_slow):
                clients.enter_context(closing(_slow_client(router)))
            assert (await ask(cluster, question((9, 8, 7), max_tokens=4))).token_ids  # of the other router
            await until(lambda: _is_idle(cluster, router), what=f"{router.name} has no request")
        await cluster.until_free()
        await until(lambda: _has_let_go(members, before), what=f"no more file descriptors than before: {before}")
        for member in members:
            grown = _taken(member).rss_bytes - before[member.name].rss_bytes
            assert grown < _MOST_GROWN_BYTES, f"{member.name} grew by {grown >> 20} MiB"
            assert _taken(member).num_threads <= before[member.name].num_threads + 4


async def _is_idle(cluster: LocalCluster, router: Member) -> bool:
    return not await _live_requests(cluster, router)


async def _has_let_go(members: list[Member], before: dict[str, _Taken]) -> bool:
    await asyncio.sleep(0)
    return all(_taken(member).num_fds <= before[member.name].num_fds + _MOST_LEFT_FDS for member in members)


async def test_a_flood_and_slow_clients_leave_nothing_behind(cluster: LocalCluster) -> None:
    await _survives(cluster, num_requests=150, num_slow=8)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_thousand_requests_and_fifty_slow_clients_leave_nothing_behind(cluster: LocalCluster) -> None:
    await _survives(cluster, num_requests=2000, num_slow=50)


async def test_a_router_that_does_not_read_does_not_delay_other_routers(cluster: LocalCluster) -> None:
    """Its sequence runs to the end, its messages wait within bounds, and the same worker serves others."""
    router = MemberId("unread", "1")
    job = DecodeJob(
        request_id="unread",
        attempt=1,
        router=router,
        prompt_token_ids=(5, 6, 7),
        sampling=Sampling(temperature=0.0, num_logprobs=20),
        stops=TokenStops(max_tokens=250, min_tokens=0, stop_token_ids=frozenset()),
        sequences=tuple(SequenceStart(handle, handle, ()) for handle in range(2)),
        signed_ticket=None,
        timeout_s=_DEADLINE_S,
        cache_salt=secrets.token_hex(4),
    )
    async with cluster.channel("decode0") as channel:
        stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        stream = stub.Connect()
        await stream.write(worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router=str(router))))
        assert (await stream.read()).WhichOneof("message") == "hello"
        await stub.Start(wire.decode_job_to_wire(job))
        answers = await asyncio.gather(*(ask(cluster, question((9, 8, number), max_tokens=8)) for number in range(4)))
        assert all(len(answer.token_ids) == 8 or answer.finish_reasons[0] == "stop" for answer in answers)
        await cluster.until_free()
        assert (await cluster.inspect("decode0")).figures["stream_bytes"] < 32 << 20
        stream.cancel()


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_an_http_client_that_leaves_a_whole_answer_frees_both_pools(cluster: LocalCluster, path: str) -> None:
    asked: dict[str, Any] = {"model": "", "max_tokens": 900, "ignore_eos": True, "cache_salt": secrets.token_hex(4)}
    asked |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": [5, 6, 7, 8]}
    before = await cluster.figures("decode")
    address = cluster.members["router0"].ready["http"]
    async with httpx.AsyncClient(base_url=f"http://{address}", verify=False, timeout=_DEADLINE_S) as http:
        asking = asyncio.create_task(http.post(f"/v1/{path}", json=asked))
        drawn = before["tokens_drawn"]
        await until(lambda: _has_drawn(cluster, drawn), what=f"more than {drawn} tokens are drawn")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await cluster.until_free()
    await until(lambda: _is_idle(cluster, cluster.members["router0"]), what="router0 has no request")
    assert (await cluster.figures("decode"))["tokens_drawn"] - before["tokens_drawn"] < 900


async def _has_drawn(cluster: LocalCluster, tokens_before: float) -> bool:
    return (await cluster.figures("decode"))["tokens_drawn"] > tokens_before + 3


async def test_far_too_large_requests_are_refused_over_http_and_grpc_while_others_are_served(
    cluster: LocalCluster,
) -> None:
    """The refusal has a named reason and costs no worker any work. The router answers a later request."""
    text = "def f(x): return x; " * 195_000  # 3.9 MB
    prompts_done = (await cluster.figures("prefill"))["prompts_done"]
    address = cluster.members["router0"].ready["http"]
    async with httpx.AsyncClient(base_url=f"http://{address}", verify=False, timeout=_DEADLINE_S) as http:
        bodies = [
            json.dumps({"model": "", "prompt": text}),
            json.dumps({"model": "", "prompt": [5] * 1_000_000}),
            '{"model": "", "prompt": ' + "[" * 1_000_000,
            '{"model": "", "messages": [' + "{}," * 1_000_000 + "{}]}",
        ]
        paths = ["completions", "completions", "completions", "chat/completions"]
        answers = [asyncio.create_task(http.post(f"/v1/{p}", content=b)) for p, b in zip(paths, bodies, strict=True)]
        over_grpc = asyncio.create_task(_refused(cluster, inference_pb2.GenerateRequest(text=text)))
        served = await ask(cluster, question((9, 8, 7), max_tokens=1))
        assert len(served.token_ids) == 1
        for answer in await asyncio.gather(*answers):
            assert answer.status_code == 400, answer.text[:500]
            assert len(answer.content) < 2000
        assert await over_grpc is grpc.StatusCode.INVALID_ARGUMENT
    assert (await cluster.figures("prefill"))["prompts_done"] == prompts_done + 1


async def _refused(cluster: LocalCluster, request: inference_pb2.GenerateRequest) -> grpc.StatusCode:
    async with cluster.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await cluster.inference(channel).Generate(request, timeout=_DEADLINE_S).read()
    code = refusal.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code
