"""Drives a real scheduler through a simulated clock: arrivals at their times, and steps that take the time of a cost
model.

No test sleeps and no model runs: a step lasts `StepCost.seconds`, and its tokens come from the given runner.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from engine.scheduling.step import Command, DrawnToken, Event, Runner, Scheduler, StepPlan, StepResult

SILENT = DrawnToken(1)


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step takes a fixed time to read the weights and a time for each computed token."""

    fixed_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return self.fixed_s + num_tokens * self.token_s


@dataclass(frozen=True, slots=True)
class Step:
    began_s: float
    ended_s: float
    plan: StepPlan
    num_tokens: int
    num_drawn: int


class SameToken:
    """A runner that draws the same token always, for tests that only count."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(tuple(tuple(SILENT for _ in chunk.samples) for chunk in plan.chunks))


class Simulation(Generic[Command, Event]):
    """A simulated run. `steps` and `events` are recorded with their times."""

    def __init__(
        self,
        scheduler: Scheduler[Command, Event],
        cost: StepCost,
        runner: Runner | None = None,
    ) -> None:
        self.now_s = 0.0
        self.steps: list[Step] = []
        self.events: list[tuple[float, Event]] = []
        self._scheduler = scheduler
        self._cost = cost
        self._runner = runner or SameToken()

    def run(self, arrivals: Iterable[tuple[float, Command]]) -> None:
        """Run until everything that arrives has ended. `arrivals` are in order of time."""
        due: list[tuple[float, Command]] = list(arrivals)[::-1]
        while True:
            while due and due[-1][0] <= self.now_s:
                self._note(self._scheduler.apply(due.pop()[1], self.now_s))
            if not self._step():
                if not due:
                    return
                self.now_s = max(self.now_s, due[-1][0])

    def _step(self) -> bool:
        self._note(self._scheduler.reap(self.now_s)[0])
        events, plan = self._scheduler.plan(self.now_s)
        self._note(events)
        if plan is None:
            return False
        result = self._runner.run(plan)
        began_s = self.now_s
        num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
        self.now_s += self._cost.seconds(num_tokens)
        self.steps.append(Step(began_s, self.now_s, plan, num_tokens, sum(map(len, result.tokens))))
        self._note(self._scheduler.complete(plan, result, self.now_s))
        return True

    def _note(self, events: Sequence[Event]) -> None:
        self.events += [(self.now_s, event) for event in events]
