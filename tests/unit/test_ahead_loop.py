"""The step loop over a device whose tokens feed its next step: the cases in which it launches the next step early."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from cluster.clock import ManualClock, MonotonicClock
from cluster.messages import DecodeJob, Sampling, SequenceStart, TokenStops
from cluster.protocol.hashing import nameless_chains
from engine.scheduling.commands import (
    AdmitLocal,
    CancelSequences,
    Command,
    Event,
    Failed,
    Freeze,
    Frozen,
    Inspect,
    Inspected,
    StepTokens,
)
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import StepPlan, StepResult
from engine.steps.step_loop import StepLoop
from tests.unit.ahead_bench import Stream
from tests.unit.export_bench import limits
from tests.unit.fake_paged_runner import FakePagedRunner
from tests.unit.scheduler_bench import ROUTER

_DEADLINE_S = 20.0


class _Launched:
    def __init__(self, device: "_Device", *, can_feed: bool) -> None:
        self.can_feed = can_feed
        self._device = device

    def result(self) -> StepResult:
        return self._device.result()


class _Device(FakePagedRunner):
    """A device that computes when its result is read. `before_result` is called first, with the number of earlier
    results.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.stream = Stream(self)
        self.log: list[str] = []
        self.can_feed = True
        self.failing_launches: set[int] = set()
        self.failing_results: set[int] = set()
        self.before_result: Callable[[int], None] = lambda number: None
        self._num_launched = self._num_read = 0

    def launch(self, plan: StepPlan) -> _Launched:
        self.log.append("launch")
        self._num_launched += 1
        if self._num_launched - 1 in self.failing_launches:
            raise RuntimeError("no memory")
        self.stream.launch(plan)
        return _Launched(self, can_feed=self.can_feed)

    def result(self) -> StepResult:
        number, self._num_read = self._num_read, self._num_read + 1
        self.before_result(number)
        self.log.append("result")
        result = self.stream.result()
        if number in self.failing_results:
            raise RuntimeError("the device is gone")
        return result


