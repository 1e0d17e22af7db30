"""Decides when a hedge starts, and which execution of a choice may append tokens. Pure.

A worker that misses one health check is suspect (silence.py decides which missed checks count). The requests that wait
for it are hedged: another worker starts a second execution of the same choices from the tokens that the client has,
while the suspect's execution stays the current one. The first token of the hedge makes the hedge current, for all its
choices at once; a token of the suspect before that cancels the hedge. Tokens of an execution that is not current are
dropped. When a worker misses a second health check, requests that are not hedged treat it as lost.

A hedge doubles the work, so only a share of the running requests may have one at a time. A hedge that has its first
token no longer counts, since the suspect's execution is over.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

_SHARE = 0.05


class Action(StrEnum):
    WAIT = "wait"
    HEDGE = "hedge"
    GIVE_UP = "give_up"


def decide(num_missed: int, *, is_replaceable: bool, may_hedge: bool) -> Action:
    """Decide what happens to work at a worker that has missed `num_missed` health checks in a row. `is_replaceable`:
    another worker of its role would accept the work."""
    if not num_missed or not is_replaceable:
        return Action.WAIT
    if num_missed > 1:
        return Action.GIVE_UP
    return Action.HEDGE if may_hedge else Action.WAIT


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
