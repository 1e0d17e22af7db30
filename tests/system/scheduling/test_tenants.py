"""Requests of tenants at a router: separate caches, limits by name, and usage that counts once."""

import asyncio
import time
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from cluster.accounts.keys import Caller, Limits
from cluster.accounts.usage import KeyUsage, TenantLimits, Usage, UsageMeter
from cluster.auth.keys import ClusterKeys, Secrets
from cluster.clock import ManualClock, MonotonicClock
from cluster.errors import LimitReached, QueueFull, RegistryUnavailable
from cluster.registry.redis_server import RedisServer
from cluster.registry.registry import Registry
from router.accounts import SharedUse, UseReports, stored_usage
from router.requests import ResumedChoice
from router.running import running
from tests.system.rigs.members.router_harness import answer_to, ask, expected_tokens, router_under_test
from tests.system.rigs.members.scripted_workers import SECRET

_KEYS = ClusterKeys(b"k" * 32)


async def test_tenants_share_no_cached_prefix_and_a_tenant_divides_its_own_by_salts() -> None:
    async with router_under_test() as router:
        prefill, _ = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        callers = [Caller("acme", "k1"), Caller("acme", "k2"), Caller("other", "k3")]
        asked = [replace(ask(), caller=caller) for caller in callers]
        asked.append(replace(asked[0], cache_salt="team"))
        asked.append(replace(asked[2], cache_salt="team"))
        for request in asked:
            await answer_to(router, request)
        first, same_tenant, *others = [job.cache_salt for job in prefill.jobs]
        assert first == same_tenant and len({first, *others}) == 4


async def test_a_tenants_stream_is_resumed_by_a_router_with_another_secret_of_the_caches() -> None:
    """The secret was replaced and the router was started again: the tenant's salt is another, the request is not."""
    request = replace(ask(request_id="r"), caller=Caller("acme", "k1"), num_bytes=100)
    later = ClusterKeys(Secrets(SECRET, caches=b"c" * 32, generation=2))
    async with router_under_test() as before, router_under_test(keys=later) as after:
        for router in (before, after):
            await router.add_prefill("p0")
            await router.add_decode("d0")
            await router.connected()
        expected = expected_tokens(before, request)
        async with aclosing(before.pipeline.generate(request)) as outputs:
            (accepted,) = [output.accepted async for output in outputs if output.accepted is not None]
        has = (ResumedChoice(tuple(expected[:2])),)
        resumed = replace(request, resume_from=has, resume_number=1, acceptance=accepted.acceptance)
        async with aclosing(after.pipeline.generate(resumed)) as outputs:
            came = [i async for output in outputs for delta in output.deltas for i in delta.token_ids]
        assert came == expected[2:]


async def test_workers_learn_the_weight_of_a_tenant_and_a_label_without_its_name() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        for caller in (Caller("acme", "k1", weight=3), Caller("acme", "k2"), Caller("other", "k3"), Caller()):
            await answer_to(router, replace(ask(), caller=caller))
        tenants = [job.tenant for job in prefill.jobs]
        assert [tenant.weight for tenant in tenants] == [3, 1, 1, 1]
        first, same_tenant, other, none = [tenant.label for tenant in tenants]
        assert first == same_tenant != other and none == "" and "acme" not in first
        assert [job.tenant for job in decode.jobs] == tenants


async def test_a_worker_that_refuses_one_tenant_for_its_full_queue_is_asked_for_another_one() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        flood, other = (replace(ask(), caller=Caller(name, name)) for name in ("flood", "other"))
        prefill.refusals = [QueueFull("the queue is full", retry_after_s=20.0) for _ in range(3)]
        with pytest.raises(QueueFull):
            await answer_to(router, flood)
        num_jobs = len(prefill.jobs)
        with pytest.raises(QueueFull, match="queues of all 1 prefill workers"):
            await answer_to(router, flood)
        assert len(prefill.jobs) == num_jobs
        prefill.refusals = []
        decode.refusals = [QueueFull("jobs wait here", retry_after_s=20.0) for _ in range(3)]
        async with running(answer_to(router, other)):  # its client has the first token, so it waits
            await router.has_refused(decode)
            with pytest.raises(QueueFull, match="queues of all 1 decode workers"):
                await answer_to(router, other)


