"""The prompts that a worker, or several, got in about the last 20 s. Later ones are expected to take as much of the
worker's time."""

import math
from dataclasses import dataclass

from cluster.outstanding_work import NO_PROMPT, PromptWork
from cluster.service_times import ServiceTimes

_RECENT_S = 20.0  # the time constant with which earlier prompts count less
_QUIET_S = 5.0  # before the first prompt, as if none had come: one or two say little about those that follow
_MOST_SHARE = 0.9  # of a worker's time; where prompts need more, they wait


@dataclass(frozen=True, slots=True)
class RecentPrompts:
    """The prompts that came to a worker within `seconds`, and how long it computes them. Sums over workers are of this
    type too."""

    number: float = 0.0
    computing_s: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "RecentPrompts") -> "RecentPrompts":
        return RecentPrompts(
            self.number + other.number, self.computing_s + other.computing_s, self.seconds + other.seconds
        )

    def after(self, seconds: float) -> "RecentPrompts":
        """Return the recent prompts that much later, if no other one comes until then."""
        weight = math.exp(-seconds / _RECENT_S)
        return RecentPrompts(weight * self.number, weight * self.computing_s, _aged_s(self.seconds, weight))

    def stretch(self, longest_s: float) -> float:
        """Return by which factor prompts that will come stretch the time between the tokens of a sequence. `longest_s`:
        by how much one of them may delay it. While it decodes for T seconds, prompts take share * T of them: n tokens
        of q seconds take T = n * q + share * T."""
        delay_s = min(self.computing_s, self.number * longest_s)
        return 1 / (1 - min(_MOST_SHARE, delay_s / (self.seconds + _QUIET_S)))


NO_RECENT_PROMPTS = RecentPrompts()


class PromptArrivals:
    """Counts the prompts that come to one worker, earlier ones with less weight. All sums are as of the latest one."""

    def __init__(self) -> None:
        self._work = NO_PROMPT
        self._number = 0.0
        self._seconds = 0.0  # since the first one
        self._first_s, self._latest_s = math.inf, 0.0

    def record(self, work: PromptWork, now_s: float) -> None:
        """Record a prompt that comes now."""
        if self._number:
            weight = self._weight(now_s)
            self._work, self._number = self._work.times(weight), self._number * weight
            self._seconds = _aged_s(self._seconds, weight)
        self._work, self._number, self._latest_s = self._work + work, self._number + 1, now_s
        self._first_s = min(self._first_s, now_s)

    def remove(self, work: PromptWork, came_s: float) -> None:
        """Remove a prompt that came at this time and is not computed: it was refused or cancelled. It has no effect on
        one that came before the first one that counts."""
        if came_s < self._first_s:
            return
        weight = math.exp((came_s - self._latest_s) / _RECENT_S)
        self._work, self._number = self._work + work.times(-weight), max(0.0, self._number - weight)

    def recent(self, times: ServiceTimes, now_s: float) -> RecentPrompts:
        """Return the recent prompts at a worker of this speed. What they add to steps that decode anyway counts; it is
        the larger part of what they take."""
        if not self._number:
            return NO_RECENT_PROMPTS
        weight = self._weight(now_s)
        prefill, factor = times.prefill, times.mixed.factor if times.mixed is not None else 1.0
        added_s = prefill.per_token_s * self._work.num_new + prefill.per_token_context_s * self._work.attended
        return RecentPrompts(weight * self._number, weight * factor * added_s, _aged_s(self._seconds, weight))

    def _weight(self, now_s: float) -> float:
        """Return the weight that is left of the sums."""
        return math.exp((self._latest_s - now_s) / _RECENT_S)


def _aged_s(seconds: float, weight: float) -> float:
    """Return a time that counts with the weights of what came within it, and that went on meanwhile."""
    return seconds * weight + _RECENT_S * (1 - weight)
