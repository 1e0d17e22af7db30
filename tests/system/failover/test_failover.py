"""Tests that when workers die, refuse or fail, the client gets every token once, in order, and the same tokens."""

import asyncio
from dataclasses import replace

import pytest

from cluster.errors import Draining, HandOffReason, QueueFull, Unavailable, WorkerLost
from cluster.member import MemberState
from cluster.messages import LayoutFingerprint
from tests.system.rigs.members.router_harness import (
    answer_to,
    ask,
    ask_and_hold,
    expected_tokens,
    router_under_test,
)
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import FINGERPRINT, ScriptedPrefill


async def test_prefill_that_dies_before_the_first_token_is_replaced() -> None:
    async with router_under_test(placement="round-robin") as router:
        first, second = await router.add_prefill("p0"), await router.add_prefill("p1")
        await router.add_decode("d0")
        await router.connected()
        for worker in (first, second):
            worker.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, request := ask()))
        reached = {asyncio.create_task(w.before_first_tokens.reached.wait()): w for w in (first, second)}
        done, _ = await asyncio.wait(reached, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        victim = reached[done.pop()]
        for worker in (first, second):
            worker.before_first_tokens.open() if worker is not victim else None
        await victim.die()
        answer = await task
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == ("prefill_worker_lost",)
        assert router.telemetry.value("tandem_retries_total", leg="prefill", reason="worker_lost") == 1
        before, after = sorted(first.jobs + second.jobs, key=lambda job: job.attempt)
        assert (before.attempt, after.attempt) == (1, 2)
        assert 0 <= before.age_s < after.age_s
        survivor = second if victim is first else first
        spent = [time.member for time in answer.summary.ledger.worker_times if time.member.startswith("p")]
        assert spent == [str(survivor.id)], "what the survivor spent is told, and nothing of the other"


async def test_a_full_or_leaving_prefill_worker_is_excluded() -> None:
    async with router_under_test() as router:
        workers = [await router.add_prefill("p0"), await router.add_prefill("p1"), await router.add_prefill("p2")]
        await router.add_decode("d0")
        await router.connected()
        workers[0].refusals = [QueueFull("256 wait here")]
        workers[1].refusals = [Draining("leaving")]
        workers[2].refusals = []
        request = ask()
        for _ in range(3):
            assert (await answer_to(router, request)).token_ids[0] == expected_tokens(router, request)
        assert workers[0].refusals == workers[1].refusals == []


async def test_refusals_of_draining_workers_use_up_no_attempt() -> None:
    """Each worker refuses once and is not asked again, although the registry still reports it as ready."""
    async with router_under_test(max_attempts=2) as router:
        leaving = [await router.add_prefill(f"p{i}") for i in range(3)]
        for worker in leaving:
            worker.refusals = [Draining("leaving")] * 3
        await router.add_prefill("p3")
        await router.add_decode("d0")
        await router.connected()
        for _ in range(4):
            assert (await answer_to(router, request := ask())).token_ids[0] == expected_tokens(router, request)
        assert [len(worker.refusals) for worker in leaving] == [2, 2, 2]


async def test_a_client_with_tokens_waits_for_room_when_its_worker_is_lost_and_every_queue_is_full() -> None:
    async with router_under_test(max_attempts=2) as router:
        await router.add_prefill("p0")
        lost = await router.add_decode("d0")
        await router.connected()
        lost.pause_at = 4
        task = asyncio.create_task(answer_to(router, request := ask(max_tokens=12)))
        await asyncio.wait_for(lost.paused.wait(), 10)
        full = await router.add_decode("d1")
        full.refusals = [QueueFull("256 wait here", retry_after_s=0.1) for _ in range(5)]
        await router.connected()
        await lost.die()
        answer = await asyncio.wait_for(task, 20)
        assert not full.refusals
        assert answer.token_ids[0] == expected_tokens(router, request)


async def test_a_client_without_tokens_is_refused_when_every_queue_is_full() -> None:
    async with router_under_test(max_attempts=2) as router:
        prefill = await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        prefill.refusals = [QueueFull("256 wait here", retry_after_s=2.5)] * 2
        with pytest.raises(QueueFull, match="256 wait here") as refusal:
            await answer_to(router, ask())
        assert refusal.value.retry_after_s == 2.5
        assert decode.jobs == []


async def test_without_prefill_workers_decode_prefills_with_a_named_reason() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        prefill.before_first_tokens.close()
        request = ask()
        first = asyncio.create_task(answer_to(router, request))
        await asyncio.wait_for(prefill.before_first_tokens.reached.wait(), 10)
        await prefill.die()
        answers = [await first, await answer_to(router, request)]
        for answer, reasons in zip(
            answers, [("prefill_worker_lost", "no_prefill_worker"), ("no_prefill_worker",)], strict=True
        ):
            assert answer.token_ids[0] == expected_tokens(router, request)
            assert answer.summary.ledger.reasons == reasons
            assert [time.member for time in answer.summary.ledger.worker_times] == [str(decode.id)]
        assert router.telemetry.value("tandem_local_prefills_total", reason="no_prefill_worker") == 2


@pytest.mark.parametrize(
    "reason", [HandOffReason.DIGEST_MISMATCH, HandOffReason.EXPORTER_LOST, HandOffReason.LEASE_LAPSED]
)
async def test_a_failed_hand_off_prefills_again_with_the_tokens_that_the_client_has(reason: HandOffReason) -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        decode.handoff_failures = [str(reason)]
        request = ask()
        answer = await answer_to(router, request)
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == (f"handoff_{reason}",)
        assert [(job.attempt, job.num_committed) for job in prefill.jobs] == [(1, 0), (2, 1)]
        assert prefill.jobs[1].token_ids == (5, 6, 7, 8, answer.token_ids[0][0])
        assert "retry" in {phase.name for phase in answer.summary.ledger.phases}


async def test_hand_offs_that_always_fail_end_in_prefill_on_decode() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.handoff_failures = [str(HandOffReason.READ_FAILED)] * 10
        request = ask()
        answer = await answer_to(router, request)
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == ("handoff_read_failed",) * 3
        assert decode.jobs[-1].signed_ticket is None
        assert decode.jobs[-1].sequences[0].committed_token_ids == tuple(answer.token_ids[0][:2])


@pytest.mark.parametrize("n", [1, 3])
async def test_the_death_of_decode_during_a_stream_loses_and_repeats_no_token(n: int) -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        victim = await router.add_decode("d0")
        await router.connected()
        victim.pause_at = 7
        request = ask(max_tokens=20, n=n)
        task = await ask_and_hold(router, request, victim)
        survivor = await router.add_decode("d1")
        await router.connected()
        await victim.die()
        answer = await task
        assert [answer.token_ids[i] for i in range(n)] == [expected_tokens(router, request, i) for i in range(n)]
        assert set(answer.finish_reasons.values()) == {"length"}
        assert "decode_worker_lost" in answer.summary.ledger.reasons
        assert answer.summary.ledger.members[-1] == str(survivor.id)
        assert sum(p.duration_s for p in answer.summary.ledger.phases) == pytest.approx(answer.summary.ledger.wall_s)


async def test_a_stream_waits_for_the_only_decode_worker_to_come_back() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        victim = await router.add_decode("d0")
        await router.connected()
        victim.pause_at = 5
        request = ask(max_tokens=12)
        task = await ask_and_hold(router, request, victim)
        await victim.die()
        await router.until_gone(victim)
        await router.add_decode("d0", incarnation=2)
        assert (await task).token_ids[0] == expected_tokens(router, request)


async def test_every_worker_may_die_in_turn() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        worker = await router.add_decode("d0")
        await router.connected()
        worker.pause_at = 3
        request = ask(max_tokens=40)
        task = await ask_and_hold(router, request, worker)
        for generation in range(1, 6):  # more deaths than attempts: each follower made progress
            successor = await router.add_decode(f"d{generation}")
            successor.pause_at = 3 + 5 * generation if generation < 5 else None
            await router.connected()
            router.workers.remove(worker)
            await worker.die()
            if generation < 5:
                async with asyncio.timeout(10):
                    await successor.paused.wait()
            worker = successor
        answer = await task
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == ("decode_worker_lost",) * 5


async def test_a_worker_whose_registration_expired_finishes_its_sequences_and_gets_no_new_ones() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 4
        request = ask()
        task = await ask_and_hold(router, request, decode)
        router.membership.tell(())
        await router.until_gone(decode)
        assert not router.fleet.is_ready
        decode.resumed.set()
        answer = await task
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == ()


async def test_a_draining_worker_gets_no_new_work_and_finishes_its_own() -> None:
    async with router_under_test() as router:
        leaving = await router.add_decode("d0")
        await router.connected()
        leaving.pause_at = 4
        request = ask()
        task = await ask_and_hold(router, request, leaving)
        leaving.state = MemberState.DRAINING
        other = await router.add_decode("d1")
        await router.until_gone(leaving)
        await router.connected_to(other)
        await answer_to(router, ask())
        assert len(leaving.jobs) == 1
        leaving.resumed.set()
        assert (await task).token_ids[0] == expected_tokens(router, request)


@pytest.mark.parametrize(
    "fingerprint",
    [replace(FINGERPRINT, weights="x"), replace(FINGERPRINT, dtype="x"), replace(FINGERPRINT, block_table="x")],
    ids=["fine-tune", "dtype", "layout"],
)
async def test_a_worker_with_another_fingerprint_gets_no_work(fingerprint: LayoutFingerprint) -> None:
    async with router_under_test(placement="round-robin") as router:
        first = await router.add_decode("d0")
        await router.connected()
        stranger = await router.add_decode("d1", fingerprint=fingerprint)
        for _ in range(4):
            await answer_to(router, ask())
        assert len(first.jobs) == 4
        assert stranger.jobs == []


async def test_decode_that_refuses_is_replaced_while_the_client_has_its_first_token() -> None:
    async with router_under_test() as router:
        prefill = await router.add_prefill("p0")
        decodes = [await router.add_decode("d0"), await router.add_decode("d1")]
        await router.connected()
        for decode in decodes:
            decode.refusals = [QueueFull("full")]
        decodes[1].refusals = []
        request = ask()
        for _ in range(2):
            assert (await answer_to(router, request)).token_ids[0] == expected_tokens(router, request)
        assert decodes[0].refusals == []
        assert prefill.jobs[-1].num_committed in (0, 1)


async def test_a_ticket_is_abandoned_only_if_decode_refused_it() -> None:
    async with router_under_test() as router:
        prefill = await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.refusals = [QueueFull("full")]
        request = ask()
        async with asyncio.timeout(10):
            answer = await answer_to(router, request)
            abandoned = await prefill.abandoned.get()
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert abandoned == f"{prefill.id} {prefill.jobs[0].request_id} {prefill.jobs[0].attempt}".encode()
        assert len(prefill.jobs) > 1  # a second attempt, whose ticket was taken
        assert prefill.abandoned.empty()


async def test_a_ticket_whose_decode_worker_died_before_the_first_token_is_abandoned() -> None:
    async with router_under_test() as router:
        prefill = await router.add_prefill("p0")
        first, second = await router.add_decode("d0"), await router.add_decode("d1")
        await router.connected()
        prefill.before_first_tokens.close()
        answering = asyncio.create_task(answer_to(router, ask()))
        async with asyncio.timeout(20):
            taking = [asyncio.create_task(decode.before_taking.reached.wait()) for decode in (first, second)]
            await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
            dying = first if first.jobs else second
            await dying.die()
            await router.until_gone(dying)
            prefill.before_first_tokens.open()
            answer = await answering
            abandoned = await prefill.abandoned.get()
        assert answer.token_ids[0] == expected_tokens(router, ask())
        assert abandoned == f"{prefill.id} {prefill.jobs[0].request_id} {prefill.jobs[0].attempt}".encode()
        assert prefill.abandoned.empty(), "the second one was taken"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_draining_worker_that_ends_before_its_work_costs_no_attempt(role: str) -> None:
    async with router_under_test(max_attempts=1, placement="round-robin") as router:
        prefills = [await router.add_prefill(name) for name in ("p0", "p1")]
        decodes = [await router.add_decode(name) for name in ("d0", "d1")]
        await router.connected()
        dying: ScriptedPrefill | ScriptedDecode
        if role == "prefill":
            dying, reached = prefills[0], prefills[0].before_first_tokens.reached
            prefills[0].before_first_tokens.close()
        else:
            dying, reached = decodes[0], decodes[0].paused
            decodes[0].pause_at = 4
        answering = asyncio.create_task(answer_to(router, request := ask(max_tokens=12)))
        async with asyncio.timeout(10):
            await reached.wait()
            router.fleet.mark_draining(dying.id, 30.0)
            await dying.die()
            answer = await answering
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == (f"{role}_draining",)


async def test_attempts_are_bounded() -> None:
    """The only worker lives and refuses every call: its first two losses are refunded, the next two end the request."""
    async with router_under_test(max_attempts=2) as router:
        decode = await router.add_decode("d0")
        await router.connected()
        decode.refusals = [Unavailable("no")] * 5
        with pytest.raises(WorkerLost, match="d0"):
            await answer_to(router, ask())
        assert len(decode.jobs) == 2 + 2


@pytest.mark.parametrize("dies", ["before", "after"])
async def test_log_probabilities_of_a_prompt_are_sent_once_whenever_its_prefill_dies(dies: str) -> None:
    """Before or after its worker has sent them: without the first tokens nothing of an attempt counts."""
    async with router_under_test(placement="round-robin") as router:
        workers = [await router.add_prefill("p0"), await router.add_prefill("p1")]
        await router.add_decode("d0")
        await router.connected()
        gates = [worker.before_first_tokens if dies == "before" else worker.after_scores for worker in workers]
        for gate in gates:
            gate.close()
        task = asyncio.create_task(answer_to(router, request := ask(n=2, prompt_logprobs=0)))
        pairs = zip(gates, workers, strict=True)
        reached = {asyncio.create_task(gate.reached.wait()): worker for gate, worker in pairs}
        done, _ = await asyncio.wait(reached, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        await (victim := reached[done.pop()]).die()
        for gate in gates:
            gate.open()
        answer = await task
        assert [answer.token_ids[n] for n in range(2)] == [expected_tokens(router, request, n) for n in range(2)]
        (prompt,) = answer.prompts
        assert [(token.token_id, token.logprob, token.rank) for token in prompt.tokens()] == [
            (token_id, -place, place) for place, token_id in enumerate(prompt.token_ids[1:], start=1)
        ]
        assert [job.num_prompt_logprobs for worker in workers for job in worker.jobs] == [0, 0]
        assert victim.jobs, "the worker that died had the request"


async def test_log_probabilities_beyond_the_prompt_are_the_workers_fault_and_another_attempt_serves() -> None:
    async with router_under_test() as router:
        prefill = await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        prefill.num_wrong_scores = 1
        answer = await answer_to(router, request := ask(prompt_logprobs=0))
        assert answer.token_ids[0] == expected_tokens(router, request)
        (prompt,) = answer.prompts
        assert [token.token_id for token in prompt.tokens()] == list(prompt.token_ids[1:])
        assert len(prefill.jobs) == 2


async def test_a_later_attempt_does_not_score_a_prompt_whose_client_has_tokens() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 3
        task = await ask_and_hold(router, request := ask(prompt_logprobs=0), decode)
        await router.add_decode("d1")
        await router.connected()
        await decode.die()
        answer = await task
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert len(answer.prompts) == 1
        assert [job.num_prompt_logprobs for job in prefill.jobs] == [0, None]
