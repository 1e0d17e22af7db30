"""Bytes on the sockets over which KV moves: what an exporter reads from any peer, and an importer from its exporter."""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from functools import cache

from cluster.auth.connections import (
    HELLO_BYTES,
    PROOF_BYTES,
    AcceptingConnection,
    GrantedRequest,
    GrantingConnection,
    OpeningConnection,
)
from cluster.errors import MemberRefused
from engine.kv.pool import KvPool
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nccl import messages as nccl
from kvtransfer.transports.shm.pool_file import GEOMETRY
from kvtransfer.transports.shm.transport import ShmExporter, ShmImporter
from kvtransfer.transports.tcp.exporting import ANNOUNCEMENT, ANSWER, MAGIC, pack_endpoint, parse_endpoint
from kvtransfer.transports.tcp.transport import TcpExporter, TcpImporter
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.proofs import KEY, PROOFS
from tests.contract.rigs.transport_rig import EPOCH
from tests.fuzz.target import Refused, Target, refusals

_TOKEN = b"k" * 16
_ASKED = struct.pack("<16sI", EPOCH.ticket_id, EPOCH.attempt)
_NCCL_ENTRY = nccl.Entry(EPOCH.ticket_id, 1, _TOKEN)
_NCCL = (
    nccl.Hello(b"i" * 16, 22_000, _NCCL_ENTRY), nccl.Ready(22_000), nccl.Refused("no"), nccl.UniqueId(b"u" * 128),
    nccl.Warm(), nccl.Read(_NCCL_ENTRY, 1, (nccl.Run(0, 2), nccl.Run(5, 1))), nccl.Answer(b"t" * 16, 1, 1, 64, "no"),
)  # fmt: skip


def targets() -> Iterator[Target]:
    yield Target("tcp announcements", _announcements, _announce, words=(MAGIC, EPOCH.ticket_id))
    yield Target("tcp answers", _answers, _answer_read, words=(MAGIC,))
    yield Target("nccl control messages", [_packed(message) for message in _NCCL], _read_nccl, _made_nccl)
    yield Target("shm requests", _shm_requests, _ask_shm)
    yield Target("shm geometry", _geometries, _answer_shm)
    yield Target("kv connection hello", [_opening().hello], _challenge, words=(b"TMP1",))
    yield Target("kv connection challenge", [_answered(_opening().hello)], _prove, words=(b"TMP1",))
    yield Target("kv connection proof", [_opening().prove(_answered(_opening().hello))], _verify, words=(b"TMP1",))
    yield Target("kv connection request", [_granted("tcp").message], _answer_request, words=(b"TMP1",))
    yield Target("kv connection answer", [_answer_of(_granted("tcp").message)], _verify_answer, words=(b"TMP1",))
    yield Target("tcp strangers", [_opening().hello, _opening().hello * 2, b"", *_announcements()], _come_unproved)


@cache
def _opening() -> OpeningConnection:
    return OpeningConnection(KEY, transport="tcp", importer="d0@1", exporter=str(EPOCH.exporter))


@cache
def _accepting() -> AcceptingConnection:
    return AcceptingConnection(KEY, transport="tcp", exporter=str(EPOCH.exporter))


@cache
def _answered(hello: bytes) -> bytes:
    return _accepting().challenge(hello)


def _challenge(data: bytes) -> str:
    with refusals(MemberRefused):
        AcceptingConnection(KEY, transport="tcp", exporter=str(EPOCH.exporter)).challenge(data)
        return "challenge"


def _prove(data: bytes) -> str:
    with refusals(MemberRefused):
        return f"{len(_opening().prove(data))} bytes"


def _verify(data: bytes) -> str:
    accepting = copy(_accepting())  # a challenge accepts one proof
    with refusals(MemberRefused):
        accepting.verify(data)
        return "member"


@cache
def _granted(transport: str) -> GrantedRequest:
    return PROOFS.request(transport, EPOCH.exporter, grant=_TOKEN, content=_ASKED)


def _answer_of(request: bytes, transport: str = "tcp") -> bytes:
    granting = GrantingConnection(KEY, transport=transport, exporter=str(EPOCH.exporter))
    return granting.answer(request, lambda content: _TOKEN if content == _ASKED else None)[1]


def _answer_request(data: bytes) -> str:
    try:
        return f"{len(_answer_of(data))} bytes"
    except MemberRefused as refusal:  # its text has the name in the request
        raise Refused(refusal.refusal) from refusal


def _verify_answer(data: bytes) -> str:
    with refusals(MemberRefused):
        _granted("tcp").verify(data)
        return "member"


def _come_unproved(data: bytes) -> str:
    answer = _announce(data, is_proved=False)
    assert answer.startswith("0 blocks"), "a stranger has read a block"
    return answer


def _announcements() -> list[bytes]:
    _, token = parse_endpoint(_exporter().grant(EPOCH))
    read = ANNOUNCEMENT.pack(MAGIC, EPOCH.ticket_id, EPOCH.attempt, 1, token, 2) + struct.pack("<2I", 0, 3)
    return [read, read + read, read[:-8] + struct.pack("<2I", 0, 8)]


def _answers() -> list[bytes]:
    answer = ANSWER.pack(MAGIC, EPOCH.ticket_id, EPOCH.attempt, 1, False, _pool().block_bytes)
    return [answer + bytes(_pool().block_bytes), answer[:-8] + bytes(8)]


