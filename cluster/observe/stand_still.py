"""Detects that a counter which should move has stood still for too long. Pure: the time is an argument.

Only time during which the caller polls counts. A process that was stopped as a whole (SIGSTOP, a suspended machine)
wakes up with a step that began long ago and has hung for none of that time.
"""

import math
from dataclasses import dataclass
from enum import Enum, auto

_GAP_FACTOR = 2.0  # of the usual time between two looks; time beyond it was not observed


class Verdict(Enum):
    WELL = auto()
    STUCK = auto()  # it may still recover by itself
    HOPELESS = auto()


@dataclass(frozen=True, slots=True)
class StuckLimits:
    """The limits for a thread that stands still: stuck after `timeout_s`, its process exits `exit_s` later."""

    timeout_s: float
    exit_s: float

    @property
    def look_s(self) -> float:
        """The interval at which to poll."""
        return min(1.0, self.timeout_s / 4, self.exit_s / 4)

    def judge(self, stood_s: float, factor: float = 1.0) -> Verdict:
        if stood_s < self.timeout_s * factor:
            return Verdict.WELL
        return Verdict.STUCK if stood_s < self.timeout_s * factor + self.exit_s else Verdict.HOPELESS


class StandStill:
    """Measures for how long a counter has been observed not to move."""

    def __init__(self, look_s: float) -> None:
        self._max_gap_s = look_s * _GAP_FACTOR
        self._counter: int | None = None
        self._looked_s = math.inf  # before the first look
        self._stood_s = 0.0

    def is_late(self, now_s: float) -> bool:
        """Return whether the last poll is so long ago that this process must have been stopped."""
        return now_s - self._looked_s > self._max_gap_s

    def look(self, counter: int | None, now_s: float) -> float:
        """Return the seconds for which the counter has stood still. None means that there is nothing that should
        move."""
        if counter is None or counter != self._counter:
            self._stood_s = 0.0
        else:
            self._stood_s += min(now_s - self._looked_s, self._max_gap_s)
        self._counter, self._looked_s = counter, now_s
        return self._stood_s
