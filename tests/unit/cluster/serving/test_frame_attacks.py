"""Attacks on connections for frames, by strangers and by members, between real sockets."""

import asyncio
import gc
import secrets
import socket
from collections.abc import Awaitable, Callable

import grpc
import pytest

from cluster.auth import gate
from cluster.auth.connections import AcceptingConnection, OpeningConnection
from cluster.auth.gate import PROOF
from cluster.auth.keys import ClusterKeys, Secrets
from cluster.auth.member_channel import MemberChannel, SignedStream
from cluster.auth.sessions import OpeningSession, Refusal, Session
from cluster.serving import frame_server, frames
from cluster.serving.frame_channel import CallerConnection, FrameCall
from cluster.serving.frames import CALLS, Begin, FrameConnection, Kind, Unread, packed
from cluster.serving.serving import GrpcServer
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.unit.cluster.serving.frame_rig import CALLEE, KEYS, Callee, served, until_true

_INSPECT, _DRAIN = "/tandem.internal.v1.Worker/Inspect", "/tandem.internal.v1.Worker/DrainWorker"
_OWN = "attacker@0"
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _opening(keys: ClusterKeys = KEYS, callee: str = str(CALLEE), transport: str = CALLS) -> OpeningConnection:
    return OpeningConnection(keys, transport=transport, importer=_OWN, exporter=callee)


async def _challenge(streams: _Streams, opening: OpeningConnection) -> bytes:
    reader, writer = streams
    writer.write(packed(Kind.HELLO, 0, opening.hello))
    length, kind, _ = frames._HEAD.unpack(await reader.readexactly(frames._HEAD.size))
    assert kind == Kind.CHALLENGE
    return await reader.readexactly(length)


async def _with_a_reflected_proof(streams: _Streams, port: int) -> None:
    challenge = await _challenge(streams, _opening())
    streams[1].write(packed(Kind.PROOF, 0, challenge[:4] + challenge[-32:]))


async def _with_a_proof_for_another_connection(streams: _Streams, port: int) -> None:
    other, opening = await asyncio.open_connection("127.0.0.1", port), _opening()
    proof = opening.prove(await _challenge(other, opening))
    await _challenge(streams, opening)
    streams[1].write(packed(Kind.PROOF, 0, proof))
    other[1].close()


async def _with_a_proof_for_another_transport(streams: _Streams, port: int) -> None:
    kv, exporter = _opening(transport="tcp"), AcceptingConnection(KEYS, transport="tcp", exporter=str(CALLEE))
    proof = kv.prove(exporter.challenge(kv.hello))
    await _challenge(streams, kv)
    streams[1].write(packed(Kind.PROOF, 0, proof))


async def _without_a_greeting(streams: _Streams, port: int) -> None:
    streams[1].write(packed(Kind.PROOF, 0, b"TMP1" + bytes(32)))


async def _with_a_call_before_the_proof(streams: _Streams, port: int) -> None:
    await _challenge(streams, _opening())
    streams[1].write(packed(Kind.BEGIN, 1, Begin(_INSPECT, (), b"").packed()))


async def _with_greetings_only(streams: _Streams, port: int) -> None:
    streams[1].write(packed(Kind.HELLO, 0, _opening().hello) * 100)


async def _with_pings_only(streams: _Streams, port: int) -> None:
    streams[1].write(packed(Kind.PING, 0) * 10_000)


