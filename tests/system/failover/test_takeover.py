"""Tests which calls take over a live stream: an attacker's client and the owner's against real routers.

Routers, calls and signatures are real; the workers are scripted, so that each token shows its stream.
"""

import asyncio

import grpc
import pytest

from tandem.v1 import admin_pb2
from tests.system.rigs.members.router_harness import ask, expected_tokens
from tests.system.rigs.members.takeover_rig import (
    LARGEST_NUMBER,
    MAX_TOKENS,
    live_at,
    question,
    resuming,
    served,
    tokens,
)


async def test_the_acceptance_comes_before_any_worker_answers() -> None:
    async with served() as router:
        router.prefill.before_first_tokens.close()
        call = router.stub.Generate(question(), timeout=20)
        async with asyncio.timeout(10):
            first = await anext(aiter(call))
        assert first.accepted.acceptance and first.accepted.max_tokens == MAX_TOKENS and not first.deltas
        call.cancel()


async def test_a_client_that_reconnects_to_its_router_takes_over_its_request() -> None:
    """The client's link was cut, and the router has not noticed the end of the first stream."""
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(router)
        assert await router.refusal(question()) == (grpc.StatusCode.ALREADY_EXISTS, "duplicate_request")
        router.decode.pause_at = None
        responses = await router.answer(resuming(question(), live.acceptance, expected[:2]))
        assert tokens(responses) == expected[2:]
        assert responses[0].accepted.acceptance == live.acceptance, "it stays good for a second loss"
        await live.is_ended()
        assert router.decode.cancelled_handles, "its first sequence was told to stop"


SUPERSEDED = (grpc.StatusCode.FAILED_PRECONDITION, "resume_superseded")


async def test_a_delayed_call_does_not_end_the_stream_of_a_newer_one() -> None:
    """The network held the client's second resumption back until its third one was live; a proxy repeats the third."""
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        first = await live_at(router)
        newest = await live_at(router, resuming(question(), first.acceptance, expected[:2], number=3))
        await first.is_ended()
        for number in (1, 2, 3):
            delayed = resuming(question(), first.acceptance, expected[:1], number=number)
            assert await router.refusal(delayed) == SUPERSEDED
        refused = router.router.telemetry.value(
            "tandem_requests_refused_total", reason="resume_superseded", service_class="interactive"
        )
        assert refused == 3
        assert await newest.goes_on() == expected[2:]


async def test_among_concurrent_resumptions_the_highest_number_is_served_in_any_order() -> None:
    numbers = [4, 1, LARGEST_NUMBER, 3, 2]
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        first = await live_at(router)
        router.decode.pause_at = None
        resumed = [resuming(question(), first.acceptance, expected[:2], number=number) for number in numbers]
        router.prefill.before_first_tokens.close()
        calls = [asyncio.create_task(router.answer(request)) for request in resumed]
        newest = calls[numbers.index(LARGEST_NUMBER)]
        older = [call for call in calls if call is not newest]
        ended, _ = await asyncio.wait(older, timeout=10)
        assert ended == set(older)
        for call in older:
            with pytest.raises(grpc.aio.AioRpcError, match=r"resumed this request|newer"):
                await call
        router.prefill.before_first_tokens.open()
        assert tokens(await newest) == expected[2:]
        await first.is_ended()


async def test_a_delayed_call_is_served_where_no_newer_stream_is_live() -> None:
    """The router has no newer stream to compare it with. Its client does not wait for it any more, so it ends with its
    connection.
    """
    async with served() as first, served() as second:
        expected = expected_tokens(first.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(first)
        first.decode.pause_at = None
        newest = resuming(question(), live.acceptance, expected[:2], number=2)
        delayed = resuming(question(), live.acceptance, expected[:1], number=1)
        assert tokens(await first.answer(newest)) == expected[2:]
        assert tokens(await first.answer(delayed)) == expected[1:], "the newer stream has ended"
        assert tokens(await second.answer(delayed)) == expected[1:], "the newer stream was never here"
        assert not sum(second.router.telemetry.observations("tandem_ttft_seconds")), "its client has its first token"
        await live.is_ended()


async def test_a_resumption_without_its_number_is_refused_and_ends_nothing() -> None:
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(router)
        wrong = resuming(question(), live.acceptance, expected[:2], number=0)
        assert await router.refusal(wrong) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
        assert await live.goes_on() == expected


async def test_a_request_that_lost_its_router_before_any_token_keeps_its_turn_elsewhere() -> None:
    async with served() as first, served() as second:
        live = await live_at(first)
        responses = await second.answer(resuming(question(), live.acceptance, []))
        assert tokens(responses) == expected_tokens(second.router, ask(max_tokens=MAX_TOKENS))
        assert responses[-1].summary.ledger.reasons == ["resumed"]
        assert sum(second.router.telemetry.observations("tandem_ttft_seconds")) == 1
        await live.goes_on()


async def test_a_request_id_alone_does_not_take_over_a_live_stream() -> None:
    """The ids that `Requests` lists to every client do not suffice."""
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(router)
        (listed,) = (await router.admin.Requests(admin_pb2.RequestsRequest(), timeout=10)).requests
        assert listed.request_id == "mine"
        for token_ids in ([], expected[:2]):
            wrong = resuming(question(), b"", token_ids)
            assert await router.refusal(wrong) == (grpc.StatusCode.FAILED_PRECONDITION, "acceptance_missing")
        assert await live.goes_on() == expected


async def test_an_acceptance_of_another_stream_with_the_same_id_prompt_and_parameters_ends_nothing() -> None:
    """An attacker who has all fields of a request sends it to another router, and uses the acceptance that it received
    there.
    """
    async with served() as router, served() as elsewhere:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(router)
        elsewhere.decode.pause_at = None
        forged = (await elsewhere.answer(question()))[0].accepted.acceptance
        assert forged != live.acceptance
        router.decode.pause_at = None
        assert tokens(await router.answer(resuming(question(), forged, expected[:2]))) == expected[2:], (
            "its own request"
        )
        assert await live.goes_on() == expected


async def test_an_id_in_use_at_another_router_does_not_block_a_resumption() -> None:
    async with served() as first, served() as second:
        expected = expected_tokens(first.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(first)
        squatter = await live_at(second)
        second.decode.pause_at = None
        assert tokens(await second.answer(resuming(question(), live.acceptance, expected[:1]))) == expected[1:]
        assert await squatter.goes_on() == expected
        await live.goes_on()
