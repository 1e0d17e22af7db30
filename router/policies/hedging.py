"""Decides which missed health checks of a worker count, when a hedge starts, and which execution of a choice may append
tokens. Pure.

A health check that times out proves nothing about the worker if no other worker has sent anything since the check
began: this router may be cut off from all workers. Such a check is not counted.

A worker that misses one health check is suspect. The requests that wait
for it are hedged: another worker starts a second execution of the same choices from the tokens that the client has,
while the suspect's execution stays the current one. The first token of the hedge makes the hedge current, for all its
choices at once; a token of the suspect before that cancels the hedge. Tokens of an execution that is not current are
dropped. When a worker misses a second health check, requests that have no hedge treat it as lost.

A hedge doubles the work, so only a share of the running requests may have one at a time. A hedge that has its first
token no longer counts, since the suspect's execution is over.
"""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

_SHARE = 0.05


class Silence:
    """The unanswered health checks of one worker since its last message.

    Times are seconds of one clock. `sent_s`: when the worker last sent anything. `another_sent_s`: when any other
    worker did, minus infinity if there is none.
    """

    def __init__(self) -> None:
        self.num_counted = 0  # missed checks that are the worker's own, in a row
        self._own_since_s = math.inf  # its silence is its own if another worker has sent anything since then
        self._last_asked_s = -math.inf

    def record_timeout(self, asked_s: float, *, sent_s: float) -> None:
        """Record that nothing came back in time from a health check that began at `asked_s`."""
        self._record(asked_s, asked_s, sent_s)

    def record_failure(self, asked_s: float, *, sent_s: float) -> None:
        """Record that a health check that began at `asked_s` failed by a broken connection or by the worker's own
        answer. If it is the first failed check, the worker itself has failed, because its host was reached.
        """
        self._record(asked_s, -math.inf, sent_s)

    def count(self, another_sent_s: float) -> None:
        """Count the check recorded last, if the worker is silent by itself."""
        self.num_counted += self.is_of_worker(another_sent_s)

    def num_missed(self, sent_s: float) -> int:
        """Return how many checks count; 0 once the worker has sent anything."""
        return self.num_counted if self.continues(sent_s) else 0

    def continues(self, sent_s: float) -> bool:
        """Return whether the worker has sent nothing since its last unanswered check began."""
        return sent_s <= self._last_asked_s

    def is_of_worker(self, another_sent_s: float) -> bool:
        """Return whether another worker has sent something since the first unanswered check began, or that check
        failed."""
        return another_sent_s >= self._own_since_s

    def _record(self, asked_s: float, own_since_s: float, sent_s: float) -> None:
        if not self.continues(sent_s):
            self.num_counted, self._own_since_s = 0, own_since_s
        self._last_asked_s = asked_s


class Action(StrEnum):
    WAIT = "wait"
    HEDGE = "hedge"
    GIVE_UP = "give_up"


def decide(num_missed: int, *, is_replaceable: bool, may_hedge: bool) -> Action:
    """Decide what happens to work at a worker that has missed `num_missed` health checks in a row. `is_replaceable`:
    another worker of its role would accept the work."""
    if not num_missed or not is_replaceable:
        return Action.WAIT
    if may_hedge:
        return Action.HEDGE
    return Action.GIVE_UP if num_missed > 1 else Action.WAIT


class HedgeBudget:
    """The bound on the concurrent hedges of one router."""

    def __init__(self, share: float = _SHARE) -> None:
        self._share = share
        self.num_hedges = 0

    def may_begin(self, num_running: int) -> bool:
        """Return whether another hedge may start beside `num_running` requests. One is always allowed."""
        return self.num_hedges < max(1, int(self._share * num_running))

    def begin(self) -> None:
        self.num_hedges += 1

    def end(self) -> None:
        assert self.num_hedges > 0, "more hedges ended than began"
        self.num_hedges -= 1


class Execution:
    """An execution of choices of a request. At most one execution of a choice is current."""

    def __init__(self) -> None:
        self.is_over = False  # it will never append again


class HedgeableChoice(Protocol):
    """The part of a choice that hedging uses."""

    execution: Execution  # the only one that may append
    race: "Race | None"


class RaceOutcome(StrEnum):
    TAKEN_OVER = "taken_over"  # the hedge is the current execution
    CALLED_OFF = "called_off"  # the former execution continues


class Race:
    """The race between the current execution of some choices and their hedge. `on_end` is called once, when it is
    decided."""

    def __init__(self, choices: Sequence[HedgeableChoice], hedge: Execution, on_end: Callable[[], None]) -> None:
        assert all(choice.race is None for choice in choices), "a choice has one hedge at a time"
        self.hedge = hedge
        self.outcome: RaceOutcome | None = None
        self._choices = tuple(choices)
        self._on_end = on_end
        for choice in self._choices:
            choice.race = self

    def take_over(self) -> None:
        """Make the hedge the current execution. It has no effect once the race is decided."""
        if self.outcome is None:
            for choice in self._choices:
                choice.execution = self.hedge
            self._end(RaceOutcome.TAKEN_OVER)

    def call_off(self) -> None:
        """Cancel the hedge: it will never append a token. It has no effect once the race is decided."""
        if self.outcome is None:
            self.hedge.is_over = True
            self._end(RaceOutcome.CALLED_OFF)

    def _end(self, outcome: RaceOutcome) -> None:
        self.outcome = outcome
        for choice in self._choices:
            choice.race = None
        self._on_end()


def may_append(choice: HedgeableChoice, execution: Execution) -> bool:
    """Return whether a token of `execution` is appended to this choice. The token decides a race that is in
    progress."""
    race = choice.race
    if race is not None and execution is race.hedge:
        race.take_over()
    elif race is not None and execution is choice.execution:
        race.call_off()
    return execution is choice.execution and not execution.is_over


def claim(choices: Sequence[HedgeableChoice], execution: Execution) -> None:
    """Make `execution` current for another attempt; cancel earlier hedges. A hedge without a token claims nothing."""
    for choice in choices:
        if execution.is_over or (choice.race is not None and choice.race.hedge is execution):
            continue
        if choice.race is not None:
            choice.race.call_off()
        choice.execution = execution
