"""Tests that requests wait for a worker if none of a pool is alive, on both interfaces, and that the error names the
phase in which their time ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Gate
from cluster.observe.telemetry import Telemetry
from router.http.openai_api import build_app
from tests.system.rigs.members.router_harness import (
    RouterUnderTest,
    answer_to,
    ask,
    expected_tokens,
    pass_time,
    router_under_test,
)
from tests.system.rigs.members.served_router import collect, generate_request, reason_of, served


@asynccontextmanager
async def _http(router: RouterUnderTest) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(
        pipeline=router.pipeline,
        live_requests=router.live_requests,
        tokenization=router.tokenization,
        telemetry=Telemetry(),
        ready=lambda: router.pipeline.is_ready,
        gate=Gate(),
        audit=Audit(),
        max_message_bytes=100_000,
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router", timeout=20) as client:
        yield client


def _question(max_tokens: int = 8) -> dict[str, object]:
    return {"model": "", "prompt": [5, 6, 7, 8], "max_tokens": max_tokens, "temperature": 0, "seed": 1}


async def _waiting(router: RouterUnderTest, number: int) -> None:
    """Wait until this many requests are live and wait for a worker."""
    async with asyncio.timeout(10):
        while router.live_requests.num_served < number:  # noqa: ASYNC110 -- a waiting request signals no event
            await asyncio.sleep(0)


async def test_requests_of_both_surfaces_wait_for_the_first_decode_worker() -> None:
    async with served() as (router, channel), _http(router) as http:
        await router.add_prefill("p0")
        await router.connected()
        over_grpc = asyncio.create_task(collect(channel, generate_request()))
        over_http = asyncio.create_task(http.post("/v1/completions", json=_question()))
        await _waiting(router, 2)
        assert (await http.get("/ready")).status_code == 503
        await router.add_decode("d0")
        answer, responses = await over_http, await over_grpc
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert responses[-1].summary.usage.completion_tokens == 8


async def test_a_request_waits_again_after_its_only_decode_worker_left() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        leaving = await router.add_decode("d0")
        await router.connected()
        router.workers.remove(leaving)
        router.register()
        await leaving.die()
        await router.until_gone(leaving)
        task = asyncio.create_task(answer_to(router, request := ask()))
        await _waiting(router, 1)
        await router.add_decode("d1")
        assert (await task).token_ids[0] == expected_tokens(router, request)


async def test_the_deadline_of_a_request_that_waits_names_the_phase_on_both_surfaces() -> None:
    async with served(request_timeout_s=15.0) as (router, channel), _http(router) as http:
        over_http = asyncio.create_task(http.post("/v1/completions", json=_question()))
        over_grpc = asyncio.create_task(collect(channel, generate_request(), timeout=15.0))
        await _waiting(router, 2)
        pass_time(15.0)
        with pytest.raises(grpc.aio.AioRpcError, match="in phase admit") as refused:
            await over_grpc
        assert reason_of(refused.value) == "deadline_exceeded"
        refusal = await over_http
        assert refusal.status_code == 408
        assert "in phase admit" in refusal.json()["error"]["message"]
