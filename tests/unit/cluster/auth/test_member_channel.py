"""Calls over a channel that proves membership, to a real server: sessions are opened, shared and replaced unnoticed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from cluster.accounts.audit import Audit
from cluster.auth.gate import MemberGate
from cluster.auth.keys import ClusterKeys
from cluster.auth.member_channel import MemberChannel, open_member_channel
from cluster.auth.sessions import Refusal
from cluster.errors import MemberRefused, grpc_status
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from cluster.serving.rpc_errors import error_from_rpc
from cluster.serving.serving import GrpcServer, is_serving
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc

_KEYS = ClusterKeys(b"k" * 32)
_DEADLINE_S = 20.0


class _Worker(worker_pb2_grpc.WorkerServicer, kv_pb2_grpc.KvTransferServicer):
    """Answers every kind of call with what it received."""

    async def Inspect(
        self, request: worker_pb2.InspectRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.InspectResponse:
        return worker_pb2.InspectResponse(member="a@1")

    async def SubscribeCacheEvents(
        self, request: worker_pb2.SubscribeCacheEventsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.CacheEvents]:
        for number in range(3):
            yield worker_pb2.CacheEvents(next_number=number)

    async def HandOff(
        self,
        request_iterator: AsyncIterator[kv_pb2.ImporterMessage],
        context: grpc.aio.ServicerContext[kv_pb2.ImporterMessage, kv_pb2.ExporterMessage],
    ) -> AsyncIterator[kv_pb2.ExporterMessage]:
        async for message in request_iterator:
            yield kv_pb2.ExporterMessage(refused=kv_pb2.Refused(reason=message.settle.reason))


class _Served:
    def __init__(self, incarnation: int, max_connections: int | None) -> None:
        self.telemetry = Telemetry()
        gate = MemberGate(_KEYS, MemberId("decode-0", str(incarnation)), self.telemetry, Audit())
        self.server = GrpcServer(service_names=[], telemetry=self.telemetry, gate=gate, max_connections=max_connections)
        gate.serve(self.server)
        worker_pb2_grpc.add_WorkerServicer_to_server(_Worker(), self.server.grpc)
        kv_pb2_grpc.add_KvTransferServicer_to_server(_Worker(), self.server.grpc)
        self.gate = gate

    @property
    def num_sessions(self) -> int:
        return len(self.gate._sessions)


@asynccontextmanager
async def served(
    incarnation: int, port: int = 0, max_connections: int | None = None
) -> AsyncIterator[tuple[_Served, int]]:
    worker = _Served(incarnation, max_connections)
    port = worker.server.bind("127.0.0.1", port)
    await worker.server.start()
    try:
        async with asyncio.timeout(_DEADLINE_S):
            yield worker, port
    finally:
        await worker.server.stop(0)


def channel_to(port: int, keys: ClusterKeys = _KEYS) -> MemberChannel:
    return open_member_channel(f"127.0.0.1:{port}", keys=keys, caller="router-0@1")


async def _answers(channel: MemberChannel) -> list[object]:
    """Make a call of each kind at the same time."""

    async def subscribe() -> list[int]:
        events = worker_pb2_grpc.WorkerStub(channel).SubscribeCacheEvents(worker_pb2.SubscribeCacheEventsRequest())
        return [event.next_number async for event in events]

    async def converse() -> list[str]:
        call = kv_pb2_grpc.KvTransferStub(channel).HandOff(timeout=_DEADLINE_S)
        for reason in ("one", "two"):
            await call.write(kv_pb2.ImporterMessage(settle=kv_pb2.Settle(reason=reason)))
        await call.done_writing()
        return [message.refused.reason async for message in call]

    async def inspect() -> str:
        answer = await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=_DEADLINE_S)
        return str(answer.member)

    return [*await asyncio.gather(inspect(), subscribe(), converse())]


_EXPECTED: list[object] = ["a@1", [0, 1, 2], ["one", "two"]]


async def test_200_calls_at_once_over_a_new_channel_share_one_session() -> None:
    async with served(1) as (worker, port), channel_to(port) as channel:
        answers = await asyncio.gather(*(_answers(channel) for _ in range(67)))
        assert answers == [_EXPECTED] * 67
        assert worker.num_sessions == 1


async def test_connections_of_strangers_to_a_member_are_few_and_leave_a_members_own() -> None:
    async with served(1, max_connections=8) as (_, port), channel_to(port) as channel:
        assert await _answers(channel) == _EXPECTED
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        ends = [asyncio.create_task(_end(reader)) for reader, _ in strangers]
        await asyncio.gather(*ends[7:])
        assert not all(end.done() for end in ends[:7]), "those that came within the bound are kept for a handshake"
        assert await _answers(channel) == _EXPECTED
        for end, (_, writer) in zip(ends, strangers, strict=True):
            end.cancel()
            writer.close()


async def _end(reader: asyncio.StreamReader) -> None:
    """Wait until the peer has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(1024):
            pass


