"""A SchedulerBench whose steps are planned ahead, over a device that computes in order, at times that the bench
chooses.

A step may be computed as soon as it is launched, or only when its result is read: an error in the work between them
shows in one of the two.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from engine.scheduling.commands import Command, Event, Frozen, Inspected, Started
from engine.scheduling.step import UNKNOWN_TOKEN, Chunk, StepPlan, StepResult
from tests.unit.engine.rigs.fake_paged_runner import VOCAB_SIZE, FakePagedRunner
from tests.unit.engine.rigs.scheduler_bench import HandOff, SchedulerBench


class Stream:
    """The launched plans in order; each step is fed with the tokens of the step before it. `redraws` is called for each
    token that may have been fed, and returns whether another token was drawn.
    """

    def __init__(self, runner: FakePagedRunner, redraws: Callable[[], bool] = lambda: False) -> None:
        self._runner = runner
        self._redraws = redraws
        self._redrawn: tuple[int, ...] = ()
        self._waiting: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()
        self._newest: tuple[int, ...] = ()

    def launch(self, plan: StepPlan) -> None:
        self._waiting.append(plan)

    def compute(self, num_steps: int) -> None:
        for _ in range(min(num_steps, len(self._waiting))):
            plan = self._waiting.popleft()
            self._runner.run(replace(plan, chunks=()))  # what it moves
            for chunk in plan.chunks:
                self._empty_what_it_begins(chunk)
            result = self._runner.run(StepPlan(tuple(map(self._fed, plan.chunks))))
            misfed = [chunk for chunk in plan.chunks if chunk.fed_by in self._redrawn]
            tokens = tuple(
                () if chunk in misfed else drawn for chunk, drawn in zip(plan.chunks, result.tokens, strict=True)
            )
            for chunk in misfed:
                block_id, place = chunk.block_ids[chunk.start // self._size], chunk.start % self._size
                self._runner.written[block_id][place] = None
            newest = [token.token_id for drawn in result.tokens for token in drawn]
            self._redrawn = () if misfed else tuple(i for i in range(len(newest)) if self._redraws())
            self._newest = tuple(VOCAB_SIZE if i in self._redrawn else token for i, token in enumerate(newest))
            self._results.append(replace(result, tokens=tokens, redrawn=self._redrawn))

    def result(self) -> StepResult:
        if not self._results:
            self.compute(1)
        return self._results.popleft()

    def _empty_what_it_begins(self, chunk: Chunk) -> None:
        """Clear the block that the chunk begins, as a ModelRunner zeroes it."""
        begun = chunk.end // self._size
        if chunk.end > begun * self._size >= chunk.start:
            self._runner.written[chunk.block_ids[begun]] = [None] * self._size

    @property
    def _size(self) -> int:
        return len(self._runner.written[0])

    def _fed(self, chunk: Chunk) -> Chunk:
        if chunk.fed_by is None:
            assert UNKNOWN_TOKEN not in chunk.token_ids
            return chunk
        assert chunk.token_ids == (UNKNOWN_TOKEN,)
        return replace(chunk, token_ids=(self._newest[chunk.fed_by],))


@dataclass
class AheadBench(SchedulerBench):
    """At each step `may_go_ahead` decides whether another step is planned behind it, and `computes` how many of the
    launched steps the device computes before a result is read. `redraws` is passed to the Stream.
    """

    may_go_ahead: Callable[[], bool] = lambda: True
    computes: Callable[[], int] = lambda: 0
    redraws: Callable[[], bool] = lambda: False
    plans_ahead: int = 0
    applied_under_way: int = 0
    flying: deque[StepPlan] = field(default_factory=deque)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stream = Stream(self.runner, lambda: self.redraws())

    def apply(self, command: Command) -> None:
        if self.flying and not self.scheduler.may_apply(command):
            self.settle()
        self.applied_under_way += bool(self.flying)
        super().apply(command)
        self.scheduler.check()

    def cancel(self, handles: Iterable[int]) -> None:
        self.settle_if_all_waits()
        super().cancel(handles)

    def release_export(self, ticket_id: bytes) -> None:
        self.settle_if_all_waits()
        super().release_export(ticket_id)

    def discard(self, handoff: HandOff, quarantined: Iterable[int] = ()) -> None:
        self.settle_if_all_waits()
        super().discard(handoff, quarantined)

    def finish(self, handoff: HandOff, *, is_verified: bool = True) -> None:
        """Write the KV of a hand-off in whole blocks, with zeros after its last token."""
        assert handoff.block_ids is not None
        for block_id in handoff.block_ids[handoff.num_cached :]:
            self.runner.written[block_id] = [None] * self.limits.block_size
        super().finish(handoff, is_verified=is_verified)

    def read(self, frozen: Frozen) -> None:
        super().read(frozen)
        if frozen.tail is not None:
            rest = self.runner.written[frozen.tail.block_id][frozen.tail.num_valid :]
            assert rest == [None] * len(rest), "something lies behind the last token that is offered"

    def step(self, error: Exception | None = None) -> StepPlan | None:
        """Run until one more step has ended; the next step may then be in flight. With an error, that step raises it,
        and a step launched after it is computed.
        """
        if not self.flying:
            self._take_in(self.scheduler.reap(self.now_s)[0])
            plan = self._plan()
            if plan is None:
                self.scheduler.check()
                return None
            self._launch(plan)
        plan = self.flying[0]
        if self.scheduler.may_plan_ahead and self.may_go_ahead():
            self._go_ahead()
        self._end(error)
        if error is not None:
            self.settle()
        return plan

    def settle(self) -> None:
        """Run until no step is in flight."""
        while self.flying:
            self._end(None)

    def inspect(self) -> Inspected:
        self.settle()
        return super().inspect()

    def _take_in(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, Started):
                assert not any(self.choices[handle].ended for handle in event.handles), "started after its end"
        super()._take_in(events)

    def settle_if_all_waits(self) -> None:
        """If a command waits for the end of a step, report the step's events before the command is applied."""
        if not self.scheduler.may_plan_ahead:
            self.settle()

    def _go_ahead(self) -> None:
        self._take_in(self.scheduler.reap(self.now_s)[0])
        events, plan = self.scheduler.plan_ahead(self.now_s)
        self._take_in(events)
        if plan is not None:
            assert not plan.copies and not plan.swaps_in and not plan.swaps_out
            self.plans_ahead += 1
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        self.flying.append(plan)
        self.stream.launch(plan)
        self.stream.compute(self.computes())

    def _end(self, error: Exception | None) -> None:
        self.steps += 1
        plan = self.flying.popleft()
        result = self.stream.result()
        if error is None:
            self._take_in(self.scheduler.complete(plan, result, self.now_s))
        else:
            self._take_in(self.scheduler.fail(plan, error, self.now_s))
        self.scheduler.check()
        self.check_leased()
