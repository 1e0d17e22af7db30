"""When what should move has stood still for too long. Pure: whoever looks brings the time.

Only time in which somebody looked counts. A process that was stopped as a whole (SIGSTOP, a suspended machine) wakes up
with a step that began long ago and has hung for none of that time.
"""

import math
from dataclasses import dataclass
from enum import Enum, auto

_FIRST_STEP_FACTOR = 5.0  # kernels are compiled and graphs captured in it
_LONGEST_FACTOR = 3.0
_GAP_FACTOR = 2.0  # of the usual time between two looks: what more has passed, nobody saw


class Verdict(Enum):
    WELL = auto()
    STUCK = auto()  # it may still go on by itself
    HOPELESS = auto()


@dataclass(frozen=True, slots=True)
class StuckLimits:
    """`timeout_s`: stuck after so long. `exit_s`: hopeless after so much more."""

    timeout_s: float
    exit_s: float

    @property
    def look_s(self) -> float:
        """How often to look."""
        return min(1.0, self.timeout_s / 4, self.exit_s / 4)

    def judge(self, stood_s: float, factor: float = 1.0) -> Verdict:
        if stood_s < self.timeout_s * factor:
            return Verdict.WELL
        return Verdict.STUCK if stood_s < self.timeout_s * factor + self.exit_s else Verdict.HOPELESS


class StandStill:
    """For how long a counter has been seen not to move."""

    def __init__(self, look_s: float) -> None:
        self._max_gap_s = look_s * _GAP_FACTOR
        self._counter: int | None = None
        self._looked_s = math.inf  # never yet
        self._stood_s = 0.0

    def is_late(self, now_s: float) -> bool:
        """Nobody has looked for so long that this process was stopped."""
        return now_s - self._looked_s > self._max_gap_s

    def look(self, counter: int | None, now_s: float) -> float:
        """`counter` None: there is nothing that should move."""
        if counter is None or counter != self._counter:
            self._stood_s = 0.0
        else:
            self._stood_s += min(now_s - self._looked_s, self._max_gap_s)
        self._counter, self._looked_s = counter, now_s
        return self._stood_s


@dataclass(frozen=True, slots=True)
class StepSight:
    """The step thread at one look."""

    is_alive: bool
    is_busy: bool
    steps: int
    longest_step_s: float  # of those that have ended


class StepWatchdog:
    """A step may take three times as long as the longest that was seen, within three times the limit; the first one,
    in which things are compiled, five times the limit. One that was found stuck, or in which the process was stopped,
    is no measure of others."""

    def __init__(self, limits: StuckLimits) -> None:
        self._limits = limits
        self._still = StandStill(limits.look_s)
        self._longest_s = 0.0
        self._told_s = 0.0  # the longest, with those that are no measure
        self._step = 0  # at the last look
        self._is_odd = False  # that step is no measure
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
        if sight.longest_step_s > self._told_s and not (is_late or self._is_odd):
            self._longest_s = sight.longest_step_s
        self._told_s = sight.longest_step_s
        is_same = sight.steps == self._step
        self._is_odd = sight.is_busy and (is_late or (self._is_odd and is_same))
        self._step = sight.steps

    def _factor(self, sight: StepSight) -> float:
        if sight.steps == 0:
            return _FIRST_STEP_FACTOR
        return min(max(1.0, self._longest_s * _LONGEST_FACTOR / self._limits.timeout_s), _LONGEST_FACTOR)
