"""Tests that requests that cannot succeed are refused before any worker is asked, and that requests that wait before
that end at their deadline."""

import asyncio
import threading
from dataclasses import replace

import pytest

from cluster.accounts.keys import Caller
from cluster.errors import DeadlineExceeded, Overloaded, QueueFull
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes
from router.requests import GenerateRequest, TextPrompt
from router.running import running
from tests.system.rigs.members.router_harness import answer_to, ask, pass_time, router_under_test


async def test_after_every_prefill_queue_was_full_a_new_request_is_refused_without_a_job() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        prefill.refusals = [QueueFull("the queue is full", retry_after_s=20.0) for _ in range(3)]
        with pytest.raises(QueueFull):
            await answer_to(router, ask())
        num_jobs = len(prefill.jobs)
        with pytest.raises(QueueFull, match="queues of all 1 prefill workers") as refusal:
            await answer_to(router, ask())
        assert refusal.value.retry_after_s is not None and 1 < refusal.value.retry_after_s <= 20
        assert (len(prefill.jobs), len(decode.jobs)) == (num_jobs, 0)
        assert (
            router.telemetry.value("tandem_requests_refused_total", reason="queue_full", service_class="interactive")
            == 1
        )


async def test_no_request_is_refused_while_any_worker_has_room() -> None:
    async with router_under_test() as router:
        full, _ = await router.add_prefill("p0"), await router.add_prefill("p1")
        await router.add_decode("d0")
        await router.connected()
        full.refusals = [QueueFull("the queue is full", retry_after_s=20.0) for _ in range(2)]
        for _ in range(4):
            assert len((await answer_to(router, ask())).token_ids[0]) == 8


async def test_a_full_decode_pool_refuses_a_new_request_before_its_prompt_is_computed() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        decode.refusals = [QueueFull("jobs wait here", retry_after_s=20.0)]
        await answer_to(router, ask())
        await answer_to(router, ask())  # the next attempt of the first one was taken, so there is room
        decode.refusals = [QueueFull("jobs wait here", retry_after_s=20.0) for _ in range(3)]
        async with running(answer_to(router, ask())):  # its client has the first token, so it waits
            await router.has_refused(decode)
            num_jobs = len(prefill.jobs)
            with pytest.raises(QueueFull, match="decode workers"):
                await answer_to(router, ask())
            assert len(prefill.jobs) == num_jobs


async def test_a_request_whose_turn_would_come_after_its_deadline_is_refused_without_a_job() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        prefill.service_times = decode.service_times = _OF_100_TOKENS_PER_S
        await router.connected()
        await router.knows_speeds()
        prefill.before_first_tokens.close()
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        ahead = asyncio.create_task(answer_to(router, ask(prompt=tuple(range(1, 1001)), max_tokens=2)))
        async with asyncio.timeout(10):
            await prefill.before_first_tokens.reached.wait()
        with pytest.raises(Overloaded, match="first token is predicted in") as refusal:
            await answer_to(router, ask(timeout_s=4.0))
        passed_s = now_s() - began_s  # of the ten seconds that the first prompt takes
        assert refusal.value.retry_after_s is not None
        assert 6.0 - passed_s <= refusal.value.retry_after_s <= 7.0
        assert len(prefill.jobs) == 1
        in_time = asyncio.create_task(answer_to(router, ask(timeout_s=25.0)))
        prefill.before_first_tokens.open()
        assert len((await in_time).token_ids[0]) == 8
        await ahead


async def test_a_flood_of_one_tenant_does_not_refuse_a_request_of_another_one_early() -> None:
    flood, other = (Caller(name, name) for name in ("flood", "other"))
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        prefill.service_times = decode.service_times = _OF_33_TOKENS_PER_S
        await router.connected()
        await router.knows_speeds()
        prefill.before_first_tokens.close()
        long = replace(ask(prompt=tuple(range(1, 1001)), max_tokens=2, timeout_s=120.0), caller=flood)
        ahead = asyncio.create_task(answer_to(router, long))
        async with asyncio.timeout(10):
            await prefill.before_first_tokens.reached.wait()
        with pytest.raises(Overloaded, match="first token is predicted in"):
            await answer_to(router, replace(ask(timeout_s=22.0), caller=flood))
        in_time = asyncio.create_task(answer_to(router, replace(ask(timeout_s=22.0), caller=other)))
        async with asyncio.timeout(10):
            while len(prefill.jobs) < 2:
                assert not in_time.done()
                await asyncio.sleep(0.01)
        prefill.before_first_tokens.open()
        assert len((await in_time).token_ids[0]) == 8
        await ahead


_OF_33_TOKENS_PER_S = ServiceTimes(PrefillTimes(0.0, 0.03, 0.0, 0.0), DecodeTimes(0.01, 0.0, 0.0, 0.0))
_OF_100_TOKENS_PER_S = ServiceTimes(PrefillTimes(0.0, 0.01, 0.0, 0.0), DecodeTimes(0.01, 0.0, 0.0, 0.0))


async def test_a_deadline_ends_a_request_whose_text_is_being_tokenized_and_frees_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with router_under_test() as router:
        go, inside = threading.Event(), threading.Event()

        def encode(_: str) -> tuple[int, ...]:
            inside.set()
            go.wait(20)
            return (5,)

        monkeypatch.setattr(router.tokenization, "encode_prompt", encode)
        try:
            answering = asyncio.create_task(answer_to(router, GenerateRequest(TextPrompt("x" * 5000), timeout_s=15.0)))
            assert await asyncio.to_thread(inside.wait, 10)
            pass_time(15.0)
            with pytest.raises(DeadlineExceeded, match="in phase tokenize"):
                await answering
            assert len(router.live_requests) == 0
        finally:
            go.set()


async def test_a_full_router_refuses_before_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_under_test(max_live_requests=1) as router:
        decode = await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 2
        first = asyncio.create_task(answer_to(router, ask()))
        async with asyncio.timeout(10):
            await decode.paused.wait()
        encoded: list[str] = []
        monkeypatch.setattr(router.tokenization, "encode_prompt", encoded.append)
        monkeypatch.setattr(router.tokenization, "encode", encoded.append)
        for text in ("x", "x" * 5000):
            with pytest.raises(Overloaded):
                await answer_to(router, GenerateRequest(TextPrompt(text)))
        assert encoded == []
        decode.resumed.set()
        await first
