"""Canary generations over real schedulers and step threads: wrong tokens are found, and no request notices a canary."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cluster.clock import MonotonicClock
from cluster.messages import MemberId, PrefillJob, Sampling, TokenStops
from cluster.observe.stalls import StallLimits
from cluster.observe.telemetry import Telemetry
from cluster.protocol.hashing import nameless_chains
from cluster.serving.serving import GrpcServer
from engine.scheduling.commands import AdmitExport, Command, Event, ExportAccepted, ExportFinished, Inspect, Inspected
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import DrawnToken, StepPlan, StepResult
from engine.steps.step_loop import StepLoop
from tests.unit.engine.rigs.fake_paged_runner import VOCAB_SIZE, FakePagedRunner
from worker.health import Canaries, CanaryGeneration, CanaryJudge, CanaryOutcome, WorkerHealth

_DEADLINE_S = 30.0
_NUM_BLOCKS, _BLOCK_SIZE = 16, 16


class Device(FakePagedRunner):
    """The device computes correctly until a test makes it compute wrong tokens."""

    def __init__(self) -> None:
        super().__init__(_NUM_BLOCKS, _BLOCK_SIZE)
        self.num_wrong = 0  # steps from now on
        self.may_go = threading.Event()
        self.may_go.set()

    def run(self, plan: StepPlan) -> StepResult:
        assert self.may_go.wait(_DEADLINE_S)
        result = super().run(plan)
        if not self.num_wrong:
            return result
        self.num_wrong -= 1
        wrong = tuple(tuple(DrawnToken(token.token_id ^ 1) for token in drawn) for drawn in result.tokens)
        return replace(result, tokens=wrong)


class Bench:
    """An idle worker, as far as canaries see one."""

    def __init__(self, *, timeout_s: float = _DEADLINE_S) -> None:
        self.device, self.telemetry, clock = Device(), Telemetry(), MonotonicClock()
        self.told: list[Event] = []  # what is left for the service
        self.ended: list[Exception] = []
        self._loop = asyncio.get_running_loop()
        self._heard = asyncio.Event()
        self.steps: StepLoop[Command, Event] = StepLoop(
            _scheduler(), self.device, clock, self._emit, on_error=print, on_fatal=print
        )
        self._canary = CanaryGeneration(self.steps.post, vocab_size=VOCAB_SIZE, timeout_s=timeout_s)
        self.health = WorkerHealth(
            server=GrpcServer(service_names=[], telemetry=self.telemetry),
            steps=self.steps,
            limits=StallLimits(60.0, 60.0),
            clock=clock,
            telemetry=self.telemetry,
            end_work=self.ended.append,
        )
        self.canaries = Canaries(
            self._canary,
            interval_s=60.0,
            timeout_s=timeout_s,
            retry_s=60.0,
            progress=lambda: self.steps.progress,
            health=self.health,
            clock=clock,
            telemetry=self.telemetry,
        )
        self.steps.start()

    async def inspect(self) -> Inspected:
        self.steps.post(Inspect(1))
        async with asyncio.timeout(_DEADLINE_S):
            while not self.told or not isinstance(self.told[-1], Inspected):
                self._heard.clear()
                await self._heard.wait()
        inspected = self.told.pop()
        assert isinstance(inspected, Inspected)
        return inspected

    def close(self) -> None:
        self.device.may_go.set()
        assert self.steps.stop(_DEADLINE_S)

    def _emit(self, events: tuple[Event, ...]) -> None:
        self._loop.call_soon_threadsafe(self._take, events)

    def _take(self, events: tuple[Event, ...]) -> None:
        self.told += self._canary.take(events)
        self._heard.set()


def _scheduler() -> SequenceScheduler:
    limits = SchedulerLimits(
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        max_model_len=128,
        max_num_seqs=8,
        max_prefill_tokens=64,
        max_queue=8,
    )
    return SequenceScheduler(limits, new_chain=nameless_chains())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


async def test_a_canary_leaves_no_block_and_sends_no_event(bench: Bench) -> None:
    assert [await bench.canaries.fly() for _ in range(3)] == [CanaryOutcome.OK] * 3

    inspected = await bench.inspect()
    assert bench.told == []
    assert inspected.violation == ""
    assert inspected.blocks["free"] == _NUM_BLOCKS
    assert bench.telemetry.value("tandem_canaries_total", outcome="ok") == 3
    assert bench.health.problem == ""


async def test_wrong_canary_tokens_make_the_worker_unhealthy_until_they_are_right_again(
    bench: Bench,
) -> None:
    await bench.canaries.fly()

    bench.device.num_wrong = 1000
    assert await bench.canaries.fly() is CanaryOutcome.DIFFERS
    assert "other tokens" in bench.health.problem
    assert len(bench.ended) == 1, "what routers have here is ended once"
    bench.device.num_wrong = 0
    assert await bench.canaries.fly() is CanaryOutcome.OK
    assert bench.health.problem == ""


async def test_a_single_wrong_canary_is_repeated_before_the_worker_is_unhealthy(bench: Bench) -> None:
    await bench.canaries.fly()

    bench.device.num_wrong = 1

    assert await bench.canaries.fly() is CanaryOutcome.OK
    assert bench.telemetry.value("tandem_canaries_total", outcome="differs") == 1
    assert bench.ended == []


async def test_a_late_canary_makes_the_worker_unhealthy_and_leaves_no_block() -> None:
    bench = Bench(timeout_s=0.05)
    try:
        bench.device.may_go.clear()
        assert await bench.canaries.fly() is CanaryOutcome.LATE
        assert "in time" in bench.health.problem
        bench.device.may_go.set()
        assert (await bench.inspect()).blocks["free"] == _NUM_BLOCKS
        assert bench.told == []
    finally:
        bench.close()


async def test_a_canary_beside_an_export_is_not_judged_and_only_the_exports_events_are_sent() -> None:
    bench = Bench()
    try:
        bench.device.may_go.clear()
        flying = asyncio.create_task(bench.canaries.fly())
        job = PrefillJob("request", 0, (1, 2, 3), Sampling(), TokenStops(9), (7,), 0, MemberId("d", "1"), 60.0)
        bench.steps.post(AdmitExport(b"real", job))
        bench.device.may_go.set()
        assert await flying is CanaryOutcome.DISTURBED
        await bench.inspect()
        kinds = [type(event) for event in bench.told]
        assert kinds == [ExportAccepted, ExportFinished]
    finally:
        bench.close()


def test_a_canary_computed_beside_other_work_is_not_judged() -> None:
    judge = CanaryJudge()
    assert judge.judge((9, 9), was_alone=False) is CanaryOutcome.DISTURBED
    assert judge.judge((1, 2), was_alone=True) is CanaryOutcome.OK
    assert judge.judge((9, 9), was_alone=False) is CanaryOutcome.DISTURBED
    assert judge.judge(None, was_alone=False) is CanaryOutcome.DISTURBED
    assert judge.judge((1, 2), was_alone=True) is CanaryOutcome.OK
    assert judge.judge((1, 3), was_alone=True) is CanaryOutcome.DIFFERS
    assert judge.judge(None, was_alone=True) is CanaryOutcome.LATE
