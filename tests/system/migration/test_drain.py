"""Tests that real members that drain while they work lose no token, and that their exit status shows whether work was
left."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.process import ExitStatus
from tandem.client import AsyncClient
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tandem.v1 import inference_pb2
from tests.polling import until
from tests.system.rigs.members.asking import GREEDY, Answer, ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster, Member

pytestmark = pytest.mark.asyncio(loop_scope="session")

_GRACE_S = 2.5  # of the decode worker; too short for those with most left
_WARM = inference_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=11)
_LONG = [
    question(range(30, 60 + i), max_tokens=300, ignore_eos=True, sampling=_WARM if i % 2 else GREEDY) for i in range(3)
] + [question(range(40, 75), max_tokens=300, n=3, logprobs=2, ignore_eos=True)]
_ENDING = question(range(50, 90), max_tokens=24, ignore_eos=True)
_LATE = [question(range(30, 430 + i), max_tokens=30, ignore_eos=True) for i in range(3)]


@asynccontextmanager
async def _leaving_soon(cluster: LocalCluster, name: str, module: str, *flags: str) -> AsyncIterator[Member]:
    """Start one more member, which the test ends."""
    member = await cluster.start_member(name, module, flags)
    try:
        await cluster.mend()
        yield member
    finally:
        if member.process.returncode is None:
            member.process.kill()
        await member.exit_code()
        assert member.reader is not None
        await member.reader
        del cluster.members[name]


def _content(answer: Answer) -> tuple[object, ...]:
    return answer.choices, answer.texts, answer.finish_reasons, [p.chosen.token_id for p in answer.logprobs]


async def test_a_draining_decode_worker_hands_over_its_sequences_and_loses_no_token(cluster: LocalCluster) -> None:
    """Some of eight streams decode, some are about to end, and three are queued, prefilled or pulled when the drain
    begins."""
    requests = [*_LONG, _ENDING, *_LATE]
    undisturbed = await asyncio.gather(*(ask(cluster, request) for request in requests))
    joining = (*cluster.joining_flags(), "--drain-grace-s", str(_GRACE_S))
    async with _leaving_soon(cluster, "decode2", "decode_worker", *joining) as leaving, AsyncExitStack() as stack:
        moved, restarted = await _migrations(cluster)
        streams = [await stack.enter_async_context(asked(cluster, request)) for request in requests[:5]]
        await asyncio.gather(*(stream.until(18) for stream in streams))
        answering = [asyncio.create_task(stream.end()) for stream in streams]
        late = [asyncio.create_task(ask(cluster, request)) for request in _LATE]
        inspect = partial(cluster.inspect, "decode2")  # a hand-off may be over before it is seen
        await until(
            inspect,
            lambda seen: seen.figures["imports"] or any(task.done() for task in late),
            what="decode2 imports one of the late prompts",
        )
        leaving.send_signal(signal.SIGTERM)
        answers = await asyncio.gather(*answering, *late)
        assert await leaving.exit_code() == ExitStatus.OK
    assert list(map(_content, answers)) == list(map(_content, undisturbed))
    assert not any(answer.ledger.reasons for answer in answers[:5]), "moved, not prefilled again"
    after = await _migrations(cluster)
    assert after[0] > moved and after[1] == restarted
    await cluster.until_free()


@pytest.mark.slow
async def test_a_router_that_connects_later_receives_that_the_worker_drains(cluster: LocalCluster) -> None:
    """The worker answers while it has work. It is not ready and accepts no more."""
    async with asked(cluster, question(range(30, 60), max_tokens=400, ignore_eos=True)) as answer:
        await answer.until(2)
        running = {name: (await cluster.inspect(name)).figures["running"] for name in cluster.workers("decode")}
        name = max(running, key=lambda name: running[name])
        cluster.members[name].send_signal(signal.SIGTERM)
        async with cluster.channel(name) as channel, asyncio.timeout(20):
            worker, health = worker_pb2_grpc.DecodeWorkerStub(channel), health_pb2_grpc.HealthStub(channel)
            status = health_pb2.HealthCheckResponse.SERVING
            while status == health_pb2.HealthCheckResponse.SERVING:
                status = (await health.Check(health_pb2.HealthCheckRequest())).status
            hellos = iter([worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router="late@1"))])
            leaving = await _word_of_leaving(worker, hellos)
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert leaving.grace_s > 0
        await answer.end()
    assert await cluster.members[name].exit_code() == ExitStatus.OK


async def _word_of_leaving(
    worker: worker_pb2_grpc.DecodeWorkerStub, hellos: Iterator[worker_pb2.RouterMessage]
) -> worker_pb2.WorkerLeaving:
    async for message in worker.Connect(hellos):
        if message.HasField("leaving"):
            leaving: worker_pb2.WorkerLeaving = message.leaving
            return leaving
    raise AssertionError("it ended the stream without it")


async def test_a_draining_prefill_worker_returns_prompts_that_have_not_started(cluster: LocalCluster) -> None:
    requests = [question(range(20 + i, 920 + i), max_tokens=4, ignore_eos=True) for i in range(8)]
    undisturbed = await asyncio.gather(*(ask(cluster, request) for request in requests))
    for request in requests:
        request.cache_salt = "drained"  # nothing of the prompts is there already
    answering = [asyncio.create_task(ask(cluster, request)) for request in requests]
    inspect = partial(cluster.inspect, "prefill0")
    await until(inspect, lambda seen: seen.figures["waiting"], what="a prompt waits at prefill0")
    cluster.members["prefill0"].send_signal(signal.SIGTERM)
    answers = await asyncio.gather(*answering)
    assert await cluster.members["prefill0"].exit_code() == ExitStatus.OK
    assert list(map(_content, answers)) == list(map(_content, undisturbed))
    reasons = {reason for answer in answers for reason in answer.ledger.reasons}
    assert "prefill_draining" in reasons and reasons <= {"prefill_draining"}
    await cluster.until_free()


async def test_a_router_whose_grace_is_too_short_reports_it_and_its_clients_resume_elsewhere(
    cluster: LocalCluster,
) -> None:
    staying = cluster.members["router0"].grpc_address
    ports = ("--port", "0", "--grpc-port", "0", "--drain-grace-s", "0")
    async with _leaving_soon(cluster, "router1", "router", *ports) as leaving:
        async with AsyncClient([leaving.grpc_address, staying], timeout_s=60) as client:
            generation = client.generate(token_ids=range(30, 60), max_tokens=100, ignore_eos=True, temperature=0.0)
            await anext(generation)
            with ExitStack() as stopped:  # otherwise the answer could be complete before the router leaves
                for name in cluster.workers("decode"):
                    stopped.enter_context(cluster.members[name].stopped())
                leaving.send_signal(signal.SIGTERM)
                assert await leaving.exit_code() == ExitStatus.DRAIN_INCOMPLETE
            result = await generation.result()
        assert any("drain_incomplete: 1 request(s) were left" in line for line in leaving.output)
    assert len(result.choices[0].token_ids) == 100 and result.ledger.reasons[:1] == ("resumed",)
    await cluster.until_free()


async def test_a_worker_that_is_drained_while_it_starts_exits(cluster: LocalCluster) -> None:
    """It exits before it has loaded its model and without registering."""
    starting = await cluster.spawn("starting", "decode_worker")
    try:
        assert starting.process.stdout is not None
        line = await asyncio.wait_for(starting.process.stdout.readline(), 60)
        assert b"starting" in line
        starting.send_signal(signal.SIGTERM)
        rest = await asyncio.wait_for(starting.process.stdout.read(), 60)
        assert await starting.exit_code() == ExitStatus.OK
        assert b"ready" not in rest
    finally:
        del cluster.members["starting"]


async def _migrations(cluster: LocalCluster) -> tuple[float, float]:
    """Return how many sequences this cluster's router has moved, and how many were prefilled again instead."""
    async with httpx.AsyncClient() as http:
        figures = (await http.get(f"http://{cluster.members['router0'].ready['http']}/metrics")).text
    counts = {"moved": 0.0, "restarted": 0.0}
    for line in figures.splitlines():
        for outcome in counts:
            if line.startswith("tandem_migrations_total") and f'outcome="{outcome}"' in line:
                counts[outcome] += float(line.rpartition(" ")[2])
    return counts["moved"], counts["restarted"]
