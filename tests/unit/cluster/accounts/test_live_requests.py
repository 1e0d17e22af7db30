"""Tests which call takes over a live stream when calls arrive late, twice or together, and whose use is counted."""

import asyncio
from itertools import permutations

import pytest

from cluster.accounts.keys import Caller, Limits
from cluster.clock import ManualClock
from cluster.errors import Cancelled, Draining, LimitReached, Overloaded, ResumeSuperseded
from cluster.observe.telemetry import Telemetry
from router.request.live_requests import LiveRequests
from router.requests import GenerateRequest, ResumedChoice, TextPrompt

STREAM = b"s" * 16
LARGEST = (1 << 32) - 1


class Calls:
    """The calls of one client, as the pipeline serves them, until each is ended by a newer one."""

    def __init__(self) -> None:
        self.live_requests = LiveRequests(
            max_live_requests=8, max_buffered_tokens=100, clock=ManualClock(), telemetry=Telemetry()
        )
        self.served: list[int] = []  # the numbers of calls that became live, in that order
        self._became_live = asyncio.Event()

    async def serve(self, number: int) -> None:
        """Serve a call. Raises ResumeSuperseded, or Cancelled once another call has taken over."""
        resumed = {"resume_from": (ResumedChoice(),), "resume_number": number} if number else {}
        request = GenerateRequest(TextPrompt("p"), request_id="r", **resumed)  # type: ignore[arg-type]
        with self.live_requests.arrived(request) as live:
            if number > 0:
                await self.live_requests.take_over(STREAM, number)
            with self.live_requests.streaming(live, STREAM):
                self.served.append(number)
                self._became_live.set()
                self.live_requests.check()
                await live.outbox.next_deltas()

    async def begin(self, number: int) -> "asyncio.Task[None]":
        self._became_live.clear()
        call = asyncio.create_task(self.serve(number))
        async with asyncio.timeout(10):
            await self._became_live.wait()
        assert self.served[-1] == number
        return call

    async def end_all(self, *live: "asyncio.Task[None]") -> None:
        self.live_requests.end_streams(Draining("the test is over"))
        for call in live:
            with pytest.raises(Draining):
                await call
        self.live_requests.check()
        assert len(self.live_requests) == 0 and self.live_requests.num_served == 0


@pytest.mark.parametrize("live_number", [0, 1, 7, LARGEST])
async def test_only_a_call_of_a_higher_number_takes_a_stream_over(live_number: int) -> None:
    """Other calls end with `resume_superseded`, and the live stream continues."""
    calls = Calls()
    live = await calls.begin(live_number)
    for number in {min(1, live_number), max(0, live_number - 1), live_number} - {0}:
        assert not calls.live_requests.may_take_over(STREAM, number)
        with pytest.raises(ResumeSuperseded, match=f"resumption {number} .* resumption {live_number};") as refused:
            await asyncio.wait_for(calls.serve(number), 10)
        assert refused.value.reason == "resume_superseded"
    assert not live.done()
    if live_number < LARGEST:
        assert calls.live_requests.may_take_over(STREAM, live_number + 1)
        newer = await calls.begin(live_number + 1)
        with pytest.raises(Cancelled, match="resumed this request"):
            await live
        live = newer
    await calls.end_all(live)


async def test_a_stream_that_has_ended_cannot_be_taken_over_and_a_call_with_any_number_is_served() -> None:
    calls = Calls()
    assert not calls.live_requests.may_take_over(STREAM, LARGEST)
    live = await calls.begin(5)
    await calls.end_all(live)
    older = await calls.begin(1)
    await calls.end_all(older)


@pytest.mark.parametrize("numbers", list(permutations((1, 2, 3))), ids=str)
async def test_the_newest_of_the_calls_that_wait_for_a_stream_stays_live(numbers: tuple[int, ...]) -> None:
    calls = Calls()
    first = await calls.begin(0)
    waiting = {number: asyncio.create_task(calls.serve(number)) for number in numbers}
    older = [call for number, call in waiting.items() if number < 3]
    ended = await asyncio.wait_for(asyncio.gather(first, *older, return_exceptions=True), 10)
    assert isinstance(ended[0], Cancelled)
    assert all(isinstance(end, Cancelled | ResumeSuperseded) for end in ended[1:])
    assert calls.served[-1] == 3 and calls.served == sorted(calls.served)
    await calls.end_all(waiting[3])


async def test_the_first_of_two_calls_with_the_same_number_is_served() -> None:
    calls = Calls()
    first = await calls.begin(0)
    live = asyncio.create_task(calls.serve(4))
    repeated = asyncio.create_task(calls.serve(4))
    with pytest.raises(Cancelled):
        await first
    with pytest.raises(ResumeSuperseded):
        await asyncio.wait_for(repeated, 10)
    await calls.end_all(live)


async def test_a_drain_waits_for_every_live_request_including_requests_not_admitted() -> None:
    live_requests = Calls().live_requests
    await asyncio.wait_for(live_requests.until_none_left(), 10)
    with live_requests.arrived(GenerateRequest(TextPrompt("p"))) as live:
        assert list(live_requests) == [live]
        live_requests.check()
        drained = asyncio.create_task(live_requests.until_none_left())
        await asyncio.sleep(0)
        assert not drained.done()
    await asyncio.wait_for(drained, 10)
    live_requests.check()


async def test_every_request_is_counted_once_by_its_outcome_even_without_a_place() -> None:
    telemetry = Telemetry()
    live_requests = LiveRequests(max_live_requests=1, max_buffered_tokens=100, clock=ManualClock(), telemetry=telemetry)
    with live_requests.arrived(GenerateRequest(TextPrompt("p"))):
        with pytest.raises(Overloaded), live_requests.arrived(GenerateRequest(TextPrompt("p"))):
            pass
        assert len(live_requests) == 1
    published = telemetry.render().decode()
    assert 'tandem_requests_total{outcome="overloaded"} 1.0' in published
    assert 'tandem_requests_total{outcome="ok"} 1.0' in published


async def test_the_check_finds_a_stream_whose_request_is_no_longer_live() -> None:
    live_requests = Calls().live_requests
    with live_requests.arrived(GenerateRequest(TextPrompt("p"))) as live, live_requests.streaming(live, STREAM):
        live_requests.check()
        del live_requests._live[live.row.number]
        with pytest.raises(AssertionError):
            live_requests.check()
        live_requests._live[live.row.number] = live


async def test_only_requests_of_callers_with_a_key_are_counted_and_limited() -> None:
    live_requests = Calls().live_requests
    limits = Limits(requests_per_minute=2, max_sequences=1)
    for _ in range(5):
        with live_requests.arrived(GenerateRequest(TextPrompt("p"), caller=Caller("acme", limits=limits))) as live:
            assert live.reservation is None
    assert live_requests.limits.own(0.0) == {} and live_requests.usage.batch()[1] == {}
    keyed = GenerateRequest(TextPrompt("p"), caller=Caller("acme", "k1", limits=limits))
    for _ in range(2):
        with live_requests.arrived(keyed) as live:
            assert live.reservation is not None
    with pytest.raises(LimitReached, match="requests_per_minute"), live_requests.arrived(keyed):
        pass
    assert live_requests.limits.own(0.0)["acme"].requests == 2
    assert live_requests.usage.batch()[1] == {"requests|k1|acme": 2}
