"""Clocks that are passed as arguments, so that no deciding code reads the machine's clock; a timer for deadlines."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds with an arbitrary origin."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only by `advance`; for tests and the simulator."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        assert duration_s >= 0
        self._now_s += duration_s


class DeadlineTimer:
    """Calls `on_due` on the event loop at the deadline or earlier.

    If the deadline moves to a later time, the timer still fires at the old one, and its owner sets it again. So
    renewals, which move deadlines often, cost nothing."""

    def __init__(self, clock: Clock, on_due: Callable[[], None]) -> None:
        self._clock, self._on_due = clock, on_due
        self._handle: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0

    def set(self, deadline_s: float | None) -> None:
        if self._handle is not None and (deadline_s is None or deadline_s < self._deadline_s):
            self._handle.cancel()
            self._handle = None
        if self._handle is None and deadline_s is not None:
            delay_s = max(0.0, deadline_s - self._clock.now_s())
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)
            self._deadline_s = deadline_s

    def _fire(self) -> None:
        self._handle = None
        self._on_due()
