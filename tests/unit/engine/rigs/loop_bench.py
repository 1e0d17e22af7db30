"""A step loop over a device that computes when its result is read: the calls and events in their order."""

from collections.abc import Callable
from queue import SimpleQueue

from cluster.clock import ManualClock, MonotonicClock
from cluster.messages import DecodeJob, Sampling, SequenceStart, TokenStops
from cluster.protocol.hashing import nameless_chains
from engine.scheduling.commands import AdmitExport, AdmitLocal, Command, Event, Inspect, Inspected, StepTokens
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import StepPlan, StepResult
from engine.steps.step_loop import StepLoop
from tests.unit.engine.rigs.ahead_bench import Stream
from tests.unit.engine.rigs.export_bench import export_job, limits
from tests.unit.engine.rigs.fake_paged_runner import FakePagedRunner
from tests.unit.engine.rigs.scheduler_bench import ROUTER

DEADLINE_S = 20.0


class _Launched:
    def __init__(self, device: "Device", *, can_feed: bool) -> None:
        self.can_feed = can_feed
        self._device = device

    def result(self) -> StepResult:
        return self._device.result()


class Device(FakePagedRunner):
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


class LoopBench:
    """A step loop over a Device. `tokens` has the tokens of each sequence decoded here, by handle."""

    def __init__(self, clock: ManualClock | MonotonicClock | None = None) -> None:
        self.device = Device(64, 4)
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

    def export(self, num_tokens: int) -> None:
        """Compute a prompt of this many tokens for a worker that imports its KV."""
        self.loop.post(AdmitExport(bytes([num_tokens]), export_job(range(1, num_tokens + 1))))

    def until(self, kind: type[Event]) -> Event:
        while not isinstance(event := self.events.get(timeout=DEADLINE_S), kind):
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
        assert self.loop.stop(DEADLINE_S)
        assert not self.fatal

    def steps(self) -> list[str]:
        return [what for what in self.device.log if what in ("launch", "result")]