class _Bench:
    def __init__(self, clock: ManualClock | MonotonicClock | None = None) -> None:
        self.device = _Device(64, 4)
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.tokens: dict[int, list[int]] = {}
        self.errors: list[str] = []
        self.fatal: list[Exception] = []
        self.loop: StepLoop[Command, Event] = StepLoop(
            SequenceScheduler(limits(), new_chain=nameless_chains()),
            self.device,
            clock or MonotonicClock(),
            self._emit,
            on_error=lambda error: self.errors.append(str(error)),
            on_fatal=self.fatal.append,
        )

    def _emit(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.device.log.append(type(event).__name__)
            for told in event.tokens if isinstance(event, StepTokens) else ():
                self.tokens.setdefault(told.handle, []).append(told.token.token_id)
            self.events.put(event)

    def admit(self, handle: int, max_tokens: int, stops: frozenset[int] = frozenset()) -> None:
        stop = TokenStops(max_tokens, 0, stops)
        self.loop.post(
            AdmitLocal(DecodeJob("r", 0, ROUTER, (1, 2, 3), Sampling(), stop, (SequenceStart(handle, 7),), None, 1e6))
        )

    def until(self, kind: type[Event]) -> Event:
        while not isinstance(event := self.events.get(timeout=_DEADLINE_S), kind):
            pass
        return event

    def idle(self) -> Inspected:
        """Wait until every sequence has ended, and return an inspection."""
        while True:
            self.loop.post(Inspect(1))
            inspected = self.until(Inspected)
            assert isinstance(inspected, Inspected) and inspected.violation == ""
            if not inspected.figures["running"] and not inspected.blocks["held"]:
                return inspected

    def end(self) -> None:
        assert self.loop.stop(_DEADLINE_S)
        assert not self.fatal

    def steps(self) -> list[str]:
        return [what for what in self.device.log if what in ("launch", "result")]


def test_the_next_step_is_launched_before_the_result_of_the_last_is_read() -> None:
    bench = _Bench()
    bench.admit(1, max_tokens=4)
    bench.loop.start()
    bench.idle()
    bench.end()

    # The prompt's step and three tokens: every end but the last has the next one behind it.
    assert bench.steps() == ["launch", "launch", "result", "launch", "result", "launch", "result", "result"]
    assert len(bench.tokens[1]) == 4


def test_launching_ahead_gives_the_same_tokens_in_the_same_order() -> None:
    told = []
    for can_feed in (True, False):
        bench = _Bench()
        bench.device.can_feed = can_feed
        for handle, max_tokens in ((1, 9), (2, 5), (3, 12)):
            bench.admit(handle, max_tokens, frozenset({handle, 11, 13}))
        bench.loop.start()
        bench.idle()
        bench.end()
        told.append(bench.tokens)
        assert ("launch", "launch") in zip(bench.steps(), bench.steps()[1:], strict=False) or not can_feed
    assert told[0] == told[1]


def test_a_runner_that_computes_at_once_is_never_launched_ahead() -> None:
    bench = _Bench()
    bench.device.can_feed = False
    bench.admit(1, max_tokens=4)
    bench.loop.start()
    bench.idle()
    bench.end()
    assert bench.steps() == ["launch", "result"] * 4


def test_a_cancel_during_a_step_frees_the_blocks_after_the_step() -> None:
    bench = _Bench()
    bench.device.before_result = lambda number: (
        bench.loop.post(CancelSequences(ROUTER, frozenset({1}))) if number == 2 else None
    )
    bench.admit(1, max_tokens=50)
    bench.loop.start()
    assert bench.idle().blocks["free"] == 64
    bench.end()
    assert len(bench.tokens[1]) < 6


def test_a_sequence_freezes_after_all_launched_steps_have_ended() -> None:
    bench = _Bench()
    bench.device.before_result = lambda number: bench.loop.post(Freeze(b"t", ROUTER, 1)) if number == 2 else None
    bench.admit(1, max_tokens=50)
    bench.loop.start()
    frozen = bench.until(Frozen)
    assert isinstance(frozen, Frozen)
    assert [*frozen.token_ids[3:], frozen.last_token_id] == bench.tokens[1]
    bench.loop.post(CancelSequences(ROUTER, frozenset({1})))
    bench.end()
    assert bench.device.log.count("launch") == bench.device.log.count("result")


def test_commands_behind_a_waiting_command_keep_their_order() -> None:
    bench = _Bench()

    def post(number: int) -> None:
        if number == 1:
            bench.loop.post(Freeze(b"t", ROUTER, 1))
            bench.loop.post(Inspect(5))

    bench.device.before_result = post
    bench.admit(1, max_tokens=50)
    bench.loop.start()
    bench.until(Inspected)
    bench.end()
    assert bench.device.log.index("Frozen") < bench.device.log.index("Inspected")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_step_with_another_in_flight_ends_only_its_own_sequences(failing: int) -> None:
    bench = _Bench()
    bench.device.failing_results = {failing}
    bench.admit(1, max_tokens=6)
    bench.loop.start()
    assert isinstance(failed := bench.until(Failed), Failed) and failed.handles == (1,)
    bench.admit(2, max_tokens=6)
    assert bench.idle().blocks["free"] == 64
    bench.end()

    assert bench.errors == ["the device is gone"]
    assert len(bench.tokens.get(1, [])) == failing and len(bench.tokens[2]) == 6


def test_a_failed_launch_is_reported_after_the_result_of_the_earlier_step() -> None:
    bench = _Bench()
    bench.device.failing_launches = {2}
    bench.admit(1, max_tokens=6)
    bench.loop.start()
    bench.until(Failed)
    assert bench.idle().blocks["free"] == 64
    bench.end()

    assert bench.errors == ["no memory"]
    assert len(bench.tokens[1]) == 2
    assert [what for what in bench.device.log if what in ("Started", "StepTokens", "Failed")] == [
        "Started",
        "StepTokens",
        "StepTokens",
        "Failed",
    ]


def test_stop_waits_for_both_steps_in_flight_and_launches_no_other() -> None:
    bench = _Bench()
    entered, may_go = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        if number == 3:
            entered.set()
            assert may_go.wait(_DEADLINE_S)

    bench.device.before_result = hold
    bench.admit(1, max_tokens=50)
    bench.loop.start()
    assert entered.wait(_DEADLINE_S)
    assert not bench.loop.stop(0.0)
    may_go.set()
    bench.end()
    assert bench.steps().count("launch") == bench.steps().count("result") == 5
    assert len(bench.tokens[1]) == 5


def test_progress_reports_the_running_step_from_the_end_of_the_earlier_step() -> None:
    clock = ManualClock(5.0)
    bench = _Bench(clock)
    seen = []

    def look(number: int) -> None:
        progress = bench.loop.progress
        plan = progress.plan
        assert plan is not None
        seen.append((progress.steps, progress.busy_since_s, plan.chunks[0].start))
        clock.advance(1.0)

    bench.device.before_result = look
    bench.admit(1, max_tokens=4)
    bench.loop.start()
    bench.idle()
    bench.end()
    assert seen == [(0, 5.0, 0), (1, 6.0, 3), (2, 7.0, 4), (3, 8.0, 5)]
    assert (bench.loop.progress.steps, bench.loop.progress.busy_since_s) == (4, None)
    assert bench.loop.progress.longest_step_s == 1.0