async def _in_another_protocol(streams: _Streams, port: int) -> None:
    streams[1].write(b"GET / HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(
    ("come", "reason"),
    [
        (_with_a_reflected_proof, Refusal.WRONG_PROOF),
        (_with_a_proof_for_another_connection, Refusal.WRONG_PROOF),
        (_with_a_proof_for_another_transport, Refusal.WRONG_PROOF),
        (_without_a_greeting, Refusal.WRONG_PROOF),
        (_with_a_call_before_the_proof, Refusal.NO_PROOF),
        (_with_greetings_only, Refusal.NO_PROOF),
        (_with_pings_only, Refusal.NO_PROOF),
        (_in_another_protocol, Refusal.NO_PROOF),
    ],
)
async def test_a_peer_without_the_proofs_is_refused_and_counted(
    come: Callable[[_Streams, int], Awaitable[None]], reason: str
) -> None:
    async with served() as (callee, server, _):
        streams = await asyncio.open_connection("127.0.0.1", server.frame_port)
        await come(streams, server.frame_port)
        try:
            while await streams[0].read(65_536):
                pass
        except ConnectionError:  # the worker had not read everything
            pass
        streams[1].close()
        assert callee.telemetry.value("tandem_refused_members_total", reason=reason) == 1
        assert not callee.contexts


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def test_strangers_that_come_together_leave_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_server, "_PROVE_S", 1_000.0)  # none is closed because of its age
    async with served() as (_, server, _channel):
        together = [socket.create_connection(("127.0.0.1", server.frame_port)) for _ in range(90)]  # while it waits
        await until_true(lambda: sum(map(_is_closed, together)) == 90 - 64, what="the end of all but the last ones")
        assert not any(map(_is_closed, together[-64:]))
        for connection in together:
            connection.close()


async def _frames_of(
    server: GrpcServer, channel: MemberChannel, callee: Callee
) -> tuple[FrameConnection, CallerConnection]:
    """Return both ends of the channel's connection."""
    callee.is_open.set()
    await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest())
    callee.is_open.clear()
    callee.contexts.clear()
    assert channel.frames is not None and channel.frames.connection is not None and server._frames is not None
    (connection,) = server._frames.connections
    return connection, channel.frames.connection


async def _session(channel: MemberChannel, keys: ClusterKeys = KEYS) -> Session:
    opening = OpeningSession(keys, _OWN)
    return opening.opened(await worker_pb2_grpc.MemberAuthStub(channel._channel).OpenSession(opening.request()))


async def _outcome(connection: CallerConnection, method: str, body: bytes, proof: bytes | None) -> str:
    """Make a call with this proof, and return its refusal; empty: it was served."""
    metadata = ((PROOF, proof),) if proof is not None else ()
    try:
        await connection.begin(method, body, None, metadata, bytes)
    except grpc.aio.AioRpcError as error:
        return str(error.details()).partition(":")[0]
    return ""


async def test_each_call_on_a_proven_connection_needs_its_own_proof_under_a_valid_secret() -> None:
    old, new = secrets.token_bytes(32), secrets.token_bytes(32)
    valid = [Secrets(old)]
    keys = ClusterKeys(valid[0], lambda is_urgent: valid[0])
    async with served(keys=keys) as (callee, server, channel), served(keys=keys) as (_, _, other_channel):
        _, connection = await _frames_of(server, channel, callee)
        callee.is_open.set()
        session, elsewhere = await _session(channel, keys), await _session(other_channel, keys)
        own = Session(secrets.token_bytes(16), secrets.token_bytes(32), "", b"")  # a key of the attacker's own
        assert await _outcome(connection, _INSPECT, b"", None) == Refusal.NO_PROOF
        assert await _outcome(connection, _INSPECT, b"", own.prove(_INSPECT, b"")) == Refusal.UNKNOWN_SESSION
        assert await _outcome(connection, _INSPECT, b"", elsewhere.prove(_INSPECT, b"")) == Refusal.UNKNOWN_SESSION
        assert await _outcome(connection, _INSPECT, b"", session.prove(_DRAIN, b"")) == Refusal.WRONG_PROOF
        assert await _outcome(connection, _INSPECT, b"", session.prove(_INSPECT, b"x")) == Refusal.WRONG_PROOF
        proof = session.prove(_INSPECT, b"")
        assert await _outcome(connection, _INSPECT, b"", proof) == ""
        assert await _outcome(connection, _INSPECT, b"", proof) == Refusal.REPLAYED
        valid[0] = Secrets(new, other=old)
        assert await _outcome(connection, _INSPECT, b"", session.prove(_INSPECT, b"")) == ""
        valid[0] = Secrets(new)
        assert await _outcome(connection, _INSPECT, b"", session.prove(_INSPECT, b"")) == Refusal.UNKNOWN_SESSION
        assert not connection.lost.done(), "the connection stays open"


class _Rotated:
    """Keys whose secrets a test replaces. `num_missed` counts the look-ups of secrets that are not valid."""

    def __init__(self) -> None:
        self.secrets = Secrets(secrets.token_bytes(32))
        self.num_missed = 0
        self.keys = ClusterKeys(self.secrets, self._reread)

    def drop(self) -> None:
        self.secrets = Secrets(secrets.token_bytes(32))

    def _reread(self, is_urgent: bool) -> Secrets:
        self.num_missed += is_urgent
        return self.secrets


