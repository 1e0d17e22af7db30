"""A client with several routers: the order in which it tries them, and how a generation continues when its router
dies.
"""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from tandem.client import AsyncClient, Client
from tandem.errors import Cancelled, DeadlineExceeded, InvalidRequest, Unavailable
from tandem.v1 import inference_pb2
from tests.unit.client.scripted_router import (
    TWO_CHOICES,
    Response,
    ScriptedRouter,
    aborting,
    generation_request,
    router,
)

NO_ROUTER = "127.0.0.1:1"


def the_rest(num_known: int) -> list[Response]:
    """Return the messages of TWO_CHOICES that another router sends after the first ones."""
    return TWO_CHOICES[num_known:]


def gone(context: grpc.ServicerContext) -> None:
    """Abort as a killed router does: with a gRPC status and without Tandem's details."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@pytest.mark.parametrize("num_known", [1, 2, 3, 4])
def test_a_generation_continues_at_another_router(num_known: int) -> None:
    with (
        router(responses=TWO_CHOICES[:num_known], failure=gone) as (_, dying),
        router(responses=the_rest(num_known)) as (second, other),
        Client(f"{dying},{other}") as client,
    ):
        generation = client.generate("x", n=2, max_tokens=5)
        result = generation.result()
        assert [(choice.text, choice.finish_reason) for choice in result.choices] == [("ade", "length"), ("bc", "stop")]
        request = generation_request(second)
        assert request.request_id == generation.request_id
        before = [delta for response in TWO_CHOICES[:num_known] for delta in response.deltas]
        for number, choice in enumerate(request.resume_from.choices):
            came = [delta for delta in before if delta.choice == number]
            assert list(choice.token_ids) == [token_id for delta in came for token_id in delta.token_ids]
            assert choice.num_characters == sum(len(delta.text) for delta in came)
        second.responses = TWO_CHOICES
        client.generate("y").result()
        assert generation_request(second).text == "y", "the one that answers is asked first from then on"


async def test_an_async_generation_continues_at_another_router() -> None:
    with (
        router(responses=TWO_CHOICES[:3], failure=gone) as (_, dying),
        router(responses=the_rest(3)) as (second, other),
    ):
        async with AsyncClient([dying, other]) as client:
            result = await client.generate("x", n=2).result()
    assert [choice.text for choice in result.choices] == ["ade", "bc"]
    assert [tuple(c.token_ids) for c in generation_request(second).resume_from.choices] == [(7, 10, 11), (8, 9)]


def test_the_only_router_is_tried_again_after_a_loss() -> None:
    """At each attempt the router sends one more message and then breaks the connection."""
    said = 0

    class Restarting(ScriptedRouter):
        def Generate(self, request: object, context: grpc.ServicerContext) -> object:  # type: ignore[override]
            nonlocal said
            self._note(request, context)
            yield TWO_CHOICES[said]
            said += 1
            if said < len(TWO_CHOICES):
                gone(context)

    with router(kind=Restarting) as (servicer, address), Client(address) as client:
        assert client.generate("x", n=2).result().text == "ade"
        assert len(servicer.seen) == len(TWO_CHOICES)


class Frozen(ScriptedRouter):
    """A router that accepts calls and answers none before their client has left."""

    def ListModels(self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext) -> object:
        left = threading.Event()
        context.add_callback(left.set)
        assert left.wait(20), "no call ended"
        return super().ListModels(request, context)


def test_a_router_that_does_not_answer_is_skipped_after_the_keepalive_timeout() -> None:
    with router(kind=Frozen) as (_, frozen), router() as (answering, other):
        with Client([frozen, other], keepalive_timeout_s=0.2) as client:
            assert client.models()[0].id == "m"
            assert client.tokenize("x")[:2] == (1, 2)
        assert len(answering.seen) == 2, "the one that answers is asked first from then on"


async def test_the_async_client_skips_a_router_that_does_not_answer() -> None:
    with router(kind=Frozen) as (_, frozen), router() as (_, other):
        async with AsyncClient([frozen, other], keepalive_timeout_s=0.2) as client:
            assert (await client.models())[0].id == "m"


def test_a_call_without_side_effects_is_made_again_where_the_connection_broke() -> None:
    class Closing(ScriptedRouter):
        def ListModels(self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext) -> object:
            if not self.seen:
                self._note(request, context)
                gone(context)
            return super().ListModels(request, context)

    with router(kind=Closing) as (closing, address), Client(address) as client:
        assert client.models()[0].id == "m"
        assert len(closing.seen) == 2


def test_the_last_router_gets_all_the_remaining_time() -> None:
    """A slow router can still respond when no other router is left."""
    with router() as (servicer, address), Client([NO_ROUTER, address], keepalive_timeout_s=1.0) as client:
        began_s = time.monotonic()
        client.models()
        passed_s = time.monotonic() - began_s
        assert 29.0 - passed_s < servicer.remaining_s < 29.5  # gRPC sends 29 s rounded up


def test_a_missing_router_is_skipped_for_every_call() -> None:
    with router() as (_, address), Client([NO_ROUTER, address]) as client:
        assert client.models()[0].id == "m"
        assert client.generate("x").result().text == "ade"
    with router() as (_, address), Client([NO_ROUTER, address]) as client:
        assert client.generate("x").result().text == "ade"
        assert client.detokenize([1]) == "é"


async def test_the_async_client_skips_a_missing_router_for_every_call() -> None:
    with router() as (_, address):
        async with AsyncClient([NO_ROUTER, address]) as client:
            assert (await client.models())[0].id == "m"
            assert await client.tokenize("x")
        async with AsyncClient([NO_ROUTER, "127.0.0.1:2"], connect_timeout_s=0) as client:
            with pytest.raises(Unavailable):
                await client.models()
            with pytest.raises(Unavailable, match=r"no process accepts connections at 127\.0\.0\.1:2"):
                await client.generate("x").result()


def test_without_any_router_a_request_ends_at_its_deadline_with_the_last_cause() -> None:
    with (
        Client(NO_ROUTER) as client,
        pytest.raises(DeadlineExceeded, match=f"the last error: no process accepts connections at {NO_ROUTER}"),
    ):
        client.generate("x", timeout_s=1.0).result()


@pytest.mark.parametrize(("given_s", "expected_s"), [(None, 30.0), (45.0, 45.0)])
def test_the_time_to_connect_is_the_timeout_that_was_given_and_otherwise_thirty_seconds(
    given_s: float | None, expected_s: float
) -> None:
    with Client(NO_ROUTER) as client, Client(NO_ROUTER, timeout_s=given_s) as other:
        for generation in (client.generate("x", timeout_s=given_s), other.generate("x")):
            assert generation._parameters.connect_timeout_s == expected_s
            assert generation._parameters.timeout_s == (given_s or 600.0)
            generation.close()


def test_a_request_waits_for_a_router_that_comes_back_after_all_have_gone() -> None:
    """The client was served before, so the time for reaching a first router does not limit it."""
    with ExitStack() as first, ThreadPoolExecutor(1) as reader:
        _, address = first.enter_context(router())
        with Client([address, NO_ROUTER], connect_timeout_s=0) as client:
            assert client.generate("x").result().text == "ade"
            first.close()
            lost = threading.Event()
            generation = client.generate("y")

            def draw() -> float:
                if generation._progress._num_lost > 2:
                    lost.set()
                return 0.5

            generation._progress._draw = draw
            reading = reader.submit(generation.result)
            assert lost.wait(20), "no call was lost"
            with router(port=int(address.rpartition(":")[2])) as (back, _):
                assert reading.result(20).text == "ade"
                assert generation_request(back).text == "y"


def test_a_refusal_is_raised_and_no_other_router_is_tried() -> None:
    failure = aborting(grpc.StatusCode.INVALID_ARGUMENT, "n must be", reason="invalid_request")
    with (
        router(responses=TWO_CHOICES[:1], failure=failure) as (_, address),
        router() as (second, other),
        Client([address, other]) as client,
    ):
        with pytest.raises(InvalidRequest, match="n must be"):
            client.generate("x").result()
        assert second.seen == []


def test_closing_ends_the_wait_for_a_router() -> None:
    with router(responses=TWO_CHOICES[:1], failure=gone) as (servicer, address), Client(address) as client:
        generation = client.generate("x", n=2)
        next(generation)
        closing = threading.Timer(0.05, generation.close)
        servicer.responses = []
        closing.start()
        with pytest.raises(Cancelled):
            generation.result()
        closing.join()


@pytest.mark.parametrize("closed", ["the generation", "its client"])
async def test_closing_ends_an_async_wait_for_a_router_or_its_answer(closed: str) -> None:
    """The reader gets an error of Tandem's in both cases; its task is not cancelled."""
    with router(responses=TWO_CHOICES[:1], hold=True) as (servicer, address):
        client = AsyncClient(address)
        generation = client.generate("x", n=2)
        await anext(generation), await anext(generation)
        reading = asyncio.create_task(generation.result())
        await asyncio.sleep(0)
        if closed == "its client":
            await client.close()
        generation.close()
        with pytest.raises(Cancelled):
            await reading
        await client.close()
        assert await asyncio.to_thread(servicer.left.wait, 10)
    with router(responses=TWO_CHOICES[:1], failure=gone) as (servicer, address):
        client = AsyncClient(address)
        generation = client.generate("x", n=2)
        await anext(generation)
        servicer.responses = []
        reading = asyncio.create_task(generation.result())
        close = generation.close if closed == "the generation" else lambda: asyncio.ensure_future(client.close())
        asyncio.get_running_loop().call_later(0.05, close)
        with pytest.raises(Cancelled):
            await reading
        await client.close()
