"""Detects that a counter which should move has stood still for too long, such as the steps of a worker's step
thread. Pure: the time is an argument.

Only time during which the caller polls counts. A process that was stopped as a whole (SIGSTOP, a suspended machine)
wakes up with a step that began long ago and has hung for none of that time.
"""

import math
from dataclasses import dataclass
from enum import Enum, auto

_GAP_FACTOR = 2.0  # of the usual time between two looks; time beyond it was not observed
_FIRST_STEP_FACTOR = 5.0  # it compiles kernels and captures graphs
_LONGEST_FACTOR = 3.0


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


@dataclass(frozen=True, slots=True)
class StepSight:
    """The state of the step thread at one look."""

    is_alive: bool
    is_busy: bool
    steps: int
    longest_step_s: float  # of those that have ended


class StepWatchdog:
    """Allows a step three times the duration of the longest step seen, but at most three times the limit, and the
    first step five times the limit. A step that was found stuck, or during which the process was stopped, does not
    count as the longest."""

    def __init__(self, limits: StuckLimits) -> None:
        self._limits = limits
        self._still = StandStill(limits.look_s)
        self._longest_s = 0.0
        self._reported_s = 0.0  # the longest, including steps that do not count
        self._step = 0  # at the last look
        self._is_odd = False  # whether that step does not count
        self.stood_s = 0.0

    def look(self, sight: StepSight, now_s: float) -> Verdict:
        self._learn(sight, self._still.is_late(now_s))
        self.stood_s = self._still.look(sight.steps if sight.is_busy else None, now_s)
        if not sight.is_alive:
            return Verdict.HOPELESS
        verdict = self._limits.judge(self.stood_s, self._factor(sight))
        self._is_odd |= verdict is not Verdict.WELL
        return verdict

    def _learn(self, sight: StepSight, is_late: bool) -> None:
        if sight.longest_step_s > self._reported_s and not (is_late or self._is_odd):
            self._longest_s = sight.longest_step_s
        self._reported_s = sight.longest_step_s
        is_same = sight.steps == self._step
        self._is_odd = sight.is_busy and (is_late or (self._is_odd and is_same))
        self._step = sight.steps

    def _factor(self, sight: StepSight) -> float:
        if sight.steps == 0:
            return _FIRST_STEP_FACTOR
        return min(max(1.0, self._longest_s * _LONGEST_FACTOR / self._limits.timeout_s), _LONGEST_FACTOR)
