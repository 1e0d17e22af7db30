"""Which call takes a live stream over, when calls come late, twice, or together."""

import asyncio
from itertools import permutations

import pytest

from cluster.clock import ManualClock
from cluster.errors import Cancelled, Draining, ResumeSuperseded
from router.request.live_streams import LiveStreams
from router.request.outbox import Outboxes

STREAM = b"s" * 16
LARGEST = (1 << 32) - 1


class Calls:
    """The calls of one client, as the pipeline serves them, until each is ended by a newer one."""

    def __init__(self) -> None:
        self.streams = LiveStreams()
        self.served: list[int] = []  # the numbers of calls that became live, in that order
        self._became_live = asyncio.Event()
        self._outboxes = Outboxes(max_tokens=100, clock=ManualClock())

    async def serve(self, number: int) -> None:
        """Raises ResumeSuperseded, or Cancelled once another call took over."""
        with self._outboxes.open() as outbox:
            if number > 0:
                await self.streams.take_over(STREAM, number)
            with self.streams.listed(STREAM, outbox, number):
                self.served.append(number)
                self._became_live.set()
                await outbox.take()

    async def begin(self, number: int) -> "asyncio.Task[None]":
        self._became_live.clear()
        call = asyncio.create_task(self.serve(number))
        async with asyncio.timeout(10):
            await self._became_live.wait()
        assert self.served[-1] == number
        return call

    async def end_all(self, *live: "asyncio.Task[None]") -> None:
        self.streams.end_all(Draining("the test is over"))
        for call in live:
            with pytest.raises(Draining):
                await call


@pytest.mark.parametrize("live_number", [0, 1, 7, LARGEST])
async def test_only_a_call_of_a_higher_number_takes_a_stream_over(live_number: int) -> None:
    """Others end with `resume_superseded`, and the live stream does not notice."""
    calls = Calls()
    live = await calls.begin(live_number)
    for number in {min(1, live_number), max(0, live_number - 1), live_number} - {0}:
        assert not calls.streams.may_be_taken_over(STREAM, number)
        with pytest.raises(ResumeSuperseded, match=f"resumption {number} .* resumption {live_number};") as refused:
            await asyncio.wait_for(calls.serve(number), 10)
        assert refused.value.reason == "resume_superseded"
    assert not live.done()
    if live_number < LARGEST:
        assert calls.streams.may_be_taken_over(STREAM, live_number + 1)
        newer = await calls.begin(live_number + 1)
        with pytest.raises(Cancelled, match="come back"):
            await live
        live = newer
    await calls.end_all(live)


async def test_a_stream_that_is_not_live_is_nobodys_to_take_over_and_any_number_is_served() -> None:
    calls = Calls()
    assert not calls.streams.may_be_taken_over(STREAM, LARGEST)
    live = await calls.begin(5)
    await calls.end_all(live)
    older = await calls.begin(1)
    await calls.end_all(older)


@pytest.mark.parametrize("numbers", list(permutations((1, 2, 3))), ids=str)
async def test_of_calls_that_wait_for_one_stream_to_end_the_newest_is_live_at_last(numbers: tuple[int, ...]) -> None:
    calls = Calls()
    first = await calls.begin(0)
    waiting = {number: asyncio.create_task(calls.serve(number)) for number in numbers}
    older = [call for number, call in waiting.items() if number < 3]
    ended = await asyncio.wait_for(asyncio.gather(first, *older, return_exceptions=True), 10)
    assert isinstance(ended[0], Cancelled)
    assert all(isinstance(end, Cancelled | ResumeSuperseded) for end in ended[1:])
    assert calls.served[-1] == 3 and calls.served == sorted(calls.served)
    await calls.end_all(waiting[3])


async def test_two_calls_of_one_number_the_first_that_comes_is_served() -> None:
    calls = Calls()
    first = await calls.begin(0)
    live = asyncio.create_task(calls.serve(4))
    repeated = asyncio.create_task(calls.serve(4))
    with pytest.raises(Cancelled):
        await first
    with pytest.raises(ResumeSuperseded):
        await asyncio.wait_for(repeated, 10)
    await calls.end_all(live)
