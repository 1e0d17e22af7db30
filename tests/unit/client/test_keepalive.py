"""The keep-alive timeout of a call, while a reader waits for the next message."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tandem.client import AsyncClient, Client
from tandem.errors import DeadlineExceeded
from tandem.keepalive import KEEPALIVE_KEY, KeepAliveTimer, keepalive_interval_s, keepalive_timeout_s
from tandem.keepalive_watch import waiting
from tandem.v1 import inference_pb2
from tests.unit.client.scripted_router import TWO_CHOICES, Response, ScriptedRouter, generation_request, router

TIMEOUT_S = 0.3
LONG_S = 1.0  # no delay of a busy machine is as long
TEXTS = ["ade", "bc"]


class FrozenRouter(ScriptedRouter):
    """A router that sends its responses, then `num_keepalives` keep-alive messages, and then nothing on its open
    connection.
    """

    sends_keepalives = True
    num_keepalives = 0
    last: tuple[Response, ...] = ()

    def Generate(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Response]:
        self._note(request, context)
        left = self.left = threading.Event()
        context.add_callback(left.set)
        if self.sends_keepalives:
            context.send_initial_metadata(((KEEPALIVE_KEY, str(self.metadata[KEEPALIVE_KEY])),))
        yield from self.responses
        every_s = float(self.metadata[KEEPALIVE_KEY])
        for _ in range(self.num_keepalives):
            left.wait(every_s)
            if self.sends_keepalives:
                yield Response(request_id=request.request_id)
        yield from self.last
        if not self.last:
            assert left.wait(20), "no call ended"


class StoppedRouter(FrozenRouter):
    """A router that does not respond to pings either, like a stopped process."""

    def ListModels(self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext) -> object:
        gone = threading.Event()
        context.add_callback(gone.set)
        self.was_asked = gone.wait(20)
        return super().ListModels(request, context)


class SilentRouter(StoppedRouter):
    """A router that sends nothing on its first calls and serves the next one."""

    num_silent = 2

    def Generate(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Response]:
        self._note(request, context)
        left = threading.Event()
        context.add_callback(left.set)
        context.send_initial_metadata(((KEEPALIVE_KEY, str(self.metadata[KEEPALIVE_KEY])),))
        if sum(isinstance(seen, inference_pb2.GenerateRequest) for seen in self.seen) <= self.num_silent:
            assert left.wait(20), "no call ended"
        else:
            yield from self.responses


class BusyRouter(FrozenRouter):
    num_keepalives = 6  # together longer than the timeout
    last = tuple(TWO_CHOICES[2:])


class OlderRouter(BusyRouter):
    sends_keepalives = False


def by_blocking(addresses: list[str], timeout_s: float) -> tuple[list[str], str]:
    with Client(addresses, keepalive_timeout_s=timeout_s) as client:
        result = client.generate("x", n=2).result()
        return [choice.text for choice in result.choices], client._routers.first


def on_a_loop(addresses: list[str], timeout_s: float) -> tuple[list[str], str]:
    async def ask() -> tuple[list[str], str]:
        async with AsyncClient(addresses, keepalive_timeout_s=timeout_s) as client:
            result = await client.generate("x", n=2).result()
            return [choice.text for choice in result.choices], client._routers.first

    return asyncio.run(ask())


Ask = Callable[[list[str], float], tuple[list[str], str]]


def with_each_client(check: Callable[[Ask], None]) -> None:
    """Run the check with both clients at the same time: it waits for up to a second."""
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(check, ask) for ask in (by_blocking, on_a_loop)]:
            done.result()


def test_a_generation_continues_at_another_router_after_missing_keepalives() -> None:
    """The keep-alive of HTTP/2 does not detect this: the connection works."""

    def check(ask: Ask) -> None:
        with (
            router(FrozenRouter, responses=TWO_CHOICES[:3]) as (frozen, first),
            router(responses=TWO_CHOICES[3:]) as (second, other),
        ):
            assert ask([first, other], TIMEOUT_S) == (TEXTS, other)
            assert frozen.left.wait(10), "its call was not cancelled"
            has = [tuple(choice.token_ids) for choice in generation_request(second).resume_from.choices]
            assert has == [(7, 10, 11), (8, 9)]

    with_each_client(check)


def test_a_router_that_does_not_respond_to_a_ping_is_lost_before_the_timeout() -> None:
    def check(ask: Ask) -> None:
        with (
            router(StoppedRouter, responses=TWO_CHOICES[:3]) as (stopped, first),
            router(responses=TWO_CHOICES[3:]) as (_, other),
        ):
            assert ask([first, other], 2 * LONG_S) == (TEXTS, other)
            assert stopped.left.wait(10), "its call was not cancelled"
            assert isinstance(stopped, StoppedRouter) and stopped.was_asked

    with_each_client(check)


class MuteRouter(StoppedRouter):
    """A stopped process that has never sent anything on the connection, which its kernel accepted."""

    sends_keepalives = False


def test_a_router_that_was_stopped_before_its_first_message_is_lost_at_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keep-alive of HTTP/2 would need 15 s."""
    monkeypatch.setattr("tandem.keepalive.FIRST_RESPONSE_S", LONG_S)

    def check(ask: Ask) -> None:
        with router(MuteRouter, responses=[]) as (mute, first), router(responses=TWO_CHOICES) as (_, other):
            assert ask([first, other], TIMEOUT_S) == (TEXTS, other)
            assert mute.left.wait(10), "its call was not cancelled"

    with_each_client(check)


