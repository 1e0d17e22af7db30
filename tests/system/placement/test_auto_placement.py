"""`--placement auto` over scripted workers: predictions from heartbeats and from what this router has sent."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from cluster.errors import SloUnattainable
from cluster.messages import Role
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes, StepWork, TimedStep
from router.policies.candidates import SloTargets
from tests.system.rigs.members.router_harness import Answer, RouterUnderTest, answer_to, ask, router_under_test
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import ScriptedPrefill

DEADLINE_S = 10.0
TIMES = ServiceTimes(  # 100 prompt tokens a second
    PrefillTimes(0.0, 0.01, 0.0, 0.0),
    DecodeTimes(0.01, 0.0, 0.0, 0.0),
    typical_prefill=TimedStep(StepWork(num_new=8), 0.08),
    typical_decode=TimedStep(StepWork(batch=1, context=8), 0.01),
)
LONG = tuple(range(1, 101))


async def _pool(
    router: RouterUnderTest, num_prefill: int, num_decode: int
) -> tuple[list[ScriptedPrefill], list[ScriptedDecode]]:
    prefills = [await router.add_prefill(f"p{number}") for number in range(num_prefill)]
    decodes = [await router.add_decode(f"d{number}") for number in range(num_decode)]
    for prefill in prefills:
        prefill.service_times = TIMES
    for decode in decodes:
        decode.service_times = replace(TIMES, prefill=PrefillTimes(0.0, 0.016, 0.0, 0.0))
    await router.connected()
    await router.knows_speeds()
    return prefills, decodes


async def _refusal(router: RouterUnderTest, **targets: float) -> SloUnattainable:
    with pytest.raises(SloUnattainable) as refused:
        await answer_to(router, replace(ask(prompt=LONG), **targets))  # type: ignore[arg-type]
    return refused.value


async def _reached(prefill: ScriptedPrefill) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await prefill.before_first_tokens.reached.wait()


async def test_a_decode_worker_computes_the_prompt_while_the_prefill_worker_is_busy() -> None:
    async with router_under_test(placement="auto") as router:
        (prefill,), (decode,) = await _pool(router, 1, 1)
        prefill.before_first_tokens.close()
        ahead = asyncio.create_task(answer_to(router, ask(prompt=LONG, max_tokens=2)))
        await _reached(prefill)
        answer = await answer_to(router, ask())
        assert answer.summary.ledger.members == (str(decode.id),)
        assert answer.summary.ledger.reasons == ()  # it is no fallback
        assert router.telemetry.value("tandem_local_prefills_total", reason="predicted") == 1
        assert router.telemetry.value("tandem_placement_decisions_total", reason="ttft") == 2
        prefill.before_first_tokens.open()
        await ahead
        assert len(prefill.jobs) == 1


async def test_a_prefill_worker_serves_alone_where_the_decode_worker_would_miss_a_target() -> None:
    async with router_under_test(placement="auto") as router:
        prefill = await router.add_decode("p0", role=Role.PREFILL)
        decode = await router.add_decode("d0")
        prefill.service_times = TIMES
        decode.service_times = replace(TIMES, decode=DecodeTimes(1.0, 0.0, 0.0, 0.0))  # a second per step
        await router.connected()
        await router.knows_speeds()
        answer = await answer_to(router, replace(ask(), slo_ttft_s=5.0, slo_tpot_s=0.1))
        assert answer.summary.ledger.members == (str(prefill.id),)
        assert answer.summary.ledger.reasons == ()
        assert router.telemetry.value("tandem_local_prefills_total", reason="predicted") == 1
        assert decode.jobs == []


async def test_an_idle_prefill_worker_computes_prompts_beside_a_decode_worker_that_has_work() -> None:
    async with router_under_test(placement="auto") as router:
        (prefill,), (decode,) = await _pool(router, 1, 1)
        decode.pause_at = 2
        running, answer = router.pipeline.generate(ask(prompt=LONG)), Answer()
        async for output in running:
            answer.take(output)
            if len(answer.token_ids.get(0, ())) == 2:
                break
        decode.pause_at, num_jobs = None, len(prefill.jobs)
        await answer_to(router, ask())
        assert len(prefill.jobs) == num_jobs + 1
        await running.aclose()


async def test_requests_that_arrive_together_do_not_meet_at_one_worker() -> None:
    async with router_under_test(placement="auto") as router:
        prefills, _ = await _pool(router, 3, 1)
        for prefill in prefills:
            prefill.before_first_tokens.close()
        asked = [asyncio.create_task(answer_to(router, ask(prompt=LONG, max_tokens=2))) for _ in range(3)]
        for prefill in prefills:
            await _reached(prefill)
            prefill.before_first_tokens.open()
        await asyncio.gather(*asked)
        assert Counter(len(prefill.jobs) for prefill in prefills) == {1: 3}


async def test_a_worker_that_becomes_slower_gets_less() -> None:
    async with router_under_test(placement="auto") as router:
        (slow, fast), (decode,) = await _pool(router, 2, 1)
        slow.service_times = replace(TIMES, prefill=PrefillTimes(0.0, 0.05, 0.0, 0.0))
        decode.service_times = slow.service_times
        await router.knows_speeds()
        for _ in range(6):
            await answer_to(router, ask(max_tokens=2))
        assert (len(slow.jobs), len(fast.jobs)) == (0, 6)


async def test_without_a_known_speed_every_request_is_served_all_the_same() -> None:
    async with router_under_test(placement="auto") as router:
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        assert len((await answer_to(router, ask())).token_ids[0]) == 8
        assert router.telemetry.value("tandem_placement_decisions_total", reason="unknown_speed") == 1


async def test_predictions_are_compared_with_the_times_of_the_client() -> None:
    async with router_under_test(placement="auto") as router:
        await _pool(router, 1, 1)
        await answer_to(router, ask())
        assert router.telemetry.value("tandem_ttft_prediction_error_ratio") == 1


async def test_nothing_is_compared_where_nothing_was_predicted() -> None:
    async with router_under_test(placement="least-loaded") as router:
        await _pool(router, 1, 1)
        await answer_to(router, ask())
        assert router.telemetry.value("tandem_ttft_prediction_error_ratio") == 0


@pytest.mark.parametrize("placement", ["auto", "least-loaded"])
async def test_a_target_of_the_client_that_cannot_be_kept_refuses_under_every_policy(placement: str) -> None:
    async with router_under_test(placement=placement) as router:
        (prefill,), _ = await _pool(router, 1, 1)
        assert (await _refusal(router, slo_ttft_s=0.5)).retry_after_s is None  # the prompt alone takes a second
        assert "between tokens" in (await _refusal(router, slo_tpot_s=0.001)).message
        assert (
            router.telemetry.value(
                "tandem_requests_refused_total", reason="slo_unattainable", service_class="interactive"
            )
            == 2
        )
        assert prefill.jobs == []
        answer = await answer_to(router, replace(ask(prompt=LONG), slo_ttft_s=30.0, slo_tpot_s=1.0))
        assert len(answer.token_ids[0]) == 8


async def test_a_request_is_refused_while_a_prompt_before_it_makes_it_miss_its_target() -> None:
    async with router_under_test(placement="auto") as router:
        (prefill,), (decode,) = await _pool(router, 1, 1)
        decode.service_times = replace(TIMES, prefill=PrefillTimes(0.0, 10.0, 0.0, 0.0))  # never alone
        await router.knows_speeds()
        prefill.before_first_tokens.close()
        began_s = asyncio.get_running_loop().time()
        ahead = asyncio.create_task(answer_to(router, ask(prompt=LONG * 10, max_tokens=2)))
        await _reached(prefill)
        retry_after_s = (await _refusal(router, slo_ttft_s=6.0)).retry_after_s
        passed_s = asyncio.get_running_loop().time() - began_s
        assert retry_after_s is not None and 4.0 - passed_s < retry_after_s < 7.0
        prefill.before_first_tokens.open()
        await ahead
        assert len((await answer_to(router, replace(ask(prompt=LONG), slo_ttft_s=6.0))).token_ids[0]) == 8


async def test_targets_of_the_whole_cluster_refuse_no_request() -> None:
    async with router_under_test(placement="auto", targets=SloTargets(0.001, 0.000001)) as router:
        await _pool(router, 1, 1)
        assert len((await answer_to(router, ask(prompt=LONG))).token_ids[0]) == 8
        # Every candidate misses both targets; only the pair leaves the decode worker to sequences.
        assert router.telemetry.value("tandem_placement_decisions_total", reason="slo") == 1