@pytest.mark.parametrize("has_frames", [True, False])
async def test_a_stream_under_a_dropped_secret_ends_and_its_caller_opens_another_one(
    has_frames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_LOOK_S", 0.01)
    monkeypatch.setattr(gate, "DROPPED_GRACE_S", 0.0)
    rotated = _Rotated()
    async with served(keys=rotated.keys) as (_, _, channel):
        caller = channel if has_frames else MemberChannel(channel._channel, rotated.keys, "router-0@1")
        stub = kv_pb2_grpc.KvTransferStub(caller)
        former = stub.HandOff()
        await _answered(former)
        rotated.drop()
        with pytest.raises(grpc.aio.AioRpcError, match="was dropped; open the stream again") as ended:
            await former.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await _answered(stub.HandOff())


async def test_a_stream_under_a_dropped_secret_goes_on_in_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_LOOK_S", 0.01)
    monkeypatch.setattr(gate, "DROPPED_GRACE_S", 1_000.0)
    rotated = _Rotated()
    async with served(keys=rotated.keys) as (_, _, channel):
        call = kv_pb2_grpc.KvTransferStub(channel).HandOff()
        await _answered(call)
        rotated.drop()
        await until_true(lambda: rotated.num_missed > 3, what="several looks at the stream")
        await _answered(call)


async def test_a_stream_under_a_dropped_secret_ends_although_its_caller_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "_LOOK_S", 0.01)
    monkeypatch.setattr(gate, "DROPPED_GRACE_S", 0.0)
    rotated = _Rotated()
    async with served(keys=rotated.keys) as (callee, server, channel):
        callees, callers = await _frames_of(server, channel, callee)
        assert callers.transport is not None
        callers.transport.pause_reading()
        call = worker_pb2_grpc.WorkerStub(channel).SubscribeCacheEvents(worker_pb2.SubscribeCacheEventsRequest())
        await until_true(lambda: callees.is_paused, what="a pause of the callee")
        rotated.drop()
        await until_true(lambda: callee.num_ended == 1, what="the release")
        call.cancel()


@pytest.mark.parametrize("has_frames", [True, False])
async def test_a_caller_ends_its_stream_to_a_callee_that_keeps_a_dropped_secret_and_makes_no_other_call_to_it(
    has_frames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_LOOK_S", 0.01)
    monkeypatch.setattr(gate, "DROPPED_GRACE_S", 0.0)
    rotated = _Rotated()
    stolen = ClusterKeys(rotated.secrets)
    async with served(keys=stolen, callers=rotated.keys) as (callee, _, channel):
        caller = channel if has_frames else MemberChannel(channel._channel, rotated.keys, "router-0@1")
        stub = kv_pb2_grpc.KvTransferStub(caller)
        stream = stub.HandOff()
        await _answered(stream)
        rotated.drop()
        with pytest.raises(grpc.aio.AioRpcError, match="was dropped; open the stream again"):
            await stream.read()  # although no message comes
        await until_true(lambda: callee.num_handoffs == 0, what="the end of the stream at the callee")
        for again in (stub.HandOff().read(), worker_pb2_grpc.WorkerStub(caller).Inspect(worker_pb2.InspectRequest())):
            with pytest.raises(grpc.aio.AioRpcError, match=Refusal.UNKNOWN_KEY):
                await again
        assert not callee.contexts


async def test_a_caller_reads_its_stream_under_a_dropped_secret_in_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_LOOK_S", 0.01)
    monkeypatch.setattr(gate, "DROPPED_GRACE_S", 1_000.0)
    rotated = _Rotated()
    stolen = ClusterKeys(rotated.secrets)
    async with served(keys=stolen, callers=rotated.keys) as (_, _, channel):
        stream = kv_pb2_grpc.KvTransferStub(channel).HandOff()
        await _answered(stream)
        rotated.drop()
        await until_true(lambda: rotated.num_missed > 3, what="several looks at the stream")
        await _answered(stream)
        stream.cancel()


async def _answered(call: SignedStream) -> None:
    await call.write(kv_pb2.ImporterMessage(settle=kv_pb2.Settle()))
    assert (await call.read()).HasField("refused")


async def test_a_member_that_reads_nothing_is_sent_no_answers_to_its_pings() -> None:
    async with served() as (callee, server, channel):
        callees, callers = await _frames_of(server, channel, callee)
        assert callers.transport is not None and callees.transport is not None
        callers.transport.pause_reading()
        call = worker_pb2_grpc.WorkerStub(channel).SubscribeCacheEvents(worker_pb2.SubscribeCacheEventsRequest())
        await until_true(lambda: callees.is_paused, what="a pause of the callee")
        num_waiting = callees.transport.get_write_buffer_size()
        callers.transport.write(packed(Kind.PING, 0) * 50_000)
        asking = asyncio.ensure_future(worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest()))
        await until_true(lambda: bool(callee.contexts), what="the call behind the pings")
        assert callees.transport.get_write_buffer_size() <= num_waiting
        asking.cancel()
        call.cancel()