def test_a_router_without_keepalives_that_responds_to_a_ping_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.keepalive.FIRST_RESPONSE_S", LONG_S)

    def check(ask: Ask) -> None:
        with router(OlderRouter, responses=[]) as (slow, first), router() as (second, other):
            assert isinstance(slow, OlderRouter)
            slow.last = tuple(TWO_CHOICES)
            assert ask([first, other], LONG_S) == (TEXTS, first)
            assert second.seen == []

    with_each_client(check)


@pytest.mark.parametrize(("kind", "timeout_s"), [(BusyRouter, LONG_S), (OlderRouter, TIMEOUT_S)])
def test_a_router_that_sends_keepalives_or_offered_none_is_waited_for(
    kind: type[FrozenRouter], timeout_s: float
) -> None:
    def check(ask: Ask) -> None:
        with router(kind, responses=TWO_CHOICES[:2]) as (slow, first), router() as (second, other):
            assert ask([first, other], timeout_s) == (TEXTS, first)
            assert sum(isinstance(request, inference_pb2.GenerateRequest) for request in slow.seen) == 1
            assert second.seen == []

    with_each_client(check)


@pytest.mark.parametrize("offers_again", [True, False])
def test_a_later_call_to_a_frozen_router_times_out_without_a_message(offers_again: bool) -> None:
    """A router that has offered keep-alives has the keep-alive timeout in later calls too."""
    with router(FrozenRouter, responses=TWO_CHOICES) as (frozen, first), router() as (_, other):
        assert isinstance(frozen, FrozenRouter)
        frozen.last = (Response(),)
        with Client([first, other], keepalive_timeout_s=TIMEOUT_S) as client:
            client.generate("x", n=2).result()
            frozen.responses, frozen.last, frozen.sends_keepalives = [], (), offers_again
            assert client.generate("y", n=2).result().text == "ade"
            assert client._routers.first == other


async def test_a_later_async_call_to_a_frozen_router_times_out_without_a_message() -> None:
    with router(FrozenRouter, responses=TWO_CHOICES) as (frozen, first), router() as (_, other):
        assert isinstance(frozen, FrozenRouter)
        frozen.last = (Response(),)
        async with AsyncClient([first, other], keepalive_timeout_s=TIMEOUT_S) as client:
            await client.generate("x", n=2).result()
            frozen.responses, frozen.last, frozen.sends_keepalives = [], (), False
            assert (await client.generate("y", n=2).result()).text == "ade"
            assert client._routers.first == other


def test_time_in_which_the_reader_does_not_wait_does_not_count() -> None:
    """The messages that arrived in that time are read afterwards."""
    with (
        router(FrozenRouter, responses=TWO_CHOICES) as (frozen, first),
        Client(first, keepalive_timeout_s=0.1) as client,
    ):
        assert isinstance(frozen, FrozenRouter)
        frozen.last = (Response(),)
        generation = client.generate("x", n=2)
        next(generation)
        assert not threading.Event().wait(0.3)
        assert [choice.text for choice in generation.result().choices] == TEXTS


def test_a_request_to_the_only_router_is_sent_again_after_seconds_of_silence() -> None:
    def check(ask: Ask) -> None:
        with router(SilentRouter, responses=TWO_CHOICES) as (silent, first):
            assert isinstance(silent, SilentRouter)
            assert ask([first], TIMEOUT_S) == (TEXTS, first)
            requests = [request for request in silent.seen if isinstance(request, inference_pb2.GenerateRequest)]
            assert len(requests) == 1 + silent.num_silent
            assert {request.request_id for request in requests} == {requests[0].request_id}
            assert not any(request.HasField("resume_from") for request in requests)

    with_each_client(check)


def test_the_deadline_of_a_request_to_a_silent_router_names_the_silence() -> None:
    with (
        router(FrozenRouter, responses=TWO_CHOICES) as (frozen, first),
        Client(first, keepalive_timeout_s=0.1) as client,
    ):
        assert isinstance(frozen, FrozenRouter)
        frozen.last = (Response(),)
        client.generate("x", n=2).result()
        frozen.responses, frozen.last = [], ()
        with pytest.raises(DeadlineExceeded, match=r"sent no message for (0\.[1-9]|[1-9]\d*\.\d) s") as lost:
            client.generate("x", timeout_s=1.0).result()
    assert lost.value.reason == "deadline_exceeded"


