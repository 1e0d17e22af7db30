"""Sends requests at the times that were planned, whatever becomes of those before: an open loop.

Owns the tasks of the run. Times are the event loop's, so that a test can give it a loop whose time is its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from cli.load.latency import Record
from cli.load.workload import Arrival

# Sends one request, by its number; each item is how many tokens arrived together.
Send = Callable[[int, Arrival], AsyncGenerator[int, None]]


class RequestFailed(Exception):
    """What `send` raises for a request that did not end as it should; the text is its reason's name."""


async def open_loop(arrivals: Sequence[Arrival], send: Send) -> list[Record]:
    """One record per arrival, in their order. Ends when the last request has."""
    begin_s = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_one(number, arrival, begin_s, send)) for number, arrival in enumerate(arrivals)]
    return [task.result() for task in running]


async def _one(number: int, arrival: Arrival, begin_s: float, send: Send) -> Record:
    loop = asyncio.get_running_loop()
    await _until(begin_s + arrival.at_s)
    times_s: list[float] = []
    error = ""
    try:
        async with aclosing(send(number, arrival)) as counts:
            async for count in counts:
                times_s += [loop.time() - begin_s] * count
    except RequestFailed as failure:
        error = str(failure)
    return Record(
        scheduled_s=arrival.at_s,
        token_times_s=tuple(times_s),
        ended_s=loop.time() - begin_s,
        prompt_tokens=arrival.prompt_tokens,
        error=error or ("" if times_s else "no_tokens"),
    )


async def _until(time_s: float) -> None:
    loop = asyncio.get_running_loop()
    reached = loop.create_future()
    alarm = loop.call_at(time_s, reached.set_result, None)
    try:
        await reached
    finally:
        alarm.cancel()
