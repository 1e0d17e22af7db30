"""Waits for a state that no event reports. The error at the deadline has the state that was observed last."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Seen = TypeVar("Seen")


async def until(
    look: Callable[[], Awaitable[Seen]],
    holds: Callable[[Seen], object] = bool,
    *,
    what: str,
    deadline_s: float = 60.0,
    pause_s: float = 0.005,
) -> Seen:
    """Poll until the condition holds, and return the value for which it does. `what`: the expected state, for the error
    at the deadline. `pause_s`: between two looks, which take processor time from what brings the state about; longer
    for a state that lasts.
    """
    seen: Seen | str = "nothing"
    try:
        async with asyncio.timeout(deadline_s):
            while not holds(sight := await look()):
                seen = sight
                await asyncio.sleep(pause_s)
            return sight
    except TimeoutError:
        raise AssertionError(f"{what}: not so within {deadline_s:g} s; seen last: {seen}") from None
