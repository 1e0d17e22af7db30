"""The steps in flight, at most two, and the assumptions under which the second one was planned. Pure. Owned by the
scheduler.

The second step is planned while the first one runs, as if every sequence of the first one continued: its tokens count
as computed, and a placeholder stands for the token that is being drawn. Both are undone or confirmed when the first
step ends, before anything but the second plan uses them.
"""

from collections import deque
from dataclasses import dataclass

from engine.scheduling.batching.sequences import Group, Sequence
from engine.scheduling.commands import Started
from engine.scheduling.step import UNKNOWN_TOKEN, Chunk, StepPlan


@dataclass(slots=True, eq=False)
class PlannedStep:
    """A step that was planned and has not ended."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]  # in the plan's order
    first_runs: tuple[Sequence, ...]  # those of them that are in a step for the first time
    planned_s: float
    may_plan_ahead: bool  # commands may be applied and a step planned before its end
    is_assumed: bool = False  # its outcome was assumed by `assume_completed`


class StepsInFlight:
    """The steps in the order in which they were planned. Each sequence counts the steps that it is in."""

    def __init__(self) -> None:
        self._in_flight: deque[PlannedStep] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def only(self) -> PlannedStep | None:
        """Return the step in flight if there is exactly one, else None."""
        return self._in_flight[0] if len(self._in_flight) == 1 else None

    def begin(self, plan: StepPlan, sequences: tuple[Sequence, ...], now_s: float) -> None:
        assert len(self._in_flight) < 2
        first_runs = tuple(sequence for sequence in sequences if not sequence.has_run)
        for sequence in sequences:
            sequence.has_run = True
            sequence.num_steps_in_flight += 1
        self._in_flight.append(PlannedStep(plan, sequences, first_runs, now_s, _may_plan_ahead(plan)))

    def end(self, plan: StepPlan) -> PlannedStep:
        """Remove the oldest step. Its placeholder tokens are removed; the assumed number of computed tokens stays."""
        step = self._in_flight.popleft()
        assert step.plan is plan, "steps end in their order"
        for sequence in step.sequences:
            sequence.num_steps_in_flight -= 1
            if step.is_assumed and sequence.token_ids[-1] == UNKNOWN_TOKEN:
                sequence.token_ids.pop()
        return step

    def block_planning_ahead(self) -> None:
        """Let no step be planned, and no command be applied that needs it, before the steps in flight have ended."""
        for step in self._in_flight:
            step.may_plan_ahead = False

    def assume_completed(self) -> None:
        """Assume that the only step in flight computes its plan, and that only those sequences end with it that are
        certain to."""
        (step,) = self._in_flight
        assert not step.is_assumed
        step.is_assumed = True
        for sequence, chunk in zip(step.sequences, step.plan.chunks, strict=True):
            sequence.advance(len(chunk.token_ids))
            if chunk.samples and not sequence.is_last_token_next:
                sequence.token_ids.append(UNKNOWN_TOKEN)

    def feeds(self) -> dict[int, int]:
        """Map the numbers of sequences with a placeholder token to the sample of the first step that draws the
        token."""
        if not self._in_flight:
            return {}
        step = self._in_flight[0]
        pairs = zip(step.sequences, step.plan.chunks, strict=True)
        sampled = [sequence for sequence, chunk in pairs if chunk.samples]
        return {sequence.number: place for place, sequence in enumerate(sampled)}


def started_events(step: PlannedStep) -> tuple[Started, ...]:
    """Return a Started event per group for the sequences decoded here that were in a step for the first time."""
    first: dict[Group, list[Sequence]] = {}
    for sequence in step.first_runs:
        if not sequence.is_over and sequence.group.export is None:
            first.setdefault(sequence.group, []).append(sequence)
    events = []
    for group, sequences in first.items():
        handles = tuple(start.handle for sequence in sequences for _, start in sequence.choices)
        num_cached = max(sequence.num_cached for sequence in sequences)
        events.append(Started(group.router, handles, step.planned_s - group.admitted_s, num_cached))
    return tuple(events)


def _may_plan_ahead(plan: StepPlan) -> bool:
    """Return whether the next step can be planned before this one ends. It cannot if the step copies, swaps or drafts,
    if choices split at its end, or if the next logits are to be changed as its token requires."""
    if plan.copies or plan.swaps_out or plan.swaps_in:
        return False
    return all(len(chunk.samples) < 2 and chunk.draft is None and not _is_awaited(chunk) for chunk in plan.chunks)


def _is_awaited(chunk: Chunk) -> bool:
    """Return whether the sequence's next logits can be changed only when the token of this chunk is known."""
    if not chunk.samples:
        return False
    state, grammar = chunk.samples[0].logit_state, chunk.samples[0].grammar_state
    return grammar is not None or (state is not None and state.reads_tokens)
