"""A decode worker's heartbeat reports how fast its links are, and placement uses it."""

import asyncio

from cluster.messages import LinkSpeed, MemberId
from tests.system.rigs.members.router_harness import PROMPT, RouterUnderTest, answer_to, ask, router_under_test

DEADLINE_S = 10.0


def speed(exporter: MemberId, latency_s: float) -> LinkSpeed:
    return LinkSpeed(exporter, "tcp", 1e9, latency_s)


async def until_known(router: RouterUnderTest, member: MemberId, links: tuple[LinkSpeed, ...]) -> None:
    peer = router.fleet.peer(member)
    assert peer is not None
    async with asyncio.timeout(DEADLINE_S):
        while router.fleet.links(member) != links:
            await peer.inspect()  # a heartbeat comes when its stream is idle


async def test_a_pair_whose_link_is_reported_slow_gets_no_request_while_a_fast_one_is_free() -> None:
    async with router_under_test() as router:
        near, far = await router.add_prefill("prefill-0"), await router.add_prefill("prefill-1")
        decode = await router.add_decode("decode-0")
        await router.connected()
        decode.links = (speed(near.id, 0.0), speed(far.id, 1.0))
        await until_known(router, decode.id, decode.links)
        far_jobs, near_jobs = len(far.jobs), len(near.jobs)
        for number in range(4):
            await answer_to(router, ask(prompt=(*PROMPT, number + 1)))
        assert (len(near.jobs) - near_jobs, len(far.jobs) - far_jobs) == (4, 0)
        decode.links = (speed(near.id, 0.0), speed(far.id, 0.0))
        await until_known(router, decode.id, decode.links)
        far_jobs, near_jobs = len(far.jobs), len(near.jobs)
        for number in range(4):
            await answer_to(router, ask(prompt=(*PROMPT, number + 1)))
        assert (len(near.jobs) - near_jobs, len(far.jobs) - far_jobs) == (2, 2)


async def test_a_departed_worker_has_no_link_speeds() -> None:
    async with router_under_test() as router:
        decode = await router.add_decode("decode-0")
        decode.links = (speed(MemberId("prefill-0", "1"), 0.0),)
        await router.connected()
        await until_known(router, decode.id, decode.links)
        await decode.die()
        async with asyncio.timeout(DEADLINE_S):
            while router.fleet.peer(decode.id) is not None:
                await router.fleet.changed()
        assert router.fleet.links(decode.id) == ()
