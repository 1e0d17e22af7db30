"""Detects that a counter which should move does not move for too long, such as the steps of a worker's step thread.
Pure: the time is an argument.

Only time during which the caller polls counts. A process that was stopped as a whole (SIGSTOP, a suspended machine)
wakes up with a step that began long ago and has hung for none of that time.
"""

import math
from dataclasses import dataclass
from enum import Enum, auto

_GAP_FACTOR = 2.0  # of the usual time between two polls; time beyond it was not observed
_FIRST_STEP_FACTOR = 5.0  # it compiles kernels and captures graphs
_LONGEST_FACTOR = 3.0


class StallState(Enum):
    RUNNING = auto()
    STUCK = auto()  # it may still recover by itself
    DEAD = auto()  # only a restart of the process helps


@dataclass(frozen=True, slots=True)
class StallLimits:
    """The limits for a thread without progress: it is stuck after `timeout_s`, and its process exits `exit_s` later."""

    timeout_s: float
    exit_s: float

    @property
    def poll_s(self) -> float:
        """The interval at which to poll."""
        return min(1.0, self.timeout_s / 4, self.exit_s / 4)

    def judge(self, stalled_s: float, factor: float = 1.0) -> StallState:
        if stalled_s < self.timeout_s * factor:
            return StallState.RUNNING
        return StallState.STUCK if stalled_s < self.timeout_s * factor + self.exit_s else StallState.DEAD


class StallTimer:
    """Measures for how long a counter has been observed not to move."""

    def __init__(self, poll_s: float) -> None:
        self._max_gap_s = poll_s * _GAP_FACTOR
        self._counter: int | None = None
        self._polled_s = math.inf  # before the first poll
        self._stalled_s = 0.0

    def is_late(self, now_s: float) -> bool:
        """Return whether the last poll is so long ago that this process must have been stopped."""
        return now_s - self._polled_s > self._max_gap_s

    def poll(self, counter: int | None, now_s: float) -> float:
        """Return the seconds for which the counter has not moved. None means that there is nothing that should
        move."""
        if counter is None or counter != self._counter:
            self._stalled_s = 0.0
        else:
            self._stalled_s += min(now_s - self._polled_s, self._max_gap_s)
        self._counter, self._polled_s = counter, now_s
        return self._stalled_s


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The state of the step thread at one poll."""

    is_alive: bool
    is_busy: bool
    steps: int
    longest_step_s: float  # of those that have ended


class StepWatchdog:
    """Allows a step three times the duration of the longest step seen, but at most three times the limit, and the
    first step five times the limit. A step that was found stuck, or during which the process was stopped, does not
    count as the longest."""

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._stall = StallTimer(limits.poll_s)
        self._longest_s = 0.0
        self._reported_s = 0.0  # the longest, including steps that do not count
        self._step = 0  # at the last poll
        self._is_odd = False  # whether that step does not count
        self.stalled_s = 0.0

    def poll(self, snapshot: StepSnapshot, now_s: float) -> StallState:
        self._learn(snapshot, self._stall.is_late(now_s))
        self.stalled_s = self._stall.poll(snapshot.steps if snapshot.is_busy else None, now_s)
        if not snapshot.is_alive:
            return StallState.DEAD
        state = self._limits.judge(self.stalled_s, self._factor(snapshot))
        self._is_odd |= state is not StallState.RUNNING
        return state

    def _learn(self, snapshot: StepSnapshot, is_late: bool) -> None:
        if snapshot.longest_step_s > self._reported_s and not (is_late or self._is_odd):
            self._longest_s = snapshot.longest_step_s
        self._reported_s = snapshot.longest_step_s
        is_same = snapshot.steps == self._step
        self._is_odd = snapshot.is_busy and (is_late or (self._is_odd and is_same))
        self._step = snapshot.steps

    def _factor(self, snapshot: StepSnapshot) -> float:
        if snapshot.steps == 0:
            return _FIRST_STEP_FACTOR
        return min(max(1.0, self._longest_s * _LONGEST_FACTOR / self._limits.timeout_s), _LONGEST_FACTOR)
