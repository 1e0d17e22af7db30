"""A router stores the newest service times of each worker, from its heartbeats."""

import asyncio
from dataclasses import replace

from cluster.service_times import DecodeTimes, MixedTimes, PrefillTimes, ServiceTimes
from tests.system.rigs.members.router_harness import RouterUnderTest, router_under_test
from tests.system.rigs.members.scripted_workers import ScriptedWorker

DEADLINE_S = 10.0
_TIMES = ServiceTimes(PrefillTimes(0.01, 0.001, 1e-6, 0.1), DecodeTimes(0.008, 0.0005, 1e-6, 0.05))


async def _until_known(router: RouterUnderTest, worker: ScriptedWorker) -> None:
    peer = router.fleet.peer(worker.id)
    assert peer is not None
    async with asyncio.timeout(DEADLINE_S):
        while peer.service_times != worker.service_times:
            await peer.inspect()  # a heartbeat comes when its stream is idle


async def test_the_newest_service_times_of_both_roles_reach_the_router() -> None:
    async with router_under_test() as router:
        workers = await router.add_prefill("prefill-0"), await router.add_decode("decode-0")
        await router.connected()
        for worker, factor in zip(workers, (1.5, 2.5), strict=True):
            assert router.fleet.peer(worker.id).service_times is None  # type: ignore[union-attr]
            for times in (_TIMES, replace(_TIMES, mixed=MixedTimes(factor, 0.2))):
                worker.service_times = times
                await _until_known(router, worker)
