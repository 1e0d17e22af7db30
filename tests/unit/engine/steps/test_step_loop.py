"""The thread that drives a scheduler: answers from any thread, survives a failing step, stops on a broken invariant."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from cluster.clock import ManualClock, MonotonicClock
from cluster.errors import DeadlineExceeded, Unavailable
from cluster.messages import MemberId, PrefillJob, Sampling, TokenStops
from cluster.protocol.hashing import nameless_chains
from engine.scheduling.cache_commands import AwaitCacheEvents
from engine.scheduling.commands import (
    AdmitExport,
    CancelExport,
    Command,
    Event,
    ExportFailed,
    ExportFinished,
    Inspect,
    Inspected,
    Release,
    Sealed,
)
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import StepPlan, StepResult
from engine.steps.step_loop import StepLoop
from engine.steps.step_profile import StepWatch
from tests.unit.engine.rigs.fake_paged_runner import FakePagedRunner

_DEADLINE_S = 20.0


class _CountingScheduler(SequenceScheduler):
    """Breaks an invariant on demand, and counts the loop's turns."""

    turns = 0
    broken = False

    def reap(self, now_s: float) -> tuple[tuple[Event, ...], float | None]:
        self.turns += 1
        assert not self.broken, "a block is lost"
        return super().reap(now_s)


