"""Decides whether the step thread is stuck, from the step loop's progress at each look. Pure: time is an argument."""

from dataclasses import dataclass

from cluster.observe.stand_still import StandStill, StuckLimits, Verdict

_FIRST_STEP_FACTOR = 5.0  # it compiles kernels and captures graphs
_LONGEST_FACTOR = 3.0


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
