"""Clocks that are passed as arguments, so that no deciding code reads the machine's clock."""

import time
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
