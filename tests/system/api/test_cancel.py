"""Tests that the blocks of a client that disconnects are free on both pools within two engine steps.

The bound is measured where the cancel arrives, so these tests call the workers as a router does. The pools of both
sides show what the router does with a client that disconnects.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import grpc
import pytest

from cluster.messages import DecodeJob, MemberId, PrefillJob, Sampling, SequenceStart, TokenStops
from cluster.protocol import wire
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.polling import until
from tests.system.rigs.members.asking import ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_DEADLINE_S = 60.0
_MAX_STEPS = 2
_LONG = tuple(20 + i % 800 for i in range(960))  # fifteen chunks
_ROUTER = MemberId("the-test", "1")
_STOPS = TokenStops(max_tokens=60, min_tokens=0, stop_token_ids=frozenset())


@dataclass(frozen=True, slots=True)
class _Standing:
    steps: float
    in_use: int


async def _standing(cluster: LocalCluster, name: str) -> _Standing:
    report = await cluster.inspect(name)
    assert report.violation == ""
    in_use = sum(count for state, count in report.blocks.items() if state not in ("free", "cached"))
    return _Standing(report.figures["steps"], in_use)


async def _until(cluster: LocalCluster, name: str, is_so: Callable[[_Standing], bool]) -> _Standing:
    return await until(partial(_standing, cluster, name), is_so, what=f"the state of {name}")


async def _assert_freed_within_two_steps(cluster: LocalCluster, name: str, cancel: Awaitable[object]) -> None:
    await cancel
    arrived = await _standing(cluster, name)  # asked after the cancel was sent
    freed = await _until(cluster, name, lambda standing: not standing.in_use)
    assert freed.steps - arrived.steps <= _MAX_STEPS


@asynccontextmanager
async def _as_router(
    cluster: LocalCluster, name: str
) -> AsyncIterator[tuple[worker_pb2_grpc.DecodeWorkerStub, "grpc.aio.StreamStreamCall[object, object]"]]:
    async with cluster.channel(name) as channel:
        stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        stream = stub.Connect()
        await stream.write(worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router=str(_ROUTER))))
        assert (await stream.read()).WhichOneof("message") == "hello"
        try:
            yield stub, stream
        finally:
            stream.cancel()


def _cancel(*handles: int) -> worker_pb2.RouterMessage:
    return worker_pb2.RouterMessage(cancel=worker_pb2.CancelSequences(handles=wire.pack_ids(handles)))


def _unused_salt() -> str:
    """Return a new cache salt, under which no prefix is cached, so that the whole prompt is computed and moved."""
    return secrets.token_hex(8)


def _decode_job(prompt: tuple[int, ...], ticket: bytes | None, *, n: int = 1) -> DecodeJob:
    return DecodeJob(
        request_id="cancelled",
        attempt=1,
        router=_ROUTER,
        prompt_token_ids=prompt,
        sampling=Sampling(temperature=0.0),
        stops=TokenStops(max_tokens=900, min_tokens=0, stop_token_ids=frozenset()) if ticket is None else _STOPS,
        sequences=tuple(SequenceStart(handle, handle, ()) for handle in range(n)),
        signed_ticket=ticket,
        timeout_s=_DEADLINE_S,
        cache_salt=_unused_salt(),
    )


def _prefill_job(importer: str | None, *, n: int = 1) -> PrefillJob:
    return PrefillJob(
        request_id="cancelled",
        attempt=1,
        token_ids=_LONG,
        sampling=Sampling(temperature=0.0),
        stops=_STOPS,
        seeds=tuple(range(n)),
        num_committed=0,
        importer=wire.member_from_wire(importer) if importer else None,
        timeout_s=_DEADLINE_S,
        cache_salt=_unused_salt(),
    )


def _member(cluster: LocalCluster, name: str) -> str:
    return cluster.members[name].ready["member"]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_cancelled_during_decode_frees_its_blocks_within_two_steps(
    cluster: LocalCluster, n: int
) -> None:
    async with _as_router(cluster, "decode0") as (stub, stream):
        await stub.Start(wire.decode_job_to_wire(_decode_job((5, 6, 7, 8), None, n=n)))
        for _ in range(6):
            assert await stream.read() is not grpc.aio.EOF
        assert (await _standing(cluster, "decode0")).in_use
        await _assert_freed_within_two_steps(cluster, "decode0", stream.write(_cancel(*range(n))))


async def test_a_request_cancelled_during_prefill_frees_its_blocks_within_two_steps(cluster: LocalCluster) -> None:
    async with cluster.channel("prefill0") as channel:
        job = wire.prefill_job_to_wire(_prefill_job(None))
        before = await _standing(cluster, "prefill0")
        call = worker_pb2_grpc.PrefillWorkerStub(channel).Prefill(job, timeout=_DEADLINE_S)
        await call.read()  # accepted
        begun = await _until(cluster, "prefill0", lambda standing: standing.steps > before.steps)
        assert begun.in_use

        async def cancel() -> None:
            call.cancel()

        await _assert_freed_within_two_steps(cluster, "prefill0", cancel())
        total = (await _standing(cluster, "prefill0")).steps - before.steps
        assert total < len(_LONG) / 64, "the whole prompt was computed all the same"


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_cancelled_during_transfer_frees_the_blocks_of_both_pools_within_two_steps(
    cluster: LocalCluster, n: int
) -> None:
    async with cluster.channel("prefill0") as channel, _as_router(cluster, "decode0") as (stub, stream):
        job = wire.prefill_job_to_wire(_prefill_job(_member(cluster, "decode0"), n=n))
        call = worker_pb2_grpc.PrefillWorkerStub(channel).Prefill(job, timeout=_DEADLINE_S)
        ticket = (await call.read()).accepted.ticket
        await stub.Start(wire.decode_job_to_wire(_decode_job(_LONG, ticket, n=n)))
        await _until(cluster, "decode0", lambda standing: standing.in_use > 0)
        await _until(cluster, "prefill0", lambda standing: standing.in_use > 0)
        await _assert_freed_within_two_steps(cluster, "decode0", stream.write(_cancel(*range(n))))

        async def cancel() -> None:
            call.cancel()

        await _assert_freed_within_two_steps(cluster, "prefill0", cancel())


async def test_an_import_under_way_whose_exporter_is_frozen_gives_its_blocks_back_at_once(
    cluster: LocalCluster,
) -> None:
    async with cluster.channel("prefill0") as channel, _as_router(cluster, "decode0") as (stub, stream):
        job = wire.prefill_job_to_wire(_prefill_job(_member(cluster, "decode0")))
        call = worker_pb2_grpc.PrefillWorkerStub(channel).Prefill(job, timeout=_DEADLINE_S)
        ticket = (await call.read()).accepted.ticket
        await stub.Start(wire.decode_job_to_wire(_decode_job(_LONG, ticket)))
        await _until(cluster, "decode0", lambda standing: standing.in_use > 0)
        with cluster.members["prefill0"].stopped():
            await _assert_freed_within_two_steps(cluster, "decode0", stream.write(_cancel(0)))
        call.cancel()
        await cluster.until_free()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_disconnects_during_decode_leaves_no_block(cluster: LocalCluster, n: int) -> None:
    before = await cluster.figures("decode")
    async with asked(cluster, question((5, 6, 7, 8), max_tokens=900, n=n, ignore_eos=True)) as answer:
        await answer.until(6)
        assert any([await cluster.blocks_in_use(name) for name in cluster.workers("decode")])
    await _assert_all_over(cluster)
    drawn = (await cluster.figures("decode"))["tokens_drawn"] - before["tokens_drawn"]
    assert drawn < 900 * n, "it was decoded to its end all the same"


async def test_a_client_that_disconnects_during_prefill_leaves_no_block(cluster: LocalCluster) -> None:
    before = await cluster.figures("prefill")
    async with asked(cluster, question(_LONG, max_tokens=8, cache_salt=_unused_salt())):
        figures = partial(cluster.figures, "prefill")
        began = before["tokens_computed"]
        await until(figures, lambda seen: seen["tokens_computed"] > began, what="a part of the prompt is computed")
    await _assert_all_over(cluster)
    assert (await cluster.figures("prefill"))["prompts_done"] == before["prompts_done"]


async def test_a_client_that_disconnects_during_the_transfer_leaves_no_block(cluster: LocalCluster) -> None:
    async with asked(cluster, question(_LONG, max_tokens=8, n=3, cache_salt=_unused_salt())):
        await until(partial(_decode_blocks, cluster), any, what="a decode worker has a block in use")
    await _assert_all_over(cluster)


async def _decode_blocks(cluster: LocalCluster) -> list[dict[str, int]]:
    return [await cluster.blocks_in_use(name) for name in cluster.workers("decode")]


async def _assert_all_over(cluster: LocalCluster) -> None:
    await cluster.until_free()
    await until(cluster.status, lambda seen: not seen.live_requests, what="the router has no request")
    for figures in (await cluster.figures("decode"), await cluster.figures("prefill")):
        assert not figures["running"] + figures["waiting"]


async def test_a_single_token_starts_no_decode_leg(cluster: LocalCluster) -> None:
    before = await cluster.figures("decode")
    answer = await ask(cluster, question(range(10, 50), max_tokens=1))
    after = await cluster.figures("decode")
    assert len(answer.token_ids) == 1
    assert answer.finish_reasons[0] in ("length", "stop")
    assert {name: after[name] for name in _LEG} == {name: before[name] for name in _LEG}
    assert answer.ledger.kv_bytes == 0
    assert all(member.startswith("prefill") for member in answer.ledger.members)
    await cluster.until_free()


async def test_a_first_token_that_ends_the_request_leaves_decode_without_a_sequence(cluster: LocalCluster) -> None:
    prompt = range(10, 50)
    first = (await ask(cluster, question(prompt, max_tokens=1, ignore_eos=True))).token_ids[0]
    before = await cluster.figures("decode")
    answer = await ask(cluster, question(prompt, max_tokens=50, stop_token_ids=[first], ignore_eos=True))
    assert answer.token_ids == (first,)
    assert answer.finish_reasons[0] == "stop"
    await cluster.until_free()
    assert (await cluster.figures("decode"))["tokens_drawn"] == before["tokens_drawn"]


_LEG = ("tokens_drawn", "tokens_computed", "handoffs_ok_shm", "kv_bytes", "local_prefills", "sequences_done")


async def test_a_malformed_message_ends_the_stream_and_not_only_its_reader(cluster: LocalCluster) -> None:
    async with _as_router(cluster, "decode0") as (_, stream):
        await stream.write(worker_pb2.RouterMessage(cancel=worker_pb2.CancelSequences(handles=b"odd")))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await asyncio.wait_for(_read_to_the_end(stream), _DEADLINE_S)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def _read_to_the_end(stream: "grpc.aio.StreamStreamCall[object, object]") -> None:
    """gRPC reports the status of a stream behind the messages that were not read, such as heartbeats."""
    while await stream.read() is not grpc.aio.EOF:
        pass
