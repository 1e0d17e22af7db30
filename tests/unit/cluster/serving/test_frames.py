"""Calls of members as frames, between real sockets: what gRPC promises holds for them, and gRPC replaces them."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator

import grpc
import pytest
import uvloop

from cluster.auth.keys import ClusterKeys
from cluster.errors import QueueFull
from cluster.serving import frames
from cluster.serving.frame_channel import MAX_REQUEST_BYTES, CallerConnection, FrameChannel
from cluster.serving.frames import Begin, FrameConnection, Kind, Status, packed, packed_status, unpacked_status
from cluster.serving.rpc_errors import error_from_rpc
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.unit.cluster.serving.frame_rig import KEYS, TIMEOUT_S, Callee, served, until_true


def _came_as_frames(callee: Callee) -> list[bool]:
    return [type(context).__name__ == "FrameContext" for context in callee.contexts]


async def test_both_ends_send_a_frame_although_the_one_before_is_not_acknowledged() -> None:
    """The system would otherwise keep it back for up to 40 ms, each token of a stream too."""
    async with served() as (callee, server, channel):
        callee.is_open.set()
        await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=TIMEOUT_S)
        assert _came_as_frames(callee) == [True]
        assert server.grpc.frames is not None and channel.frames is not None
        (accepted,) = server.grpc.frames.connections
        for connection in (accepted, channel.frames.connection):
            assert connection is not None and connection.transport is not None
            used: socket.socket = connection.transport.get_extra_info("socket")
            assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_calls_come_as_frames_and_large_requests_over_grpc() -> None:
    async with served() as (callee, _, channel):
        callee.is_open.set()
        stub = worker_pb2_grpc.WorkerStub(channel)
        assert (await stub.Inspect(worker_pb2.InspectRequest(), timeout=TIMEOUT_S)).member == "a@1"
        for ticket in (b"t", b"t" * (MAX_REQUEST_BYTES + 1)):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await worker_pb2_grpc.PrefillWorkerStub(channel).Abandon(worker_pb2.AbandonRequest(ticket=ticket))
            error = error_from_rpc(failed.value)
            assert type(error) is QueueFull and error.retry_after_s == 1.5 and error.message == "the queue is full: ü"
            assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert _came_as_frames(callee) == [True, True, False]


@pytest.mark.parametrize("ends_by", ["cancel", "deadline", "channel"])
async def test_a_call_that_its_caller_ends_is_cancelled_at_the_callee(ends_by: str) -> None:
    async with served() as (callee, _, channel):
        callee.is_open.set()
        await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest())  # opens the session
        callee.is_open.clear()
        callee.contexts.clear()
        timeout_s = 2.0 if ends_by == "deadline" else None
        asking = asyncio.ensure_future(
            worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=timeout_s)
        )
        await until_true(lambda: bool(callee.contexts), what="the call at the callee")
        if ends_by == "cancel":
            asking.cancel()
        elif ends_by == "channel":
            await channel.close()
        expected = asyncio.CancelledError if ends_by == "cancel" else grpc.aio.AioRpcError
        with pytest.raises(expected) as ended:
            await asking
        if isinstance(ended.value, grpc.aio.AioRpcError):
            assert ended.value.code().name == ("DEADLINE_EXCEEDED" if timeout_s else "UNAVAILABLE")
        await until_true(lambda: callee.num_cancelled == 1, what="the cancellation at the callee")
        assert _came_as_frames(callee) == [True]


async def test_calls_in_flight_fail_with_their_connection_and_later_ones_use_grpc_until_it_is_restored() -> None:
    async with served() as (callee, _, channel):
        stub = worker_pb2_grpc.WorkerStub(channel)
        asking = asyncio.ensure_future(stub.Inspect(worker_pb2.InspectRequest()))
        await until_true(lambda: bool(callee.contexts), what="the call at the callee")
        assert channel.frames is not None and channel.frames.connection is not None
        channel.frames.connection.abort()
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await asking
        assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
        callee.is_open.set()
        await stub.Inspect(worker_pb2.InspectRequest())
        await until_true(lambda: channel.frames is not None and bool(channel.frames.connection), what="the connection")
        await stub.Inspect(worker_pb2.InspectRequest())
        assert _came_as_frames(callee) == [True, False, True]


async def test_a_call_that_is_in_progress_keeps_its_number_when_the_numbers_begin_again() -> None:
    async with served() as (callee, _, channel):
        stub = worker_pb2_grpc.WorkerStub(channel)
        first = asyncio.ensure_future(stub.Inspect(worker_pb2.InspectRequest()))
        await until_true(lambda: bool(callee.contexts), what="the first call at the callee")
        assert channel.frames is not None and channel.frames.connection is not None
        connection = channel.frames.connection
        before, connection._numbers = connection._numbers, map(int, [1, 2])
        second = asyncio.ensure_future(stub.Inspect(worker_pb2.InspectRequest()))
        await until_true(lambda: len(callee.contexts) == 2, what="the second call at the callee")
        callee.is_open.set()
        await asyncio.gather(first, second)
        assert next(before) == 2 and channel.frames.connection is connection


async def test_a_stream_of_requests_is_answered_one_by_one() -> None:
    async with served() as (_, _, channel):
        call = kv_pb2_grpc.KvTransferStub(channel).HandOff()
        for reason in ("one", "two"):
            await call.write(kv_pb2.ImporterMessage(settle=kv_pb2.Settle(reason=reason)))
            assert (await call.read()).refused.reason == reason
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_caller_that_does_not_read_stops_the_callee() -> None:
    async with served() as (callee, server, channel):
        callee.is_open.set()
        await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest())
        assert channel.frames is not None and channel.frames.connection is not None
        transport = channel.frames.connection.transport
        assert transport is not None
        transport.pause_reading()
        call = worker_pb2_grpc.WorkerStub(channel).SubscribeCacheEvents(worker_pb2.SubscribeCacheEventsRequest())
        assert server._frames is not None
        (connection,) = server._frames.connections
        await until_true(lambda: connection.is_paused, what="a pause of the callee")
        assert callee.num_sent < 2_000  # 20 MB do not fit the sockets' buffers
        transport.resume_reading()
        assert [event.next_number async for event in call] == list(range(2_000))


async def test_an_answer_above_the_bound_on_unsent_bytes_reaches_a_caller_that_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "MAX_UNSENT_BYTES", 4_096)
    async with served() as (callee, _, channel):
        callee.is_open.set()
        callee.answer.member = "m" * (8 << 20)  # more than the sockets' buffers hold
        stub = worker_pb2_grpc.WorkerStub(channel)
        for _ in range(2):
            assert len((await stub.Inspect(worker_pb2.InspectRequest())).member) == 8 << 20
        assert _came_as_frames(callee) == [True, True]
        assert callee.telemetry.value("tandem_closed_member_connections_total", reason="unread") == 0


async def test_no_frame_is_handled_after_one_that_must_not_come(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as (callee, _, channel):
        callee.is_open.set()
        await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest())
        assert channel.frames is not None and channel.frames.connection is not None
        connection = channel.frames.connection
        assert connection.transport is not None
        connection.transport.write(packed(Kind.BEGIN, 7, b"no begin") * 100)
        await connection.lost
    assert caplog.text.count("a connection of a member is closed") == 1


@pytest.mark.parametrize("keys", [KEYS, ClusterKeys(b"x" * 32)])
async def test_a_connection_that_is_not_proven_carries_no_call(keys: ClusterKeys) -> None:
    async with served() as (callee, server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.frame_port)
        begin = Begin("/tandem.internal.v1.Worker/Inspect", (), b"").packed()
        if keys is KEYS:
            writer.write(struct.pack(">IBI", len(begin), Kind.BEGIN, 1) + begin)
        else:
            writer.write(struct.pack(">IBI", 1 << 20, Kind.HELLO, 0))
        assert await reader.read() == b""
        writer.close()
        assert not callee.contexts


async def test_no_call_goes_to_a_process_that_does_not_prove_to_be_the_callee() -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.write(packed(Kind.PROOF, 0))  # as if the caller had verified this process
        received.set_result(await reader.read())
        writer.close()

    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    channel = FrameChannel("127.0.0.1", KEYS, "router-0@1")
    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server, asyncio.timeout(TIMEOUT_S):
        await channel.offer(server.sockets[0].getsockname()[1], "decode-0@1")
        assert channel.connection is None
        await received  # the connection is closed
        channel.close()


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PING_AFTER_S", 0.02)
    monkeypatch.setattr(frames, "PONG_WITHIN_S", 1.0)  # a busy machine may keep both ends from answering for a while
    async with served() as (callee, server, channel):
        callee.is_open.set()
        await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest())
        assert channel.frames is not None and (connection := channel.frames.connection) is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", server.frame_port)
        received = await reader.read()  # pings, and then the end
        assert received[4] == Kind.PING
        writer.close()
        assert channel.frames.connection is connection, "an end that answers stays connected"


class _SlowTransport(asyncio.Transport):
    """A connection whose bytes wait until the test takes them."""

    num_waiting = 0
    is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.num_waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_ping_behind_a_large_frame_is_waited_for_as_long_as_the_other_end_reads() -> None:
    """Over a link of 2 MB/s a frame of 16 MB takes longer than an answer may."""
    connection, transport, loop = _Recording(), _SlowTransport(), asyncio.get_running_loop()
    connection.connection_made(transport)
    connection.pause_writing()
    connection.send(Kind.MESSAGE, 1, bytes(frames.MAX_FRAME_BYTES))
    connection._heard_s -= frames.PING_AFTER_S
    for num_taken in (0, 10 << 20, 6 << 20):
        assert not transport.is_aborted
        transport.num_waiting -= num_taken
        connection._look_s = loop.time()
        connection._look()
    assert connection._pinged_s is not None and not transport.is_aborted
    connection._look_s = loop.time()
    connection._look()
    assert transport.is_aborted, "it has taken nothing since the last look"


def test_a_connection_whose_opening_is_cancelled_sends_no_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop closes its socket, but never reports its loss."""
    made: list[CallerConnection] = []

    async def cancel_an_opening() -> None:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
        channel, connection_made = FrameChannel("127.0.0.1", KEYS, "router@1", 0.0), CallerConnection.connection_made

        def cancelled(connection: CallerConnection, transport: asyncio.BaseTransport) -> None:
            connection_made(connection, transport)
            made.append(connection)
            channel.close()

        monkeypatch.setattr(CallerConnection, "connection_made", cancelled)
        await channel.offer(server.sockets[0].getsockname()[1], "decode-0@1")
        while calls := [task for task in asyncio.all_tasks() if task.get_name() == "calls to decode-0@1"]:
            await asyncio.wait(calls)
        server.close()
        [connection] = made
        assert connection._timer is not None and connection._timer.cancelled()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(cancel_an_opening())