async def test_calls_of_each_kind_reach_a_restarted_worker_without_an_error() -> None:
    async with served(1) as (_, port), channel_to(port) as channel:
        assert await _answers(channel) == _EXPECTED
    async with channel_to(port) as channel:
        async with served(1, port):
            assert await _answers(channel) == _EXPECTED
        async with served(2, port) as (worker, _):
            await channel.channel_ready()
            assert await _answers(channel) == _EXPECTED
            assert worker.telemetry.value("tandem_refused_members_total", reason=Refusal.UNKNOWN_SESSION) >= 1


async def test_a_caller_without_the_key_receives_a_named_refusal() -> None:
    async with served(1) as (worker, port), channel_to(port, ClusterKeys(b"x" * 32)) as channel:
        assert not await is_serving(channel, timeout_s=_DEADLINE_S)  # it answers
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest())
            error = error_from_rpc(refused.value)
            assert type(error) is MemberRefused and error.message.startswith(Refusal.UNKNOWN_KEY)
            assert refused.value.code().name == grpc_status(error) == "UNAUTHENTICATED"
        with pytest.raises(grpc.aio.AioRpcError, match=Refusal.UNKNOWN_KEY):
            await kv_pb2_grpc.KvTransferStub(channel).HandOff().read()
        assert worker.telemetry.value("tandem_refused_members_total", reason=Refusal.UNKNOWN_KEY) == 3


async def test_a_call_ends_at_its_deadline_while_no_session_opens() -> None:
    with_nobody = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = with_nobody.sockets[0].getsockname()[1]
    async with channel_to(port) as channel, asyncio.timeout(_DEADLINE_S):
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=0.1)
        assert late.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        call = kv_pb2_grpc.KvTransferStub(channel).HandOff()
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    with_nobody.close()


@pytest.mark.parametrize("is_session_open", [False, True])
async def test_calls_that_meet_a_closed_channel_fail_as_calls_to_a_lost_worker(is_session_open: bool) -> None:
    """Each begins before the channel is closed, or after it."""
    async with served(1) as (_, port):
        channel = channel_to(port)
        worker, transfer = worker_pb2_grpc.WorkerStub(channel), kv_pb2_grpc.KvTransferStub(channel)
        if is_session_open:
            await worker.Inspect(worker_pb2.InspectRequest())
        early = worker.Inspect(worker_pb2.InspectRequest())
        await channel.close()
        subscribed, handed_off = (
            worker.SubscribeCacheEvents(worker_pb2.SubscribeCacheEventsRequest()),
            transfer.HandOff(),
        )
        calls = [early, worker.Inspect(worker_pb2.InspectRequest()), subscribed.read(), handed_off.read()]
        for call in [*calls, handed_off.write(kv_pb2.ImporterMessage())]:
            with pytest.raises(grpc.aio.AioRpcError, match="the channel is closed") as failed:
                await call
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
