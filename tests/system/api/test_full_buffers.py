"""Real HTTP clients of a real router whose buffers are full: the router ends a client that stopped reading, not one
that reads.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress

import httpx
import pytest

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Gate
from cluster.clock import ManualClock
from router.http.openai_api import build_app
from router.http.server import HttpServer
from router.running import running
from tests.system.rigs.members.router_harness import RouterUnderTest, router_under_test

pytestmark = pytest.mark.uvloop  # the event loop of a router
_NUM_TOKENS = 900
_NUM_LOGPROBS = 20
_WEIGHT = _NUM_TOKENS * (1 + _NUM_LOGPROBS)  # of one answer
_DEADLINE_S = 60.0


@asynccontextmanager
async def _served(max_buffered_tokens: int, clock: ManualClock) -> AsyncIterator[tuple[RouterUnderTest, int]]:
    """Run the router with one worker of each pool, and yield it with its HTTP port."""
    async with router_under_test(max_buffered_tokens=max_buffered_tokens, outbox_clock=clock) as router:
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        app = build_app(
            pipeline=router.pipeline,
            live_requests=router.live_requests,
            tokenization=router.tokenization,
            telemetry=router.telemetry,
            ready=lambda: True,
            gate=Gate(),
            audit=Audit(),
            max_message_bytes=100_000,
        )
        server, stop = HttpServer(host="127.0.0.1", port=0), asyncio.Event()
        serving = asyncio.create_task(
            server.serve(app, max_connections=20, telemetry=router.telemetry, stop=stop, grace_s=1.0)
        )
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the kernel's share is small
        server._socket.listen()  # so that clients need not wait for it
        try:
            yield router, server.port
        finally:
            stop.set()
            async with asyncio.timeout(_DEADLINE_S):
                await serving


def _question(*, stream: bool) -> dict[str, object]:
    return {
        "model": "",
        "prompt": [5, 6, 7, 8],
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "seed": 1,
        "logprobs": _NUM_LOGPROBS,
        "stream": stream,
    }


def _client_that_never_reads(port: int, question: dict[str, object]) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(_DEADLINE_S)
    client.connect(("127.0.0.1", port))
    body = json.dumps(question).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    client.sendall(head.encode() + b"\r\n\r\n" + body)
    assert client.recv(15) == b"HTTP/1.1 200 OK"
    return client


async def _ticking(clock: ManualClock) -> None:
    """Advance the clock, so that a client that stops reading soon exceeds its time."""
    while True:
        clock.advance(1.0)
        await asyncio.sleep(0.01)


async def test_a_client_that_stopped_reading_is_ended_and_a_whole_answer_with_more_is_served() -> None:
    clock = ManualClock()
    async with (
        _served(2 * _WEIGHT + 500, clock) as (router, port),
        asyncio.timeout(_DEADLINE_S),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=_DEADLINE_S) as http,
    ):
        with closing(
            await asyncio.to_thread(_client_that_never_reads, port, _question(stream=True) | {"n": 2})
        ) as stopped:
            while router.live_requests.num_buffered_tokens < 1.1 * _WEIGHT:  # noqa: ASYNC110 -- a full buffer signals no event
                await asyncio.sleep(0.01)
            async with running(_ticking(clock)):
                answer = await http.post("/v1/completions", json=_question(stream=False))
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == _NUM_TOKENS
            while router.live_requests.num_buffered_tokens:  # noqa: ASYNC110 -- the last send may return after its client has all
                await asyncio.sleep(0.01)
            assert b'"code":"slow_client"' in await asyncio.to_thread(_read_to_its_end, stopped)
            assert router.telemetry.value("tandem_requests_total", outcome="slow_client") == 1


async def test_a_client_that_does_not_read_its_prompts_scores_is_ended_before_one_that_reads() -> None:
    """They are one long event, which counts until its client has taken it."""
    clock, scored = ManualClock(), {"prompt": [5] * _NUM_TOKENS, "max_tokens": 2, "prompt_logprobs": _NUM_LOGPROBS}
    num_values = (_NUM_TOKENS - 1) * (1 + _NUM_LOGPROBS)
    async with (
        _served(num_values + _WEIGHT // 2, clock) as (router, port),
        asyncio.timeout(_DEADLINE_S),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=_DEADLINE_S) as http,
    ):
        question = _question(stream=True) | scored | {"logprobs": None}
        with closing(await asyncio.to_thread(_client_that_never_reads, port, question)) as stopped:
            assert router.live_requests.num_buffered_tokens >= num_values
            async with running(_ticking(clock)):
                answer = await http.post("/v1/completions", json=_question(stream=False))
            assert answer.status_code == 200, answer.text
            assert b"[DONE]" not in await asyncio.to_thread(_read_to_its_end, stopped)
            assert router.telemetry.value("tandem_stalled_clients_total", surface="http") == 1
        again = await http.post("/v1/completions", json=question)
        assert again.status_code == 200 and again.text.endswith("data: [DONE]\n\n")
    assert router.live_requests.num_buffered_tokens == 0


def _read_to_its_end(client: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):  # a connection that the router closed
        while (part := client.recv(1 << 16)) and not part.endswith(b"0\r\n\r\n"):
            parts.append(part)
        parts.append(part)
    return b"".join(parts)


async def test_whole_answers_that_do_not_fit_are_refused_by_name() -> None:
    async with (
        _served(_WEIGHT // 2, ManualClock()) as (router, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=_DEADLINE_S) as http,
    ):
        answer = await http.post("/v1/completions", json=_question(stream=False))
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "buffers_full"
        assert "stream the answer" in answer.json()["error"]["message"]
        small = await http.post("/v1/completions", json=_question(stream=False) | {"max_tokens": 9})
        assert small.status_code == 200
    assert router.live_requests.num_buffered_tokens == 0
