"""When a worker is suspected, and when a health check clears it of a suspicion."""

import asyncio
import itertools
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest

from cluster.clock import ManualClock
from cluster.member import Member
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.outstanding_work import PromptWork
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes
from router.fleet import worker_health
from router.fleet.supervision import HealthCheck, WorkerTimeouts
from router.fleet.worker_health import WorkerHealth
from router.fleet.worker_stream import RouterSide
from router.policies.prediction.recent_prompts import NO_RECENT_PROMPTS


class _Worker(WorkerHealth):
    """A worker whose health checks wait for `answer`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self.num_changes = 0
        self._changed = asyncio.Event()
        monkeypatch.setattr(worker_health, "check_health", self._check)
        timeouts = WorkerTimeouts(heartbeat_timeout_s=100.0, recovery_timeout_s=100.0)
        super().__init__(
            Member(id=MemberId("p0", "1"), role=Role.PREFILL, address="127.0.0.1:1", model="m"),
            grpc.aio.insecure_channel("127.0.0.1:1"),
            RouterSide(MemberId("r0", "1"), timeouts, itertools.count(1), self._change, Telemetry(), ManualClock()),
            others=list,
        )

    @property
    def assigned(self) -> int:
        return 1

    async def asked(self) -> "asyncio.Future[None]":
        """Return the answer of the next health check, once it has begun."""
        return await self._asked.get()

    async def cleared(self) -> None:
        while not self.trusted:
            self._changed.clear()
            await self._changed.wait()

    def _change(self) -> None:
        self.num_changes += 1
        self._changed.set()

    async def _check(self, channel: grpc.aio.Channel, timeout_s: float) -> HealthCheck:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(answer)
        await answer
        return HealthCheck("")


async def test_a_worker_with_another_role_is_not_expected_to_get_the_prompts_of_its_former_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = ServiceTimes(PrefillTimes(0.0, 0.001, 0.0, 0.0), DecodeTimes(0.01, 0.0, 0.0, 0.0))
    worker = _Worker(monkeypatch)
    now_s = 1e6
    queued = worker.backlog.add_prompt(PromptWork.of(500, 0), now_s)
    worker.set_registered(worker.member)
    assert worker.backlog.recent(times, now_s).number == 1
    worker.set_registered(replace(worker.member, role=Role.DECODE))
    assert worker.backlog.recent(times, now_s) == NO_RECENT_PROMPTS
    assert worker.backlog.queue(now_s).work.num_new == 500, "what it got is still to be computed"
    worker.backlog.remove_prompt(queued, now_s + 0.5)
    assert worker.backlog.recent(times, now_s + 1.0) == NO_RECENT_PROMPTS


async def test_a_suspicion_is_a_change_at_once_and_further_failed_calls_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = _Worker(monkeypatch)
    worker.suspect()
    assert not worker.trusted and worker.num_changes == 1
    worker.suspect()
    assert worker.num_changes == 1
    running = asyncio.create_task(worker.run())
    (await worker.asked()).set_result(None)
    await worker.cleared()
    assert worker.num_changes == 2
    worker.suspect()
    assert worker.num_changes == 3, "a new suspicion is a change again"
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_the_answer_to_a_check_that_began_before_a_failure_does_not_clear_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = _Worker(monkeypatch)
    running = asyncio.create_task(worker.run())
    worker.suspect()
    early = await worker.asked()
    worker.suspect()  # another call has failed
    early.set_result(None)

    late = await worker.asked()
    assert not worker.trusted and worker.num_cleared == 0
    late.set_result(None)
    await worker.cleared()
    assert worker.trusted and worker.num_cleared == 1
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