def _shm_requests() -> list[bytes]:
    return [_granted("shm").message]


def _geometries() -> list[bytes]:
    geometry = GEOMETRY.pack(8, _pool().block_bytes, 8 * _pool().block_bytes)
    return [geometry, geometry[:-1]]


def _packed(message: nccl.Message) -> bytes:
    kind, body = nccl._pack(message)
    return nccl._HEADER.pack(b"TNC1", kind, len(body)) + body


def _made_nccl(draw: random.Random) -> bytes:
    """Return a valid header before a body of any length."""
    body = draw.randbytes(draw.choice((0, 4, 8, 36, 40, 48, 56, 128, 300)))
    return nccl._HEADER.pack(b"TNC1", draw.randrange(1, 8), len(body)) + body


def _read_nccl(data: bytes) -> str:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(5)
        threading.Thread(target=_send, args=(theirs, data), daemon=True).start()
        with refusals(TransportError, OSError):
            return type(nccl.receive_message(ours)).__name__


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _announce(data: bytes, *, is_proved: bool = True) -> str:
    """Send the bytes to an exporter, after proofs or in their place, and read all that it answers."""
    num_bytes = 0
    with socket.create_connection(("127.0.0.1", _exporter()._threads.port), 10) as client:
        try:
            if is_proved:
                PROOFS.open(client, "tcp", EPOCH.exporter)
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(1 << 16):
                num_bytes += len(piece)
        except OSError:
            raise Refused("reset") from None
    blocks, rest = divmod(num_bytes, _pool().block_bytes)
    return f"{blocks} blocks, {rest // ANSWER.size} answers"


def _answer_read(data: bytes) -> str:
    """Let an importer read a block from an exporter that sends the bytes."""
    before = bytes(_target().raw.numpy())

    async def read() -> str:
        importer = TcpImporter(memory=_target(), proofs=PROOFS, stall_timeout_s=5.0)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            answering = threading.Thread(target=_answer_one, args=(listener, data), daemon=True)
            answering.start()
            try:
                channel = await importer.open_channel(
                    EPOCH, pack_endpoint(_TOKEN, "127.0.0.1", listener.getsockname()[1])
                )
                await channel.read([0], [1])
            finally:
                await importer.close()
                await asyncio.to_thread(answering.join)
        return "read"

    with refusals(TransportError):
        outcome = _runner().run(read())
    after, size = bytes(_target().raw.numpy()), _target().block_bytes
    assert (before[:size], before[2 * size :]) == (after[:size], after[2 * size :]), "a read wrote to another block"
    return outcome


def _answer_one(listener: socket.socket, data: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(5)
        try:
            PROOFS.accept(connection, "tcp")
            connection.recv(ANNOUNCEMENT.size + 4)
        except OSError:
            return
        _send(connection, data)


def _ask_shm(data: bytes) -> str:
    async def ask() -> str:
        exporter = _shm_exporter()
        exporter._tokens[EPOCH.ticket_id, EPOCH.attempt] = _TOKEN  # each admits one connection
        assert exporter._directory is not None
        reader, writer = await asyncio.open_unix_connection(str(exporter._directory.path / "pool"))
        try:
            writer.write(data)
            writer.write_eof()
            return f"{len(await reader.read(4096))} bytes"
        except OSError:
            raise Refused("reset") from None
        finally:
            writer.close()

    return _runner().run(ask())


def _answer_shm(data: bytes) -> str:
    """Let an importer map a pool whose exporter sends the bytes with a sealed file, and read from it."""

    async def read() -> str:
        directory = _shm_exporter()._directory
        assert directory is not None
        path = directory.path / "lies"
        path.unlink(missing_ok=True)
        importer = ShmImporter(memory=_target(), proofs=PROOFS)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            answering = threading.Thread(target=_pass_file, args=(listener, data), daemon=True)
            answering.start()
            try:
                channel = await importer.open_channel(EPOCH, _TOKEN + str(path).encode())
                await channel.read([0], [1])
                with suppress(TransportError):  # past every pool
                    await channel.read([1 << 31], [1])
            finally:
                await importer.close()
                await asyncio.to_thread(answering.join)
        return "read"

    with refusals(TransportError):
        return _runner().run(read())


def _pass_file(listener: socket.socket, data: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(5)
        request = connection.recv(HELLO_BYTES + len(_ASKED) + PROOF_BYTES, socket.MSG_WAITALL)
        socket.send_fds(connection, [_answer_of(request, "shm"), data], [_shm_exporter()._read_only])
        with suppress(ConnectionResetError):  # the importer has left bytes unread
            connection.recv(1)


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


@cache
def _pool() -> KvPool:
    return random_pool(8, seed=1)


@cache
def _target() -> KvPool:
    return random_pool(8, seed=2)


@cache
def _exporter() -> TcpExporter:
    exporter = TcpExporter(
        memory=_pool(), proofs=PROOFS, host="127.0.0.1", advertise_host="127.0.0.1", send_timeout_s=5.0
    )
    _runner().run(exporter.start())
    return exporter


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs on a thread until the process ends, for servers that must answer while an input is
    tried.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@cache
def _shm_exporter() -> ShmExporter:
    exporter = ShmExporter(memory=_pool(), proofs=PROOFS)
    asyncio.run_coroutine_threadsafe(exporter.start(), _loop()).result(20)
    return exporter
