"""Tests that wrong, late and lost messages of workers never reach a client: a new attempt delivers each token once."""

import asyncio

import pytest

from cluster.errors import WrongTokens
from tests.system.rigs.members.router_harness import (
    answer_to,
    ask,
    ask_and_hold,
    expected_tokens,
    router_under_test,
)


async def test_a_first_token_that_differs_from_the_delivered_one_ends_the_attempt() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        decode.first_token_offset = 1
        request = ask()
        answer = await answer_to(router, request)
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == ("decode_first_token_mismatch",)
        assert prefill.jobs[1].num_committed == 1


async def test_a_start_message_without_every_first_token_ends_the_attempt() -> None:
    """Otherwise the tokens would not be compared, and the ledger would report a local prefill."""
    async with router_under_test() as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        # One of two is no valid message; none at all is one, of a worker that did not prefill.
        for num_kept_back, reason in ((1, "decode_malformed_message"), (2, "decode_first_token_count")):
            decode.num_first_tokens_kept_back = num_kept_back
            request = ask(n=2)
            answer = await answer_to(router, request)
            assert [answer.token_ids[choice] for choice in range(2)] == [
                expected_tokens(router, request, choice) for choice in range(2)
            ]
            assert answer.summary.ledger.reasons == (reason,)
            assert answer.summary.ledger.transport == "tcp"


async def test_a_token_of_a_sequence_whose_start_message_was_lost_ends_the_attempt() -> None:
    """Its tokens have the right indices, but the token from which it began was not compared."""
    async with router_under_test() as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.num_starts_lost = 1
        request = ask()
        answer = await answer_to(router, request)
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == ("decode_worker_lost",)


async def test_wrong_tokens_in_the_last_attempt_end_the_request_by_that_name() -> None:
    """The reason is never `internal`, which stands for faults of this router."""
    async with router_under_test(max_attempts=1) as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.index_changes = [(5, 9)]
        with pytest.raises(WrongTokens, match="expected 5"):
            await answer_to(router, ask(max_tokens=12))
        assert router.telemetry.value("tandem_requests_total", outcome="wrong_tokens") == 1


@pytest.mark.parametrize("sent_instead", [3, 6], ids=["repeated", "missing"])
async def test_a_repeated_or_missing_token_starts_a_new_attempt(sent_instead: int) -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.index_changes = [(5, sent_instead)]
        request = ask()
        answer = await answer_to(router, request)
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == ("decode_token_out_of_order",)


async def test_messages_of_a_woken_worker_are_dropped_and_its_job_is_cancelled() -> None:
    async with router_under_test(silence_s=0.3, grace_s=0.2) as router:
        await router.add_prefill("p0")
        stopped = await router.add_decode("d0")
        stopped.forgets_with_hello = False  # it sends tokens before it has read the hello
        await router.connected()
        stopped.pause_at = 4
        request = ask(max_tokens=10)
        task = await ask_and_hold(router, request, stopped)
        stopped.voice.close()
        await router.until_gone(stopped)
        await router.add_decode("d1")
        assert (await task).token_ids[0] == expected_tokens(router, request)
        stopped.cancelled.clear()
        stopped.resumed.set()
        stopped.voice.open()
        async with asyncio.timeout(10):
            await stopped.cancelled.wait()
        assert stopped.cancelled_handles == {stopped.jobs[0].sequences[0].handle}
        assert router.telemetry.value("tandem_stale_messages_total") > 0


async def test_a_broken_stream_that_comes_back_in_time_loses_nothing() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 5
        request = ask(max_tokens=12)
        task = await ask_and_hold(router, request, decode)
        decode.break_streams()
        await router.until_gone(decode)  # suspect at once
        decode.resumed.set()
        answer = await task
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.reasons == ()
        assert len(prefill.jobs) == len(decode.jobs) == 1


async def test_an_end_lost_with_the_connection_starts_the_next_attempt() -> None:
    async with router_under_test(grace_s=0.3) as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 5
        request = ask(max_tokens=6)
        task = await ask_and_hold(router, request, decode)
        decode.break_streams()
        await router.until_gone(decode)
        decode.voice.close()  # reconnects are not answered until its last token is lost
        decode.resumed.set()
        await decode.running[decode.jobs[0].sequences[0].handle]
        decode.lose_messages()
        decode.voice.open()
        assert (await task).token_ids[0] == expected_tokens(router, request)


async def test_a_newer_incarnation_ends_the_jobs_of_the_old_one() -> None:
    async with router_under_test() as router:
        old = await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        old.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, request := ask()))
        async with asyncio.timeout(10):
            await old.before_first_tokens.reached.wait()
        new = await router.add_prefill("p0", incarnation=2)
        answer = await task
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.members[0] in (str(new.id), answer.summary.ledger.members[-1])


async def test_streams_of_an_old_decode_incarnation_continue_at_the_new_one() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        old = await router.add_decode("d0")
        await router.connected()
        old.pause_at = 4
        request = ask()
        task = await ask_and_hold(router, request, old)
        await router.add_decode("d0", incarnation=2)
        assert (await task).token_ids[0] == expected_tokens(router, request)
