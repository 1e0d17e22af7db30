"""The baseline of continuous batching: batches that no sequence joins or leaves before all of them have ended.

FasterTransformer behind Triton works so. It is a scheduler around Tandem's own, for the simulated clock of
tests/unit/engine/scheduling/policies; no worker offers it.
"""

from collections.abc import Sequence

from cluster.messages import DecodeJob
from engine.scheduling.commands import AdmitLocal, Command, Event, Failed, StepTokens
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import StepPlan, StepResult


class StaticBatching:
    """Holds jobs of one sequence back until the batch before them has ended, then admits up to `batch_size` of them.

    Each `window` arrivals are sorted by prompt length, so that the prompts of a batch have similar lengths; 1 keeps the
    order of arrival.
    """

    def __init__(self, scheduler: SequenceScheduler, batch_size: int, window: int = 1) -> None:
        self._scheduler = scheduler
        self._batch_size = batch_size
        self._window = window
        self._queue: list[tuple[int, int, DecodeJob]] = []  # (window, prompt length or arrival, job)
        self._num_arrived = 0
        self._num_live = 0

    def apply(self, command: Command, now_s: float) -> tuple[Event, ...]:
        if not isinstance(command, AdmitLocal):
            return self._count_ended(self._scheduler.apply(command, now_s))
        length = len(command.job.prompt_token_ids) if self._window > 1 else self._num_arrived
        self._queue.append((self._num_arrived // self._window, length, command.job))
        self._num_arrived += 1
        return ()

    def reap(self, now_s: float) -> tuple[tuple[Event, ...], float | None]:
        events, deadline_s = self._scheduler.reap(now_s)
        return self._count_ended(events), deadline_s

    def plan(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        admitted: list[Event] = []
        if not self._num_live:
            for job in self._next_batch():
                admitted += self._scheduler.apply(AdmitLocal(job), now_s)
        events, plan = self._scheduler.plan(now_s)
        return self._count_ended((*admitted, *events)), plan

    def written(self, plan: StepPlan) -> tuple[Event, ...]:
        return self._scheduler.written(plan)

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        return self._count_ended(self._scheduler.complete(plan, result, now_s))

    def fail(self, plan: StepPlan, error: Exception, now_s: float) -> tuple[Event, ...]:
        return self._count_ended(self._scheduler.fail(plan, error, now_s))

    def _next_batch(self) -> Sequence[DecodeJob]:
        self._queue.sort(key=lambda waiting: waiting[:2])
        batch = [job for _, _, job in self._queue[: self._batch_size]]
        del self._queue[: self._batch_size]
        self._num_live = len(batch)
        return batch

    def _count_ended(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        for event in events:
            if isinstance(event, StepTokens):
                self._num_live -= sum(token.token.finish_reason is not None for token in event.tokens)
            elif isinstance(event, Failed):
                self._num_live -= len(event.handles)
        return events
