"""The steps that are under way, of which there are at most two, and what is presumed of them. Pure. Owned by the decode
scheduler.

The second one is planned as if every sequence of the first went on: one token more is computed of each, and in place of
the token that is being drawn stands one that is not known. That is taken back before anything but that plan sees it.
"""

from collections import deque
from dataclasses import dataclass

from decode_worker.scheduling.commands import Started
from decode_worker.scheduling.sequences import Group, Sequence
from engine.scheduling.step import UNKNOWN_TOKEN, StepPlan


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was planned and has not ended."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]  # in the plan's order
    first_runs: tuple[Sequence, ...]  # of them, those that are in a step for the first time
    planned_s: float
    is_open: bool  # others may be freed, admitted and planned before its end
    is_presumed: bool = False


class Flights:
    """In their order. A sequence counts those that it is in."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def only(self) -> Flight | None:
        """The step under way, if it is one alone."""
        return self._flights[0] if len(self._flights) == 1 else None

    def begin(self, plan: StepPlan, sequences: tuple[Sequence, ...], now_s: float) -> None:
        assert len(self._flights) < 2
        first_runs = tuple(sequence for sequence in sequences if not sequence.has_run)
        for sequence in sequences:
            sequence.has_run = True
            sequence.num_flights += 1
        self._flights.append(Flight(plan, sequences, first_runs, now_s, _is_open(plan)))

    def end(self, plan: StepPlan) -> Flight:
        """What was presumed of it is taken back, but for the tokens computed."""
        flight = self._flights.popleft()
        assert flight.plan is plan, "steps end in their order"
        for sequence in flight.sequences:
            sequence.num_flights -= 1
            if flight.is_presumed and sequence.token_ids[-1] == UNKNOWN_TOKEN:
                sequence.token_ids.pop()
        return flight

    def close(self) -> None:
        """What is under way has to end before anything is decided."""
        for flight in self._flights:
            flight.is_open = False

    def presume(self) -> None:
        """Of the only one: that it computes what it was asked for, and ends nobody who is not known to end."""
        (flight,) = self._flights
        assert not flight.is_presumed
        flight.is_presumed = True
        for sequence, chunk in zip(flight.sequences, flight.plan.chunks, strict=True):
            sequence.advance(len(chunk.token_ids))
            if chunk.samples and sequence.num_output_left > 1:
                sequence.token_ids.append(UNKNOWN_TOKEN)

    def feeds(self) -> dict[int, int]:
        """By sequence number, of those with a token that is not known: which sample of the first step draws it."""
        if not self._flights:
            return {}
        flight = self._flights[0]
        pairs = zip(flight.sequences, flight.plan.chunks, strict=True)
        sampled = [sequence for sequence, chunk in pairs if chunk.samples]
        return {sequence.number: place for place, sequence in enumerate(sampled)}


def first_runs(flight: Flight) -> tuple[Started, ...]:
    """What is told of those that were in a step for the first time, by group."""
    first: dict[Group, list[Sequence]] = {}
    for sequence in flight.first_runs:
        if not sequence.is_over:
            first.setdefault(sequence.group, []).append(sequence)
    events = []
    for group, sequences in first.items():
        handles = tuple(start.handle for sequence in sequences for _, start in sequence.choices)
        num_cached = max(sequence.num_cached for sequence in sequences)
        events.append(Started(group.job.router, handles, flight.planned_s - group.admitted_s, num_cached))
    return tuple(events)


def _is_open(plan: StepPlan) -> bool:
    """What is copied, swapped or guessed is settled at a step's end, and so is how the choices of a prompt part."""
    if plan.copies or plan.swaps_out or plan.swaps_in:
        return False
    return all(len(chunk.samples) < 2 and chunk.draft is None for chunk in plan.chunks)
