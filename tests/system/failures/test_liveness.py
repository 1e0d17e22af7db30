"""Tests that a worker whose step hangs reports it, that its requests continue elsewhere unchanged, and that it recovers
or exits.

A worker whose steps hang on order joins the shared cluster.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.observe.health import LIVENESS, READINESS
from cluster.process import ExitStatus
from cluster.protocol.report_wire import service_times_of
from tandem.enum_words import MEMBER_STATES
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.faults.control import FaultControl, Worker
from tests.faults.faulty_transport import Fault
from tests.polling import until
from tests.system.rigs.members.asking import Answer, ask, question
from tests.system.rigs.processes.local_cluster import LocalCluster, Member

pytestmark = pytest.mark.asyncio(loop_scope="session")

_QUESTION = question([20 + i % 700 for i in range(100)], max_tokens=24, ignore_eos=True)
_FLAGS = ("--dtype", "float32", "--kv-transports", "shm", "--max-prefill-tokens", "64", "--num-blocks", "512")
_AT_ONCE = 6  # among three workers of each pool: some come to each
_DEADLINE_S = 60.0
_SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class Hanging:
    """A worker whose steps hang on order."""

    cluster: LocalCluster
    tokens: tuple[int, ...]  # the answer, undisturbed
    member: Member
    orders: Worker

    async def hang(self) -> "list[asyncio.Task[Answer]]":
        """Send requests until a step of this worker hangs, and return the requests that are in progress then."""
        await self.orders.order(Fault.HELD)
        hung = asyncio.create_task(self.orders.injected())
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                asking = [asyncio.create_task(ask(self.cluster, _QUESTION)) for _ in range(_AT_ONCE)]
                answered = asyncio.gather(*asking)
                await asyncio.wait((answered, hung), return_when=asyncio.FIRST_COMPLETED)
                if hung.done():
                    return asking
                self.check(await answered)

    async def num_steps(self) -> float:
        """Send requests, and return the number of steps that this worker has run."""
        self.check(await asyncio.gather(*(ask(self.cluster, _QUESTION) for _ in range(_AT_ONCE))))
        return (await self.cluster.inspect(self.member.name)).figures["steps"]

    def check(self, answers: "list[Answer]") -> None:
        for answer in answers:
            assert answer.token_ids == self.tokens, answer.ledger

    async def until(self, serving: bool) -> None:
        """Wait until the worker's own health service reports this status to a watcher."""
        async with asyncio.timeout(_DEADLINE_S), self.cluster.channel(self.member.name) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=LIVENESS))
            while ((await watch.read()).status == _SERVING) is not serving:
                pass
            watch.cancel()

    async def says(self) -> dict[str, bool]:
        """Return the answers of the health port, by service."""
        async with grpc.aio.insecure_channel(self.member.ready["health"]) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            names = (LIVENESS, READINESS, "")
            return {
                name: (await check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status == _SERVING
                for name in names
            }

    async def until_state(self, state: str) -> None:
        """Wait until the registry has this state and a router shows it."""

        async def states() -> list[str]:
            members = (await self.cluster.status()).members
            return [MEMBER_STATES.word(member.state) for member in members if member.member_id == self.member.name]

        await until(states, lambda seen: state in seen, what=f"the router shows {self.member.name} as {state}")


@asynccontextmanager
async def _hanging(cluster: LocalCluster, directory: Path, role: str, *limits: str) -> AsyncIterator[Hanging]:
    """Add a worker to the cluster that may hang. `limits`: its flags for a step that does not end."""
    control = FaultControl(directory)
    await control.start()
    tokens = (await ask(cluster, _QUESTION)).token_ids
    name = f"{role}-hanging"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT_CONTROL", str(control.path))
        try:
            member = await cluster.start_member(name, "tests.faults.hanging_worker", (*_FLAGS, *limits))
            hanging = Hanging(cluster, tokens, member, await control.worker(name))
            await until(hanging.num_steps, what=f"{name} has run a step; its first one may take longer")
            yield hanging
        finally:
            ended = cluster.members.pop(name, None)
            if ended is not None:
                ended.process.kill()
                await ended.process.wait()
            await control.stop()


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
async def test_a_worker_with_a_hanging_step_is_avoided_until_it_recovers(
    cluster: LocalCluster, tmp_path: Path, role: str
) -> None:
    async with _hanging(cluster, tmp_path, role, "--step-timeout-s", "2") as hanging:
        assert await hanging.says() == {LIVENESS: True, READINESS: True, "": True}

        open_questions = await hanging.hang()
        await hanging.until(serving=False)

        assert await hanging.says() == {LIVENESS: False, READINESS: False, "": False}
        await hanging.until_state("unhealthy")
        answers = await asyncio.gather(*open_questions)
        hanging.check(answers)
        assert any(answer.ledger.reasons for answer in answers), "no request was at the worker"
        assert "has run for" in "".join(hanging.member.output)

        hanging.orders.let_go()
        await hanging.until(serving=True)
        await hanging.until_state("ready")
        assert await hanging.says() == {LIVENESS: True, READINESS: True, "": True}
        assert not await cluster.blocks_in_use(hanging.member.name), "what it computed too late still holds blocks"


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
async def test_a_worker_whose_step_does_not_end_exits(cluster: LocalCluster, tmp_path: Path, role: str) -> None:
    async with _hanging(cluster, tmp_path, role, "--step-timeout-s", "1", "--stuck-exit-s", "1") as hanging:
        open_questions = await hanging.hang()
        assert await hanging.member.exit_code() == ExitStatus.STUCK
        hanging.check(await asyncio.gather(*open_questions))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_of_either_role_sends_heartbeats_on_its_streams(cluster: LocalCluster, role: str) -> None:
    name = next(name for name in cluster.members if name.startswith(role))
    hello = worker_pb2.RouterHello(router="router@1", has_no_sequences=True)
    async with asyncio.timeout(_DEADLINE_S), cluster.channel(name) as channel:
        call = worker_pb2_grpc.DecodeWorkerStub(channel).Connect()
        await call.write(worker_pb2.RouterMessage(hello=hello))
        messages, kinds = [], list[str | None]()
        while kinds.count("heartbeat") < 2 or "others" not in kinds:  # a router that is late gets the latest of each
            messages.append(await call.read())
            kinds.append(messages[-1].WhichOneof("message"))
        call.cancel()
    assert kinds[0] == "hello" and {*kinds[1:]} == {"heartbeat", "others"}
    first, second, *_ = (message.heartbeat for message in messages if message.HasField("heartbeat"))
    assert first.free_blocks > 0
    times = service_times_of(first)
    assert times is not None, "no step was timed before the first heartbeat"
    assert 0 < times.step_s(1, 100) <= times.step_s(64, 6400) and 0 < times.prefill_s(1) <= times.prefill_s(512)
    assert second.step >= first.step