class _HeldRunner(FakePagedRunner):
    """A runner that waits for the test's permission before a step, and fails steps for which the test queued an
    error.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.entered = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()
        self.errors: SimpleQueue[Exception] = SimpleQueue()
        self._on_written: Callable[[], None] = lambda: None

    def hold_written(self, on_written: Callable[[], None]) -> threading.Event:
        """Call `on_written` when a step has written, and hold the step until the returned event is set."""
        may_end = threading.Event()

        def written() -> None:
            on_written()
            assert may_end.wait(_DEADLINE_S)

        self._on_written = written
        return may_end

    def run(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.may_go.wait(_DEADLINE_S)
        if not self.errors.empty():
            raise self.errors.get()
        result = super().run(plan)
        self._on_written()
        return result


class _Bench:
    def __init__(self, clock: ManualClock | MonotonicClock) -> None:
        self.scheduler = _CountingScheduler(
            SchedulerLimits(
                num_blocks=8, block_size=4, max_model_len=1 << 20, max_prefill_tokens=8, max_num_seqs=4, max_queue=9
            ),
            new_chain=nameless_chains(),
        )
        self.runner = _HeldRunner(8, 4)
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.step_errors: list[Exception] = []
        self.fatal: SimpleQueue[Exception] = SimpleQueue()
        self.timed: list[tuple[StepPlan, float]] = []
        self.loop: StepLoop[Command, Event] = StepLoop(
            self.scheduler,
            self.runner,
            clock,
            self._emit,
            on_error=self.step_errors.append,
            on_fatal=self.fatal.put,
            on_timed=lambda plan, time: self.timed.append((plan, time.seconds)),
        )
        self.loop.start()

    def _emit(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.events.put(event)

    def submit(self, ticket_id: bytes, num_tokens: int, *, imported: bool = True, timeout_s: float = 1e6) -> None:
        importer = MemberId("decode", "1") if imported else None
        token_ids = tuple(range(1, num_tokens + 1))
        job = PrefillJob("request", 0, token_ids, Sampling(), TokenStops(9), (7,), 0, importer, timeout_s)
        self.loop.post(AdmitExport(ticket_id, job))

    def until(self, kind: type[Event]) -> Event:
        while not isinstance(event := self.events.get(timeout=_DEADLINE_S), kind):
            pass
        return event

    def inspect(self) -> Inspected:
        self.loop.post(Inspect(1))
        inspected = self.until(Inspected)
        assert isinstance(inspected, Inspected)
        return inspected


@pytest.fixture
def bench() -> Iterator[_Bench]:
    bench = _Bench(MonotonicClock())
    yield bench
    bench.runner.may_go.set()
    assert bench.loop.stop(_DEADLINE_S)


def test_a_command_becomes_steps_and_steps_become_events(bench: _Bench) -> None:
    bench.submit(b"1", 18)

    finished = bench.until(ExportFinished)

    assert isinstance(finished, ExportFinished) and finished.ticket_id == b"1"
    assert bench.inspect().blocks["leased"] == 5
    bench.loop.post(Release(b"1"))
    assert bench.inspect().blocks["free"] == 8
    assert bench.loop.progress.steps == 3


def test_an_idle_loop_wakes_only_for_a_command(bench: _Bench) -> None:
    for _ in range(50):
        bench.inspect()

    assert bench.scheduler.turns <= 51


def test_every_command_of_every_thread_is_answered(bench: _Bench) -> None:
    def ask(first: int) -> None:
        for inspection_id in range(first, first + 100):
            bench.loop.post(Inspect(inspection_id))

    threads = [threading.Thread(target=ask, args=(100 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()

    answers = [bench.until(Inspected) for _ in range(800)]

    for thread in threads:
        thread.join(_DEADLINE_S)
    assert {event.inspection_id for event in answers if isinstance(event, Inspected)} == set(range(800))


def test_a_cancel_during_a_step_takes_effect_before_the_next(bench: _Bench) -> None:
    bench.runner.may_go.clear()
    bench.submit(b"1", 32)
    assert bench.runner.entered.wait(_DEADLINE_S)
    assert bench.loop.progress.busy_since_s is not None

    bench.loop.post(CancelExport(b"1"))
    bench.runner.may_go.set()

    assert isinstance(bench.until(ExportFailed), ExportFailed)
    assert bench.inspect().blocks == {"quarantined": 0, "leased": 2, "held": 0, "cached": 0, "free": 6}
    assert len(bench.runner.plans) == 1


def test_every_step_that_succeeds_is_timed_without_the_wait_before_it(bench: _Bench) -> None:
    bench.runner.errors.put(RuntimeError("the device is gone"))
    bench.submit(b"1", 3)
    bench.until(ExportFailed)
    assert bench.timed == []

    bench.inspect()  # nothing to compute
    idle_until_s = MonotonicClock().now_s()
    bench.submit(b"2", 18)
    bench.until(ExportFinished)
    bench.inspect()

    assert [plan for plan, _ in bench.timed] == bench.runner.plans
    assert all(seconds > 0 for _, seconds in bench.timed)
    assert sum(seconds for _, seconds in bench.timed) <= MonotonicClock().now_s() - idle_until_s


def test_a_failing_step_is_reported_once_and_the_loop_continues(bench: _Bench) -> None:
    bench.runner.errors.put(RuntimeError("the device is gone"))
    bench.submit(b"1", 3)
    assert isinstance(failed := bench.until(ExportFailed), ExportFailed) and failed.ticket_id == b"1"

    bench.submit(b"2", 3)

    assert isinstance(bench.until(ExportFinished), ExportFinished)
    assert [str(error) for error in bench.step_errors] == ["the device is gone"]
    assert bench.fatal.empty()


def test_blocks_are_announced_while_their_step_still_computes(bench: _Bench) -> None:
    held = bench.runner.hold_written(bench.loop.written)
    bench.submit(b"1", 6)

    assert isinstance(sealed := bench.until(Sealed), Sealed) and len(sealed.block_ids) == 1
    assert bench.loop.progress.busy_since_s is not None
    held.set()
    assert isinstance(bench.until(ExportFinished), ExportFinished)


def test_an_error_of_the_scheduler_in_the_middle_of_a_step_ends_the_loop(bench: _Bench) -> None:
    def written(plan: StepPlan) -> tuple[Event, ...]:
        raise AssertionError("a block is lost")

    bench.scheduler.written = written  # type: ignore[method-assign]
    bench.runner.hold_written(bench.loop.written).set()
    bench.submit(b"1", 6)

    assert str(bench.fatal.get(timeout=_DEADLINE_S)) == "a block is lost"


def test_a_broken_invariant_ends_the_loop_and_is_reported(bench: _Bench) -> None:
    bench.scheduler.broken = True
    bench.submit(b"1", 3)

    assert "a block is lost" in str(bench.fatal.get(timeout=_DEADLINE_S))
    assert bench.loop.stop(_DEADLINE_S)
    assert not bench.loop.is_alive
    assert bench.step_errors == []


def test_a_deadline_wakes_a_waiting_loop(bench: _Bench) -> None:
    bench.submit(b"1", 32)
    bench.until(ExportFinished)
    bench.submit(b"2", 32, timeout_s=0.05)  # its blocks are leased to the first

    failed = bench.until(ExportFailed)

    assert isinstance(failed, ExportFailed) and isinstance(failed.error, DeadlineExceeded)
    assert bench.inspect().figures["waiting"] == 0


def test_stop_waits_for_the_running_step_up_to_its_timeout(bench: _Bench) -> None:
    bench.runner.may_go.clear()
    bench.submit(b"1", 32)
    assert bench.runner.entered.wait(_DEADLINE_S)

    assert not bench.loop.stop(timeout_s=0.01)
    bench.runner.may_go.set()

    assert bench.loop.stop(_DEADLINE_S)
    assert isinstance(bench.until(Sealed), Sealed)
    assert len(bench.runner.plans) == 1


def test_progress_reports_the_end_of_the_last_step() -> None:
    clock = ManualClock(5.0)
    bench = _Bench(clock)
    bench.runner.may_go.clear()
    bench.submit(b"1", 3, imported=False)
    assert bench.runner.entered.wait(_DEADLINE_S)
    assert (bench.loop.progress.last_step_s, bench.loop.progress.busy_since_s) == (5.0, 5.0)

    clock.advance(2.0)
    bench.runner.may_go.set()
    bench.inspect()

    assert bench.loop.stop(_DEADLINE_S)
    assert (bench.loop.progress.last_step_s, bench.loop.progress.busy_since_s) == (7.0, None)


async def test_a_caller_on_the_event_loop_gets_the_step_threads_answer(bench: _Bench) -> None:
    asking = asyncio.create_task(bench.loop.ask(Inspect(7)))
    event = await asyncio.to_thread(bench.events.get, timeout=_DEADLINE_S)
    assert bench.loop.settle((event,)) == ()
    assert (await asking).inspection_id == 7


@pytest.mark.parametrize("breaks", [True, False])
async def test_the_end_of_the_step_thread_fails_a_waiting_caller(bench: _Bench, breaks: bool) -> None:
    bench.runner.may_go.clear()
    bench.submit(b"1", 6)
    assert await asyncio.to_thread(bench.runner.entered.wait, _DEADLINE_S)
    asking = asyncio.create_task(bench.loop.ask(AwaitCacheEvents(1, 10**6)))
    await asyncio.sleep(0)
    bench.scheduler.broken = breaks  # an invariant, at the turn after this step
    if not breaks:
        stopping = asyncio.create_task(asyncio.to_thread(bench.loop.stop, _DEADLINE_S))
    bench.runner.may_go.set()
    with pytest.raises(Unavailable, match="step thread has ended"):
        async with asyncio.timeout(_DEADLINE_S):
            await asking
    assert breaks or await stopping


def test_a_watch_is_entered_around_the_steps_until_it_ends(bench: _Bench) -> None:
    around: list[StepPlan] = []

    @contextmanager
    def seen(plan: StepPlan) -> Iterator[None]:
        around.append(plan)
        yield

    watch = StepWatch(2, seen)
    bench.loop.watch(watch)
    bench.submit(b"1", 18)
    bench.until(ExportFinished)
    assert watch.ended.wait(_DEADLINE_S)
    assert watch.num_ended == 2
    bench.inspect()  # the step has ended for the loop too
    assert {id(plan) for plan in around} == {id(plan) for plan in bench.runner.plans}

    bench.loop.watch(None)
    num_watched, num_timed = len(around), len(bench.timed)
    bench.submit(b"2", 3)
    bench.until(ExportFinished)
    bench.inspect()
    assert len(around) == num_watched
    assert len(bench.timed) == num_timed + 1