async def test_a_limit_reached_is_refused_by_name_and_no_other_tenant_is() -> None:
    acme = Caller("acme", "k1", limits=Limits(requests_per_minute=2, max_sequences=3))
    async with router_under_test() as router:
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        began_s = time.monotonic()
        for _ in range(2):
            await answer_to(router, replace(ask(), caller=acme))
        with pytest.raises(LimitReached, match="requests_per_minute") as refused:
            await answer_to(router, replace(ask(), caller=acme))
        passed_s = time.monotonic() - began_s  # of the minute in which the tenant may ask twice
        assert refused.value.retry_after_s is not None and 59 - passed_s < refused.value.retry_after_s <= 60
        await answer_to(router, replace(ask(), caller=Caller("other", "k2", limits=acme.limits)))
        counted = router.telemetry.value("tandem_limits_reached_total", tenant="acme", limit="requests_per_minute")
        assert counted == 1


async def test_usage_counts_each_token_once_after_retries_and_resumptions(redis_url: str, cluster_name: str) -> None:
    acme = Caller("acme", "k1")
    async with router_under_test() as router:
        await router.add_prefill("p0")
        workers = [await router.add_decode("d0"), await router.add_decode("d1")]
        await router.connected()
        for worker in workers:
            worker.pause_at = 3
        answering = asyncio.create_task(answer_to(router, replace(ask(max_tokens=9), caller=acme)))
        paused = [asyncio.create_task(worker.paused.wait()) for worker in workers]
        await asyncio.wait(paused, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        victim, survivor = workers if paused[0].done() else workers[::-1]
        survivor.pause_at = None
        await victim.die()
        assert (await answering).summary.ledger.reasons
        paused[workers.index(survivor)].cancel()

        registry = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=5.0)
        limits, usage = router.live_requests.limits, router.live_requests.usage
        clock = MonotonicClock()
        reports = [UseReports(_KEYS, name) for name in ("r0@1", "r1@1")]
        shares = [SharedUse(registry, limits, usage, reports=each, clock=clock) for each in reports]
        for shared in (*shares, *shares):
            await shared.share()
            await shared.store()
        assert await stored_usage(registry) == [KeyUsage("acme", "k1", Usage(1, 4, 0, 9))]
        assert limits.use("acme", clock.now_s()).requests == 2, "its own, and the one of the other router's report"
        await registry.close()


@pytest.mark.parametrize("report", ['{"acme": [Infinity]}', '{"acme": [1e999, 1]}', "[" * 100_000, '{"acme": 5}', "x"])
async def test_invalid_usage_written_by_another_program_stops_no_router(
    redis_url: str, cluster_name: str, report: str
) -> None:
    registry = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=5.0)
    limits, clock = TenantLimits(), ManualClock()
    shared = SharedUse(registry, limits, UsageMeter(), reports=UseReports(_KEYS, "r0@1"), clock=clock)
    async with Redis.from_url(redis_url) as redis:
        seconds, _ = await redis.time()
        await redis.hset(f"{{{cluster_name}}}:use", "r1@1", f"{seconds * 1000} {report}")
        await shared.share()
        assert limits.use("acme", clock.now_s()).requests == 0
        for amount in ("--5", "9" * 5_000):
            await redis.hset(f"{{{cluster_name}}}:usage", "requests|k1|acme", amount)
            assert await stored_usage(registry) in ([], [KeyUsage("acme", "k1", Usage())])
    await registry.close()


async def test_routers_share_a_limit_through_redis_and_divide_it_while_redis_is_away(cluster_name: str) -> None:
    acme, clock = Caller("acme", "k1", limits=Limits(requests_per_minute=8)), ManualClock()
    server = await RedisServer.start()
    registry = Registry(url=server.url, cluster_name=cluster_name, ttl_s=5.0, timeout_s=20.0)  # a busy machine answers
    limits = [TenantLimits(), TenantLimits()]
    shares = [
        SharedUse(registry, each, UsageMeter(), reports=UseReports(_KEYS, f"r{number}@1"), clock=clock)
        for number, each in enumerate(limits)
    ]
    try:
        for shared in shares * 2:
            await shared.share()
        assert _num_admitted(limits[0], acme, clock, 5) == 5
        assert _num_admitted(limits[1], acme, clock, 1) == 1, "what is not reported yet is the slack"
        for shared in shares * 2:
            await shared.share()
        assert [_num_admitted(each, acme, clock, 9) for each in limits] == [2, 2], "each sees six of eight"

        clock.advance(120.0)
        for shared in shares * 2:
            await shared.share()
        await server.stop()
        with pytest.raises(RegistryUnavailable):
            await shares[0].share()
        clock.advance(4.0)
        assert [_num_admitted(each, acme, clock, 9) for each in limits] == [4, 4], "together they admit one limit"
    finally:
        await registry.close()
        await server.stop()


def _num_admitted(limits: TenantLimits, caller: Caller, clock: ManualClock, tries: int) -> int:
    """Begin and end requests; return how many were admitted."""
    admitted = 0
    for _ in range(tries):
        with suppress(LimitReached), limits.place(caller, clock.now_s()):
            admitted += 1
    return admitted
