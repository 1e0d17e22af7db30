"""Tests that a worker whose step hangs reports it, that its requests continue elsewhere unchanged, and that it recovers
or exits.

Two workers whose steps hang on order join the shared cluster, one in each pool.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.observe.health import LIVENESS, READINESS
from cluster.process import ExitStatus
from cluster.protocol.report_wire import service_times_of
from tandem.enum_words import MEMBER_STATES
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.faults.control import FaultControl, Worker
from tests.faults.faulty_transport import Fault
from tests.system.asking import Answer, ask, question
from tests.system.local_cluster import LocalCluster, Member
from tests.system.polling import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

_QUESTION = question([20 + i % 700 for i in range(100)], max_tokens=24, ignore_eos=True)
_NAMES = ("prefill-hanging", "decode-hanging")
_FLAGS = (
    *("--dtype", "float32", "--kv-transports", "shm", "--max-prefill-tokens", "64", "--num-blocks", "512"),
    *("--step-timeout-s", "1", "--stuck-exit-s", "3"),
)
_AT_ONCE = 6  # among three workers of each pool: some come to each
_DEADLINE_S = 60.0
_SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class Hanging:
    cluster: LocalCluster
    tokens: tuple[int, ...]  # the answer, undisturbed
    members: dict[str, Member]
    orders: dict[str, Worker]

    async def hang(self, name: str) -> "list[asyncio.Task[Answer]]":
        """Send requests until a step of this worker hangs, and return the requests that are in progress then."""
        await self.orders[name].order(Fault.HELD)
        hung = asyncio.create_task(self.orders[name].injected())
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                asking = [asyncio.create_task(ask(self.cluster, _QUESTION)) for _ in range(_AT_ONCE)]
                answered = asyncio.gather(*asking)
                await asyncio.wait((answered, hung), return_when=asyncio.FIRST_COMPLETED)
                if hung.done():
                    return asking
                self.check(await answered)

    def check(self, answers: "list[Answer]") -> None:
        for answer in answers:
            assert answer.token_ids == self.tokens, answer.ledger

    async def until(self, name: str, serving: bool) -> None:
        """Wait until the worker's own health service reports this status to a watcher."""
        async with asyncio.timeout(_DEADLINE_S), self.cluster.channel(name) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=LIVENESS))
            while ((await watch.read()).status == _SERVING) is not serving:
                pass
            watch.cancel()

    async def says(self, name: str) -> dict[str, bool]:
        """Return the answers of the health port, by service."""
        async with grpc.aio.insecure_channel(self.members[name].ready["health"]) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            names = (LIVENESS, READINESS, "")
            return {
                name: (await check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status == _SERVING
                for name in names
            }

    async def until_state(self, name: str, state: str) -> None:
        """Wait until the registry has this state and a router shows it."""

        async def states() -> list[str]:
            members = (await self.cluster.status()).members
            return [MEMBER_STATES.word(member.state) for member in members if member.member_id == name]

        await until(states, lambda seen: state in seen, what=f"the router shows {name} as {state}")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hanging(shm_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hanging]:
    control = FaultControl(tmp_path_factory.mktemp("hanging"))
    await control.start()
    await shm_cluster.mend()
    answer = await ask(shm_cluster, _QUESTION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT_CONTROL", str(control.path))
        try:
            starts = (shm_cluster.start_member(name, "tests.faults.hanging_worker", _FLAGS) for name in _NAMES)
            members = dict(zip(_NAMES, await asyncio.gather(*starts), strict=True))
            orders = {name: await control.worker(name) for name in _NAMES}
            yield Hanging(shm_cluster, answer.token_ids, members, orders)
        finally:
            for name in _NAMES:
                member = shm_cluster.members.pop(name, None)
                if member is not None and member.process.returncode is None:
                    member.process.kill()
                    await member.process.wait()
            await control.stop()


@pytest.mark.parametrize("name", [pytest.param("prefill-hanging", marks=pytest.mark.slow), "decode-hanging"])
async def test_a_worker_with_a_hanging_step_is_avoided_then_recovers_or_exits(hanging: Hanging, name: str) -> None:
    assert await hanging.says(name) == {LIVENESS: True, READINESS: True, "": True}

    open_questions = await hanging.hang(name)
    await hanging.until(name, serving=False)

    assert await hanging.says(name) == {LIVENESS: False, READINESS: False, "": False}
    await hanging.until_state(name, "unhealthy")
    answers = await asyncio.gather(*open_questions)
    hanging.check(answers)
    assert any(answer.ledger.reasons for answer in answers), "no request was at the worker"
    assert "has run for" in "".join(hanging.members[name].output)

    hanging.orders[name].let_go()
    await hanging.until(name, serving=True)
    await hanging.until_state(name, "ready")
    assert await hanging.says(name) == {LIVENESS: True, READINESS: True, "": True}
    assert not await hanging.cluster.blocks_in_use(name), "what it computed too late still holds blocks"

    open_questions = await hanging.hang(name)  # it has work again
    assert await hanging.members[name].exit_code() == ExitStatus.STUCK
    hanging.check(await asyncio.gather(*open_questions))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_of_either_role_sends_heartbeats_on_its_streams(shm_cluster: LocalCluster, role: str) -> None:
    name = next(name for name in shm_cluster.members if name.startswith(role))
    hello = worker_pb2.RouterHello(router="router@1", has_no_sequences=True)
    async with asyncio.timeout(_DEADLINE_S), shm_cluster.channel(name) as channel:
        call = worker_pb2_grpc.DecodeWorkerStub(channel).Connect()
        await call.write(worker_pb2.RouterMessage(hello=hello))
        messages = [await call.read() for _ in range(5)]
        call.cancel()
    kinds = [message.WhichOneof("message") for message in messages]
    assert kinds[0] == "hello" and sorted(kinds[1:3]) == sorted(kinds[3:5]) == ["heartbeat", "others"]
    first, second = (message.heartbeat for message in messages if message.HasField("heartbeat"))
    assert first.free_blocks > 0
    times = service_times_of(first)
    assert times is not None, "no step was timed before the first heartbeat"
    assert 0 < times.step_s(1, 100) <= times.step_s(64, 6400) and 0 < times.prefill_s(1) <= times.prefill_s(512)
    assert second.step >= first.step
