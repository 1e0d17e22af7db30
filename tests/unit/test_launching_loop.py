"""The step loop over a device that computes asynchronously: the work between a step's launch and its result."""

import threading

from cluster.clock import MonotonicClock
from cluster.messages import MemberId, PrefillJob, Sampling, TokenStops
from cluster.protocol.hashing import nameless_chains
from engine.scheduling.commands import AdmitExport, Command, Event, ExportFailed, ExportFinished
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import StepPlan, StepResult
from engine.steps.step_loop import StepLoop
from tests.unit.fake_paged_runner import FakePagedRunner

_DEADLINE_S = 20.0


class _Launched:
    def __init__(self, device: "_Device", plan: StepPlan) -> None:
        self._device, self._plan = device, plan

    def result(self) -> StepResult:
        self._device.log.append("result")
        return self._device.run(self._plan)


class _Device(FakePagedRunner):
    """A device that computes when its result is read; it fails the launches that the test asks for."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(8, 4)
        self.log = log
        self.failing = 0

    def launch(self, plan: StepPlan) -> _Launched:
        self.log.append("launch")
        if self.failing:
            self.failing -= 1
            raise RuntimeError("no memory")
        return _Launched(self, plan)


class _Bench:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.device = _Device(self.log)
        self.errors: list[Exception] = []
        self.fatal: list[Exception] = []
        self.ended = threading.Event()
        scheduler = SequenceScheduler(
            SchedulerLimits(
                num_blocks=8, block_size=4, max_model_len=1 << 20, max_prefill_tokens=8, max_num_seqs=4, max_queue=9
            ),
            new_chain=nameless_chains(),
        )
        self.loop: StepLoop[Command, Event] = StepLoop(
            scheduler,
            self.device,
            MonotonicClock(),
            self._emit,
            on_error=self.errors.append,
            on_fatal=self.fatal.append,
        )

    def _emit(self, events: tuple[Event, ...]) -> None:
        self.log += [type(event).__name__ for event in events]
        if any(isinstance(event, ExportFinished | ExportFailed) for event in events):
            self.ended.set()

    def prefill(self, num_tokens: int) -> None:
        """Submit a prompt and wait until it has ended or failed."""
        self.ended.clear()
        tokens = tuple(range(1, num_tokens + 1))
        job = PrefillJob("request", 0, tokens, Sampling(), TokenStops(9), (7,), 0, MemberId("decode", "1"), 1e6)
        self.loop.post(AdmitExport(bytes([num_tokens]), job))
        if self.loop.progress.steps == 0 and not self.loop.is_alive:
            self.loop.start()
        assert self.ended.wait(_DEADLINE_S)


def test_a_steps_events_are_sent_after_the_launch_of_the_next_step() -> None:
    bench = _Bench()
    bench.prefill(24)
    assert bench.loop.stop(_DEADLINE_S)

    steps = [what for what in bench.log if what in ("launch", "result", "Sealed", "ExportFinished")]
    assert steps[:7] == ["launch", "result", "launch", "Sealed", "result", "launch", "Sealed"]
    assert steps[-3:] == ["result", "Sealed", "ExportFinished"]
    assert not bench.errors and not bench.fatal


def test_a_launch_that_raises_ends_its_sequences_and_the_loop_continues() -> None:
    bench = _Bench()
    bench.device.failing = 1
    bench.prefill(3)
    bench.prefill(5)
    assert bench.loop.stop(_DEADLINE_S)

    assert [str(error) for error in bench.errors] == ["no memory"]
    assert "ExportFailed" in bench.log and bench.log[-1] == "ExportFinished"
    assert not bench.fatal