def test_the_timer_restarts_with_each_wait() -> None:
    timer = KeepAliveTimer(5.0)
    assert timer.begin(10.0) == 15.0
    assert timer.check(14.0) == 15.0
    timer.end()
    assert timer.check(16.0) is None
    assert timer.begin(20.0) == 25.0
    assert timer.check(25.0) is None
    assert timer.is_over


def test_the_router_is_pinged_after_two_missing_messages_and_lost_without_a_response() -> None:
    timer = KeepAliveTimer(5.0, can_ping=True)
    assert timer.begin(10.0) == 12.0
    assert timer.check(11.9) == 12.0 and not timer.pop_ping()
    assert timer.check(12.0) == 12.5 and timer.pop_ping() and not timer.pop_ping()
    assert timer.check(12.4) == 12.5
    assert timer.check(12.5) is None
    assert timer.is_over and timer.waited_s == 2.5


def test_a_router_that_responds_has_the_rest_of_the_timeout_and_is_not_pinged_again() -> None:
    timer = KeepAliveTimer(5.0, can_ping=True)
    timer.begin(10.0)
    timer.check(12.0)
    timer.on_ping_response()
    assert timer.check(12.5) == 15.0
    assert timer.check(15.0) is None
    assert timer.is_over


def test_a_router_of_the_first_call_has_the_whole_timeout_for_its_response_and_then_no_timeout() -> None:
    timer = KeepAliveTimer(5.0, can_ping=True, is_response_enough=True)
    timer.begin(10.0)
    assert timer.check(12.0) == 15.0 and timer.pop_ping() and timer.response_s == 3.0
    timer.on_ping_response()
    assert timer.check(15.0) is None
    assert not timer.is_over
    timer.end()
    timer.begin(20.0)
    timer.check(22.0)
    assert timer.check(25.0) is None
    assert timer.is_over


def test_after_its_first_message_a_router_has_its_own_timeout() -> None:
    timer = KeepAliveTimer(5.0, can_ping=True, is_response_enough=True)
    timer.on_first_message(5.0)
    timer.begin(10.0)
    assert timer.check(12.0) == 12.5
    timer.on_first_message(None)
    assert timer.begin(20.0) is None


def test_a_response_to_the_ping_of_an_earlier_wait_does_not_extend_the_timeout() -> None:
    timer = KeepAliveTimer(5.0, can_ping=True)
    timer.begin(10.0)
    timer.check(12.0)
    timer.end()
    timer.on_ping_response()
    assert timer.begin(20.0) == 22.0
    timer.on_ping_response()
    assert timer.check(22.0) == 22.5


def test_a_client_that_was_stopped_while_waiting_for_the_response_pings_again() -> None:
    timer = KeepAliveTimer(5.0, can_ping=True)
    timer.begin(0.0)
    assert timer.check(2.0) == 2.5 and timer.pop_ping()
    assert timer.check(60.0) == 61.0 and not timer.pop_ping()
    assert timer.check(61.0) == 61.5 and timer.pop_ping()
    assert timer.check(61.5) is None and timer.is_over


def test_a_client_that_was_stopped_waits_for_one_more_interval() -> None:
    timer = KeepAliveTimer(5.0)
    timer.begin(0.0)
    assert timer.check(60.0) == 61.0
    assert not timer.is_over
    timer.check(61.0)
    assert timer.is_over


def test_the_timeout_is_five_intervals_of_the_router_and_at_least_the_clients_own() -> None:
    assert keepalive_timeout_s(5.0, f"{keepalive_interval_s(5.0):g}") == 5.0
    assert keepalive_timeout_s(5.0, "3") == 15.0
    assert keepalive_timeout_s(5.0, "0.1") == 5.0


def test_without_a_timeout_a_call_is_never_lost() -> None:
    timer = KeepAliveTimer(None)
    assert timer.begin(0.0) is None
    assert timer.check(1e9) is None
    assert not timer.is_over


class CoarseLoop(asyncio.SelectorEventLoop):
    """An event loop that runs timers up to one step of its clock early, as on a machine with a coarse clock."""

    def __init__(self) -> None:
        super().__init__()
        self._clock_resolution = 0.1

    def time(self) -> float:
        return super().time() // self._clock_resolution * self._clock_resolution


class CountedTimer(KeepAliveTimer):
    num_checks = 0

    def check(self, now_s: float) -> float | None:
        self.num_checks += 1
        return super().check(now_s)


def test_a_coarse_clock_does_not_make_the_checks_a_busy_loop() -> None:
    timer = CountedTimer(0.25, can_ping=True)

    async def wait_until_lost() -> None:
        lost = asyncio.Event()
        with waiting(timer, lost.set):
            await lost.wait()

    with asyncio.Runner(loop_factory=CoarseLoop) as runner:
        runner.run(wait_until_lost())
    assert timer.is_over
    assert timer.num_checks < 10, "one for the ping and one for its response, and one more after each pause of the test"
