"""A router that is silent for too long is left: one that promised signs of life, while somebody waits for it."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from tandem.client import AsyncClient, Client
from tandem.errors import Unavailable
from tandem.results import unpack_ids
from tandem.silence import ALIVE_KEY, Silence, borne_s, sign_every_s
from tandem.v1 import inference_pb2
from tests.unit.test_client import TWO_CHOICES, Response, ScriptedRouter, generation_request, router

SILENCE_S = 0.3
LONG_S = 1.0  # no delay of a busy machine is as long
TEXTS = ["ade", "bc"]


class FrozenRouter(ScriptedRouter):
    """Says its responses, and then nothing more while its connection stays well; with `num_signs`, lives on for so
    many of them and ends."""

    promises = True
    num_signs = 0
    last: tuple[Response, ...] = ()

    def Generate(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Response]:
        self._note(request, context)
        left = self.left = threading.Event()
        context.add_callback(left.set)
        if self.promises:
            context.send_initial_metadata(((ALIVE_KEY, str(self.metadata[ALIVE_KEY])),))
        yield from self.responses
        every_s = float(self.metadata[ALIVE_KEY])
        for _ in range(self.num_signs):
            left.wait(every_s)
            if self.promises:
                yield Response(request_id=request.request_id)
        yield from self.last
        if not self.last:
            assert left.wait(20), "nobody left"


class StoppedRouter(FrozenRouter):
    """Does not answer questions either, as a stopped process."""

    def ListModels(self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext) -> object:
        gone = threading.Event()
        context.add_callback(gone.set)
        self.was_asked = gone.wait(20)
        return super().ListModels(request, context)


class BusyRouter(FrozenRouter):
    num_signs = 6  # longer than the silence
    last = tuple(TWO_CHOICES[2:])


class OlderRouter(BusyRouter):
    promises = False


def by_blocking(addresses: list[str], silence_s: float) -> tuple[list[str], str]:
    with Client(addresses, silence_s=silence_s) as client:
        result = client.generate("x", n=2).result()
        return [choice.text for choice in result.choices], client._routers.first


def on_a_loop(addresses: list[str], silence_s: float) -> tuple[list[str], str]:
    async def ask() -> tuple[list[str], str]:
        async with AsyncClient(addresses, silence_s=silence_s) as client:
            result = await client.generate("x", n=2).result()
            return [choice.text for choice in result.choices], client._routers.first

    return asyncio.run(ask())


CLIENTS = pytest.mark.parametrize("ask", [by_blocking, on_a_loop])
Ask = Callable[[list[str], float], tuple[list[str], str]]


@CLIENTS
def test_a_router_that_breaks_its_promise_is_left_and_another_goes_on(ask: Ask) -> None:
    """Keepalive would never find out: the connection is well."""
    with (
        router(FrozenRouter, responses=TWO_CHOICES[:3]) as (frozen, first),
        router(responses=TWO_CHOICES[3:]) as (second, other),
    ):
        assert ask([first, other], SILENCE_S) == (TEXTS, other)
        assert frozen.left.wait(10), "its call was not cancelled"
        has = [unpack_ids(choice.token_ids) for choice in generation_request(second).resume_from.choices]
        assert has == [(7, 10, 11), (8, 9)]


@CLIENTS
def test_a_router_that_does_not_answer_when_asked_is_left_before_its_time_is_over(ask: Ask) -> None:
    with (
        router(StoppedRouter, responses=TWO_CHOICES[:3]) as (stopped, first),
        router(responses=TWO_CHOICES[3:]) as (_, other),
    ):
        assert ask([first, other], 2 * LONG_S) == (TEXTS, other)
        assert stopped.left.wait(10), "its call was not cancelled"
        assert isinstance(stopped, StoppedRouter) and stopped.was_asked


@CLIENTS
@pytest.mark.parametrize(("kind", "silence_s"), [(BusyRouter, LONG_S), (OlderRouter, SILENCE_S)])
def test_one_that_gives_signs_or_promised_none_is_waited_for(
    ask: Ask, kind: type[FrozenRouter], silence_s: float
) -> None:
    with router(kind, responses=TWO_CHOICES[:2]) as (slow, first), router() as (second, other):
        assert ask([first, other], silence_s) == (TEXTS, first)
        generation_request(slow)  # one, and no more
        assert second.seen == []


@pytest.mark.parametrize("says_so_again", [True, False])
def test_a_frozen_router_is_known_again_before_it_has_said_anything(says_so_again: bool) -> None:
    """Once it has promised signs, a later call there is not waited for longer than an answered one."""
    with router(FrozenRouter, responses=TWO_CHOICES) as (frozen, first), router() as (_, other):
        assert isinstance(frozen, FrozenRouter)
        frozen.last = (Response(),)
        with Client([first, other], silence_s=SILENCE_S) as client:
            client.generate("x", n=2).result()
            frozen.responses, frozen.last, frozen.promises = [], (), says_so_again
            assert client.generate("y", n=2).result().text == "ade"
            assert client._routers.first == other


async def test_a_frozen_router_is_known_again_on_a_loop_too() -> None:
    with router(FrozenRouter, responses=TWO_CHOICES) as (frozen, first), router() as (_, other):
        assert isinstance(frozen, FrozenRouter)
        frozen.last = (Response(),)
        async with AsyncClient([first, other], silence_s=SILENCE_S) as client:
            await client.generate("x", n=2).result()
            frozen.responses, frozen.last, frozen.promises = [], (), False
            assert (await client.generate("y", n=2).result()).text == "ade"
            assert client._routers.first == other


def test_a_reader_that_does_not_wait_hears_no_silence() -> None:
    """What was said meanwhile is there when it comes back."""
    with router(FrozenRouter, responses=TWO_CHOICES) as (frozen, first), Client(first, silence_s=0.1) as client:
        assert isinstance(frozen, FrozenRouter)
        frozen.last = (Response(),)
        generation = client.generate("x", n=2)
        next(generation)
        assert not threading.Event().wait(0.3)
        assert [choice.text for choice in generation.result().choices] == TEXTS


def test_the_last_router_known_being_silent_before_any_answer_is_an_error_that_says_so() -> None:
    with router(FrozenRouter, responses=TWO_CHOICES) as (frozen, first), Client(first, silence_s=0.1) as client:
        assert isinstance(frozen, FrozenRouter)
        frozen.last = (Response(),)
        client.generate("x", n=2).result()
        frozen.responses, frozen.last = [], ()
        with pytest.raises(Unavailable, match=r"said nothing for 0\.1 s") as lost:
            client.generate("x").result()
    assert (lost.value.reason, lost.value.is_lost) == ("silent", True)


def test_silence_counts_from_the_beginning_of_each_wait() -> None:
    silence = Silence(5.0)
    assert silence.begin(10.0) == 15.0
    assert silence.look(14.0) == 15.0
    silence.end()
    assert silence.look(16.0) is None
    assert silence.begin(20.0) == 25.0
    assert silence.look(25.0) is None
    assert silence.is_over


def test_after_two_signs_that_did_not_come_the_router_is_asked_and_left_without_an_answer() -> None:
    silence = Silence(5.0, asks=True)
    assert silence.begin(10.0) == 12.0
    assert silence.look(11.9) == 12.0 and not silence.take_question()
    assert silence.look(12.0) == 12.5 and silence.take_question() and not silence.take_question()
    assert silence.look(12.4) == 12.5
    assert silence.look(12.5) is None
    assert silence.is_over and silence.lasted_s == 2.5


def test_a_router_that_answers_has_the_rest_of_its_time_and_is_not_asked_again() -> None:
    silence = Silence(5.0, asks=True)
    silence.begin(10.0)
    silence.look(12.0)
    silence.answered()
    assert silence.look(12.5) == 15.0
    assert silence.look(15.0) is None
    assert silence.is_over


def test_an_answer_to_the_question_of_an_earlier_wait_prolongs_nothing() -> None:
    silence = Silence(5.0, asks=True)
    silence.begin(10.0)
    silence.look(12.0)
    silence.end()
    silence.answered()
    assert silence.begin(20.0) == 22.0
    silence.answered()
    assert silence.look(22.0) == 22.5


def test_who_was_stopped_while_it_waited_for_an_answer_asks_again() -> None:
    silence = Silence(5.0, asks=True)
    silence.begin(0.0)
    assert silence.look(2.0) == 2.5 and silence.take_question()
    assert silence.look(60.0) == 61.0 and not silence.take_question()
    assert silence.look(61.0) == 61.5 and silence.take_question()
    assert silence.look(61.5) is None and silence.is_over


def test_who_was_stopped_itself_gives_the_router_time_for_one_more_sign() -> None:
    silence = Silence(5.0)
    silence.begin(0.0)
    assert silence.look(60.0) == 61.0
    assert not silence.is_over
    silence.look(61.0)
    assert silence.is_over


def test_what_is_borne_is_five_signs_of_what_the_router_promised_and_never_less_than_asked() -> None:
    assert borne_s(5.0, f"{sign_every_s(5.0):g}") == 5.0
    assert borne_s(5.0, "3") == 15.0
    assert borne_s(5.0, "0.1") == 5.0


def test_without_a_promise_nothing_is_too_long() -> None:
    silence = Silence(None)
    assert silence.begin(0.0) is None
    assert silence.look(1e9) is None
    assert not silence.is_over
