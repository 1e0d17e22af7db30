"""Tests when a decode worker reports the work of other routers to a router."""

from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from itertools import pairwise
from random import Random

import pytest

from cluster.messages import MemberId
from cluster.outstanding_work import OthersWork, PromptWork, SequenceOutlook
from decode_worker.streams import MIN_INTERVAL_S, RouterStream, RouterStreams, WorkReports
from tests.chaos.simulated.machine.loop import SimulatedLoop

A, B, C = (MemberId(f"router-{number}", "1") for number in range(3))


class _Worker:
    """A worker that reports on a simulated loop. It records the reports that each router received, with their times."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.streams = RouterStreams(grace_s=60.0, on_gone=lambda _: None)
        self.reports = WorkReports(self.streams)
        self.received: dict[MemberId, list[tuple[float, int]]] = {}  # by router: the time, tokens of others' prompts
        self._key = 0

    def connect(self, router: MemberId) -> None:
        connection, self.received[router] = object(), []
        stream = self.streams.connect(router, connection)
        self.reports.send_to([router])
        self.loop.create_task(self._read(router, stream, connection))

    async def _read(self, router: MemberId, stream: RouterStream, connection: object) -> None:
        async for message in stream.drain(connection):
            self.received[router].append((round(self.loop.time(), 6), message.others.prompt_tokens))

    def add_prompt(self, router: MemberId, num_tokens: int) -> int:
        self._key += 1
        work = PromptWork.of(num_tokens, 0)
        self.reports.outstanding.add_export(self._key, router, work, 1, self.loop.time())
        return self._key


def _run(scenario: Callable[[_Worker], Coroutine[None, None, None]]) -> _Worker:
    loop = SimulatedLoop(Random(1))
    with ExitStack() as stack:
        stack.callback(loop.close)
        workers: list[_Worker] = []

        async def run() -> None:
            workers.append(_Worker(loop))
            await scenario(workers[0])
            workers[0].streams.close()
            workers[0].reports.close()

        loop.world.context.copy().run(loop.run_until_complete, run())
        return workers[0]


async def _pass(worker: _Worker, seconds: float) -> None:
    until = worker.loop.create_future()
    worker.loop.call_later(seconds, until.set_result, None)
    await until


def test_a_router_that_connects_gets_a_report_at_once() -> None:
    async def scenario(worker: _Worker) -> None:
        worker.add_prompt(A, 700)
        await _pass(worker, 3.0)
        worker.connect(B)
        await _pass(worker, 0.001)

    assert _run(scenario).received == {B: [(3.0, 700)]}


def test_a_change_is_reported_at_once_to_the_other_routers_only() -> None:
    async def scenario(worker: _Worker) -> None:
        for router in (A, B, C):
            worker.connect(router)
        await _pass(worker, 2.0)
        worker.add_prompt(A, 700)
        await _pass(worker, 1.0)

    received = _run(scenario).received
    assert received == {A: [(0.0, 0)], B: [(0.0, 0), (2.0, 700)], C: [(0.0, 0), (2.0, 700)]}


def test_changes_within_the_interval_are_one_report() -> None:
    async def scenario(worker: _Worker) -> None:
        worker.connect(B)
        for _ in range(100):
            worker.add_prompt(A, 10)
            await _pass(worker, MIN_INTERVAL_S / 50)
        await _pass(worker, 1.0)

    times_s, tokens = zip(*_run(scenario).received[B], strict=True)
    assert times_s == pytest.approx([0.0, 0.0, MIN_INTERVAL_S, 2 * MIN_INTERVAL_S], abs=MIN_INTERVAL_S / 50)
    assert tokens[0] == 0 and tokens[-1] == 1000


def test_a_single_router_gets_no_report_of_its_own_work() -> None:
    async def scenario(worker: _Worker) -> None:
        worker.connect(A)
        for number in range(50):
            key = worker.add_prompt(A, 10)
            worker.reports.outstanding.add_sequences(A, {number: SequenceOutlook(9, 5, 5.0)}, None, worker.loop.time())
            await _pass(worker, 0.1)
            worker.reports.outstanding.remove_export(key, worker.loop.time())

    assert _run(scenario).received == {A: [(0.0, 0)]}


def test_expensive_reports_become_rare() -> None:
    """Each report takes 2 ms of the event loop, so there are at most five per second: 1 % of its time."""
    cost_s = 0.002

    async def scenario(worker: _Worker) -> None:
        worker.connect(B)
        make = worker.reports.outstanding.reports

        def make_slowly(routers: Iterable[MemberId], now_s: float) -> dict[MemberId, OthersWork]:
            worker.loop.spend(cost_s)
            return make(routers, now_s)

        worker.reports.outstanding.reports = make_slowly  # type: ignore[method-assign]
        for _ in range(1000):
            worker.add_prompt(A, 10)
            await _pass(worker, MIN_INTERVAL_S / 50)
        await _pass(worker, 1.0)

    times_s = [time_s for time_s, _ in _run(scenario).received[B]][1:]
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert len(gaps_s) >= 4 and gaps_s == pytest.approx([100 * cost_s] * len(gaps_s), rel=0.02)
