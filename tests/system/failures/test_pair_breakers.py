"""Two workers that cannot hand over to each other are not paired for a while; each serves with others, and clients
notice nothing.
"""

import asyncio

import pytest

from cluster.errors import HandOffReason
from router.policies.breakers import BreakerPolicy
from tests.system.rigs.members.router_harness import RouterUnderTest, answer_to, ask, expected_tokens, router_under_test
from tests.system.rigs.members.scripted_decode import ScriptedDecode

_LONG_PAUSE = BreakerPolicy(first_pause_s=1000.0, max_pause_s=1000.0)
_NO_PAUSE = BreakerPolicy(first_pause_s=1e-6, max_pause_s=1e-6)


async def _ask(router: RouterUnderTest) -> tuple[str, ...]:
    """Send a request, check its answer, and return the reasons in its ledger."""
    answer = await answer_to(router, request := ask())
    assert answer.token_ids[0] == expected_tokens(router, request)
    return answer.summary.ledger.reasons


def _num_hand_offs(decode: ScriptedDecode, exporter: str) -> int:
    return sum((job.signed_ticket or b"").startswith(exporter.encode()) for job in decode.jobs)


def _num_open(router: RouterUnderTest, state: str = "open") -> int:
    """Return the number of pairs whose circuit breaker is in this state, by the metric that names them."""
    return sum(labels[2] == state for labels in router.telemetry.by_labels("tandem_pair_breaker_state"))


def _num_half_open(router: RouterUnderTest) -> int:
    return _num_open(router, "half_open")


def _num_openings(router: RouterUnderTest) -> float:
    return router.telemetry.value("tandem_pair_breaker_openings_total", reason=HandOffReason.READ_FAILED)


async def test_a_pair_whose_hand_offs_fail_is_avoided_and_its_workers_serve_with_others() -> None:
    async with router_under_test(breakers=_LONG_PAUSE) as router:
        prefills = [await router.add_prefill("p0"), await router.add_prefill("p1")]
        decodes = [await router.add_decode("d0"), await router.add_decode("d1")]
        await router.connected()
        decodes[0].broken_with = {"p0"}
        while not _num_open(router):
            await _ask(router)
        num_failed = _num_hand_offs(decodes[0], "p0")
        num_jobs = [len(worker.jobs) for worker in prefills] + [len(worker.jobs) for worker in decodes]
        assert {await _ask(router) for _ in range(8)} == {()}
        now = [len(worker.jobs) for worker in prefills] + [len(worker.jobs) for worker in decodes]
        assert all(more > before for more, before in zip(now, num_jobs, strict=True))
        assert _num_hand_offs(decodes[0], "p0") == num_failed
        assert _num_openings(router) == 1


async def test_a_pair_that_works_again_is_detected_and_used() -> None:
    async with router_under_test(breakers=_NO_PAUSE) as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.broken_with = {"p0"}
        # A pair without a pause is soon tried again: whether it is open at this moment says little.
        while not _num_openings(router):
            await _ask(router)
        decode.broken_with = set()
        while _num_open(router) + _num_half_open(router):
            assert await _ask(router) in ((), ("pair_breakers_open",))
        assert await _ask(router) == ()


async def test_with_every_pair_open_decode_prefills_by_name() -> None:
    async with router_under_test(breakers=_LONG_PAUSE) as router:
        prefill = await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.broken_with = {"p0"}
        while not _num_open(router):
            await _ask(router)
        num_prefills = len(prefill.jobs)
        assert await _ask(router) == ("pair_breakers_open",)
        assert len(prefill.jobs) == num_prefills
        assert router.telemetry.value("tandem_local_prefills_total", reason="pair_breakers_open") >= 1


async def test_cancelled_requests_open_no_breaker() -> None:
    async with router_under_test(breakers=_LONG_PAUSE) as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.transfer.close()
        for _ in range(_LONG_PAUSE.failures + 1):
            decode.transfer.reached.clear()
            task = asyncio.create_task(answer_to(router, ask()))
            await asyncio.wait_for(decode.transfer.reached.wait(), 10)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        decode.transfer.open()
        assert await _ask(router) == ()


@pytest.mark.parametrize("reason", [HandOffReason.NOT_ENOUGH_BLOCKS, HandOffReason.PREFILL_FAILED])
async def test_a_failure_of_one_worker_opens_no_breaker(reason: HandOffReason) -> None:
    async with router_under_test(breakers=_LONG_PAUSE) as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        for _ in range(_LONG_PAUSE.failures + 1):
            decode.handoff_failures = [str(reason)]
            assert await _ask(router) == (f"handoff_{reason}",)
        assert await _ask(router) == ()


async def test_an_exporter_that_died_is_no_pairs_fault() -> None:
    async with router_under_test(breakers=_LONG_PAUSE, grace_s=0.2) as router:
        dying, _ = await router.add_prefill("p0"), await router.add_prefill("p1")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.broken_with = {"p0"}
        decode.transfer.close()
        asked = [asyncio.create_task(_ask(router)) for _ in range(2 * _LONG_PAUSE.failures)]
        await decode.until(lambda: len(decode.jobs) == len(asked))
        await dying.die()
        decode.transfer.open()
        await asyncio.gather(*asked)
        assert await _ask(router) == ()
        assert router.telemetry.value("tandem_pair_breaker_openings_total", reason=HandOffReason.READ_FAILED) == 0
