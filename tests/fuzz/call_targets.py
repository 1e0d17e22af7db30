"""Bytes on the connections that carry calls between members as frames: what a worker reads from any peer and from a
member, and a member from its worker.
"""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import grpc

from cluster.auth.connections import AcceptingConnection, OpeningConnection
from cluster.errors import MemberRefused
from cluster.serving.frame_channel import CallerConnection
from cluster.serving.frame_server import FrameServer
from cluster.serving.frames import CALLS, Begin, FrameConnection, Kind, Status, packed, packed_status, unpacked_status
from tests.contract.rigs.proofs import KEY
from tests.fuzz.target import Refused, Target, refusals

_MEMBER, _CALLER = "d0@1", "router-0@1"
_METHOD = "/tandem.internal.v1.Worker/Echo"
_BEGINS = (
    Begin(_METHOD, (("tandem-proof-bin", b"p" * 56), ("traceparent", "00-1")), b"request").packed(),
    Begin(_METHOD, (), None).packed(),
)
_STATUS = packed_status(Status(grpc.StatusCode.UNAVAILABLE, "gone", (("tandem-reason", "draining"),)))
_CALLER_FRAMES = (
    *(packed(Kind.BEGIN, number, begin) for number, begin in enumerate(_BEGINS, 1)),
    packed(Kind.MESSAGE, 2, b"a request"), packed(Kind.DONE, 2), packed(Kind.CANCEL, 1), packed(Kind.PING, 0),
)  # fmt: skip
_CALLEE_FRAMES = (
    packed(Kind.MESSAGE, 1, b"a response"), packed(Kind.STATUS, 1, packed_status(Status(grpc.StatusCode.OK))),
    packed(Kind.PING, 0), packed(Kind.STATUS, 1, _STATUS), packed(Kind.PONG, 0),
)  # fmt: skip
_UNASKED = packed(Kind.PROOF, 0)  # without the callee's own proof before it


def targets() -> Iterator[Target]:
    yield Target("call begin", _BEGINS, _read_begin, words=(_METHOD.encode(),))
    yield Target("call status", [_STATUS], _read_status)
    yield Target("frames of strangers", [packed(Kind.HELLO, 0, _opening().hello), b"", *_CALLER_FRAMES], _come_unproved)
    yield Target("frames of impostors", [b"", _UNASKED], _come_unasked, partial(_shuffled, (_UNASKED, *_CALLEE_FRAMES)))
    yield Target("frames of a caller", [b"".join(_CALLER_FRAMES)], _call, partial(_shuffled, _CALLER_FRAMES))
    yield Target("frames of a callee", [b"".join(_CALLEE_FRAMES)], _answer, partial(_shuffled, _CALLEE_FRAMES))


def _shuffled(frames: tuple[bytes, ...], draw: random.Random) -> bytes:
    return b"".join(draw.choices(frames, k=draw.randint(1, 12)))


def _opening() -> OpeningConnection:
    return OpeningConnection(KEY, transport=CALLS, importer=_CALLER, exporter=_MEMBER)


def _accepting() -> AcceptingConnection:
    return AcceptingConnection(KEY, transport=CALLS, exporter=_MEMBER)


def _read_begin(data: bytes) -> str:
    with refusals(ValueError, IndexError, struct.error):
        return f"{len(Begin.unpacked(data).metadata)} pairs"


def _read_status(data: bytes) -> str:
    with refusals(ValueError, IndexError, struct.error):
        return str(unpacked_status(data).code)


async def _echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


class _Echoes(grpc.GenericRpcHandler):
    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(_echo) if handler_call_details.method == _METHOD else None


class _Sending(FrameConnection):
    """An end that proves its side, sends what it is given and counts what comes back."""

    def __init__(self, data: bytes, opening: OpeningConnection | None, accepting: AcceptingConnection | None) -> None:
        super().__init__()
        self._data, self._opening, self._accepting = data, opening, accepting
        self.is_proven = True  # large frames may come
        self.num_frames = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._opening is not None:
            self.send(Kind.HELLO, 0, self._opening.hello)
        elif self._accepting is None:
            self._send_data()

    def on_frame(self, kind: int, number: int, body: bytes) -> None:
        if kind == Kind.HELLO and self._accepting is not None:
            self.send(Kind.CHALLENGE, 0, self._accepting.challenge(body))
        elif kind == Kind.CHALLENGE and self._opening is not None:
            self.send(Kind.PROOF, 0, self._opening.prove(body))
        elif kind == Kind.PROOF and self._accepting is not None:
            self.send(Kind.PROOF, 0)
        elif kind in (Kind.PROOF, Kind.BEGIN):
            self._send_data()
        else:
            self.num_frames += 1

    def _send_data(self) -> None:
        assert self.transport is not None
        self.transport.write(self._data)
        with suppress(OSError):  # the other end has closed the connection
            self.transport.write_eof()

    def on_lost(self) -> None:
        return


def _come_unproved(data: bytes) -> str:
    return _runner().run(_served(data, None))


def _call(data: bytes) -> str:
    return _runner().run(_served(data, _opening()))


async def _served(data: bytes, opening: OpeningConnection | None) -> str:
    """Send the bytes to a worker, after the proofs or in their place, and read all that it answers."""
    refusals_seen: list[MemberRefused] = []
    server = FrameServer([], _accepting, lambda refusal, peer: refusals_seen.append(refusal), lambda reason: None)
    server.add_handlers([_Echoes()])
    server.bind("127.0.0.1")
    await server.start()
    try:
        loop = asyncio.get_running_loop()
        _, sending = await loop.create_connection(lambda: _Sending(data, opening, None), "127.0.0.1", server.port)
        async with asyncio.timeout(10):
            await sending.lost
        if refusals_seen:
            raise Refused(str(refusals_seen[0].refusal))
        return f"{sending.num_frames} frames"
    finally:
        await server.stop(0)
        assert not server.connections, "a connection outlives its server"


def _come_unasked(data: bytes) -> str:
    """Let a member connect to a process that sends the bytes in place of its proof: no call may go there."""

    async def connect() -> str:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Sending(data, None, None), "127.0.0.1", 0)
        async with server, asyncio.timeout(10):
            port = server.sockets[0].getsockname()[1]
            _, connection = await loop.create_connection(lambda: CallerConnection(_opening()), "127.0.0.1", port)
            with suppress(OSError, MemberRefused):
                await connection.proven
                raise AssertionError("the connection of an impostor counts as proven")
            connection.abort()
            return "not proven"

    return _runner().run(connect())


def _answer(data: bytes) -> str:
    """Let a member make a call whose worker sends the bytes."""

    async def ask() -> str:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Sending(data, None, _accepting()), "127.0.0.1", 0)
        async with server, asyncio.timeout(10):
            port = server.sockets[0].getsockname()[1]
            _, connection = await loop.create_connection(lambda: CallerConnection(_opening()), "127.0.0.1", port)
            try:
                await connection.proven
                return f"{await connection.begin(_METHOD, b'request', 5.0, (), bytes)!r}"
            finally:
                connection.abort()

    with refusals(grpc.aio.AioRpcError, OSError):
        return _runner().run(ask())


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()
