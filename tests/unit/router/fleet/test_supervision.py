"""Supervision: a worker that is registered always has a task that connects to it again."""

import asyncio

import grpc

from cluster.member import Member
from cluster.messages import MemberId
from cluster.serving.serving import open_channel
from router.fleet.supervision import Supervisors
from tests.system.rigs.members.scripted_workers import ScriptedPrefill, Store

_DEADLINE_S = 10.0


class _Served:
    """Fail `num_failures` times, then serve until the test sets `lost`."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_failures = num_failures
        self.begun: asyncio.Queue[MemberId] = asyncio.Queue()
        self.lost = asyncio.Event()

    async def serve(self, member: Member, channel: grpc.aio.Channel) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("our own fault")
        self.begun.put_nowait(member.id)
        await self.lost.wait()


async def test_an_internal_error_costs_a_pause_and_does_not_lose_the_worker() -> None:
    async with ScriptedPrefill("p0", Store()) as worker:
        served = _Served(num_failures=3)
        supervisors = Supervisors(connect=open_channel, is_wanted=lambda _: True, pause_s=0.001)
        supervisors.supervise(worker.member, served.serve)
        try:
            assert await asyncio.wait_for(served.begun.get(), _DEADLINE_S) == worker.id
            assert served.num_failures == 0
            assert list(supervisors) == [worker.id]
        finally:
            await supervisors.close()


async def test_a_worker_that_registers_while_its_supervisor_ends_gets_a_new_supervisor() -> None:
    async with ScriptedPrefill("p0", Store()) as worker:
        served, answers = _Served(), iter([True, False, True, True])  # wanted; not any more; and just then again
        supervisors = Supervisors(connect=open_channel, is_wanted=lambda _: next(answers, True), pause_s=0.001)
        supervisors.supervise(worker.member, served.serve)
        try:
            await asyncio.wait_for(served.begun.get(), _DEADLINE_S)
            served.lost.set()
            await asyncio.wait_for(served.begun.get(), _DEADLINE_S)
        finally:
            await supervisors.close()


async def test_closing_ends_every_task_permanently() -> None:
    async with ScriptedPrefill("p0", Store()) as worker:
        served = _Served()
        supervisors = Supervisors(connect=open_channel, is_wanted=lambda _: True, pause_s=0.001)
        supervisors.supervise(worker.member, served.serve)
        await asyncio.wait_for(served.begun.get(), _DEADLINE_S)
        await supervisors.close()
        assert worker.id not in supervisors
        assert served.begun.empty()
