"""Whether work on a suspect is begun a second time elsewhere, and which of the two may append tokens. Pure.

A worker that misses an answer is suspect. What waits for it is hedged: the same choices go on elsewhere from what the
client has, as another line of work, while the suspect's line stays the current one. The hedge's first token makes the
hedge current, for all its choices at once; a token of the suspect before that calls the hedge off. Whatever a line says
that is not current is dropped. A worker that misses a second answer is given up by what is not hedged.

Hedges cost work twice, so only a share of what runs may have one at a time; one that has its first token is no hedge
any more, since the suspect's line is over.
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
    """What becomes of work at a worker that has missed so many answers in a row. `is_replaceable`: another one of its
    role would take it."""
    if not num_missed or not is_replaceable:
        return Action.WAIT
    if num_missed > 1:
        return Action.GIVE_UP
    return Action.HEDGE if may_hedge else Action.WAIT


class HedgeBudget:
    """One router's."""

    def __init__(self, share: float = _SHARE) -> None:
        self._share = share
        self.num_hedges = 0

    def may_begin(self, num_running: int) -> bool:
        """`num_running`: requests. One hedge is always allowed."""
        return self.num_hedges < max(1, int(self._share * num_running))

    def begin(self) -> None:
        self.num_hedges += 1

    def end(self) -> None:
        assert self.num_hedges > 0, "more hedges ended than began"
        self.num_hedges -= 1


class Line:
    """One line of work on choices of a request."""

    def __init__(self) -> None:
        self.is_over = False  # it will never append again


class Contested(Protocol):
    """A choice, as far as lines of work concern it."""

    line: Line  # the only one that may append
    race: "Race | None"


class RaceOutcome(StrEnum):
    TAKEN_OVER = "taken_over"  # the hedge is the current line
    CALLED_OFF = "called_off"  # the line before goes on


class Race:
    """Between the current line of some choices and their hedge. `on_end` is told once, when it is decided."""

    def __init__(self, choices: Sequence[Contested], hedge: Line, on_end: Callable[[], None]) -> None:
        assert all(choice.race is None for choice in choices), "a choice has one hedge at a time"
        self.hedge = hedge
        self.outcome: RaceOutcome | None = None
        self._choices = tuple(choices)
        self._on_end = on_end
        for choice in self._choices:
            choice.race = self

    def take_over(self) -> None:
        """From now on the hedge alone appends. Nothing once it is decided."""
        if self.outcome is None:
            for choice in self._choices:
                choice.line = self.hedge
            self._end(RaceOutcome.TAKEN_OVER)

    def call_off(self) -> None:
        """The hedge will never append. Nothing once it is decided."""
        if self.outcome is None:
            self.hedge.is_over = True
            self._end(RaceOutcome.CALLED_OFF)

    def _end(self, outcome: RaceOutcome) -> None:
        self.outcome = outcome
        for choice in self._choices:
            choice.race = None
        self._on_end()


def may_append(choice: Contested, line: Line) -> bool:
    """Whether a token that `line` has for this choice counts. Its coming decides the race that may be going on."""
    race = choice.race
    if race is not None and line is race.hedge:
        race.take_over()
    elif race is not None and line is choice.line:
        race.call_off()
    return line is choice.line and not line.is_over


def claim(choices: Sequence[Contested], line: Line) -> None:
    """`line` begins another attempt at these: what hedged them before is over. A hedge that has no token yet claims
    nothing."""
    for choice in choices:
        if line.is_over or (choice.race is not None and choice.race.hedge is line):
            continue
        if choice.race is not None:
            choice.race.call_off()
        choice.line = line