class _Recording(FrameConnection):
    def __init__(self) -> None:
        super().__init__()
        self.is_proven = True
        self.found: list[tuple[int, int, bytes]] = []

    def on_frame(self, kind: int, number: int, body: bytes) -> None:
        self.found.append((kind, number, body))


def _cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 2, 7, 10, 64, 10_000])
async def test_frames_are_read_however_their_bytes_are_cut(size: int) -> None:
    sent = [(Kind.MESSAGE, number, bytes([number]) * (number * 7 % 50)) for number in range(1, 60)]
    data = b"".join(struct.pack(">IBI", len(body), kind, number) + body for kind, number, body in sent)
    connection = _Recording()
    for part in _cut(data, size):
        connection.data_received(part)
    assert connection.found == sent


def test_begins_and_statuses_are_read_as_they_were_packed() -> None:
    metadata = (("tandem-proof-bin", bytes(range(256))), ("traceparent", "ü" * 300))
    for request in (None, b"", b"request"):
        begin = Begin("/a.B/C", metadata, request)
        assert Begin.unpacked(begin.packed()) == begin
    status = Status(grpc.StatusCode.UNAVAILABLE, "gone: ü", (("tandem-reason", "draining"),))
    assert unpacked_status(packed_status(status)) == status


async def test_a_call_whose_requests_are_not_read_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_UNREAD_BYTES", 1_000_000)
    async with served() as (callee, server, channel):
        callee.is_open.set()
        await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest())
        assert channel.frames is not None and channel.frames.connection is not None
        transport = channel.frames.connection.transport
        assert transport is not None and server._frames is not None
        (connection,) = server._frames.connections
        call = kv_pb2_grpc.KvTransferStub(channel).HandOff()
        transport.pause_reading()  # so the callee cannot answer, and reads no further request
        message = kv_pb2.ImporterMessage(settle=kv_pb2.Settle(reason="r" * 10_000))
        while not connection.lost.done():
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(message)
            await asyncio.sleep(0)