async def test_a_member_that_reads_no_answers_loses_its_connection_at_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frames, "MAX_UNSENT_BYTES", 1_000_000)
    async with served() as (callee, server, channel):
        callees, callers = await _frames_of(server, channel, callee)
        assert callers.transport is not None and callees.transport is not None
        callee.is_open.set()
        callee.answer.member = "m" * 50_000
        session, calls = await _session(channel), list[FrameCall]()
        callers.transport.pause_reading()
        while not callees.lost.done():
            calls.append(callers.begin(_INSPECT, b"", None, ((PROOF, session.prove(_INSPECT, b"")),), bytes))
            assert callees.transport.get_write_buffer_size() < 1_200_000
            await asyncio.sleep(0)
        assert callee.telemetry.value("tandem_closed_member_connections_total", reason="unread") == 1
        assert caplog.text.count("a connection of a member is closed") == 1
        callers.transport.resume_reading()
        await callers.lost
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await calls[-1]
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest())


async def test_a_call_that_was_cancelled_releases_its_resources_although_its_connection_breaks_meanwhile() -> None:
    async with served() as (callee, server, channel):
        callees, callers = await _frames_of(server, channel, callee)
        callee.may_release.clear()
        asking = asyncio.ensure_future(worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest()))
        await until_true(lambda: bool(callee.contexts), what="the call at the callee")
        asking.cancel()
        await until_true(lambda: callee.num_cancelled == 1, what="the cancellation at the callee")
        callers.abort()
        await callees.lost
        callee.may_release.set()
        await until_true(lambda: callee.num_released == 1, what="the release")


async def test_a_stream_whose_caller_does_not_read_releases_its_resources_when_its_connection_breaks() -> None:
    async with served() as (callee, server, channel):
        callees, callers = await _frames_of(server, channel, callee)
        assert callers.transport is not None
        callers.transport.pause_reading()
        call = worker_pb2_grpc.WorkerStub(channel).SubscribeCacheEvents(worker_pb2.SubscribeCacheEventsRequest())
        await until_true(lambda: callees.is_paused, what="a pause of the callee")
        gc.disable()
        try:
            callers.abort()
            await until_true(lambda: callee.num_ended == 1, what="the release")
        finally:
            gc.enable()
        call.cancel()


async def test_a_message_that_fits_no_frame_ends_its_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100_000)
    async with served() as (callee, server, channel):
        _, connection = await _frames_of(server, channel, callee)
        callee.event.member = "m" * 100_001
        events = worker_pb2_grpc.WorkerStub(channel).SubscribeCacheEvents(worker_pb2.SubscribeCacheEventsRequest())
        hand_off = kv_pb2_grpc.KvTransferStub(channel).HandOff()
        await hand_off.write(kv_pb2.ImporterMessage(settle=kv_pb2.Settle(reason="r" * 100_001)))
        for call in (events, hand_off):
            with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as failed:
                await call.read()
            assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        callee.is_open.set()
        await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest())
        assert channel.frames is not None and channel.frames.connection is connection


def test_empty_messages_that_are_not_read_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_UNREAD_BYTES", 1_000)
    unread = Unread()
    with pytest.raises(ValueError, match="not read"):
        list(map(unread.append, [b""] * 1_000))
