"""Calls between members as frames on one TCP connection: the frames, and the code of both ends of a connection.

gRPC's Python costs each side several hundred microseconds for a call and for a message of a stream; a frame costs tens.
A frame is a head (length of its body, kind, number of its call) and a body. A connection begins with the proofs of both
ends (cluster/auth/connections.py) and then carries any number of calls at once:

    caller -> callee   BEGIN    method, metadata, the request if there is only one; MESSAGE, DONE for a stream of them
    callee -> caller   MESSAGE  for each response, then STATUS: code, details, trailing metadata
    caller -> callee   CANCEL   the caller waits for no answer, because of its deadline or its own decision

A side that has received nothing for `PING_AFTER_S` sends PING, and closes the connection if nothing comes within
`PONG_WITHIN_S`, unless the other end has read from what waits before the PING. Frames are sent at once and in order.
frame_server.py has the callee's end, frame_channel.py the caller's.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, cast

import grpc

CALLS = "calls"  # the name of these connections in their proofs
MAX_FRAME_BYTES = 16 << 20
MAX_UNREAD_BYTES = 64 << 20  # of messages of one call that were received and not read
MAX_UNSENT_BYTES = 64 << 20  # that wait for the other end to read, besides the largest frame
_MAX_UNPROVEN_BYTES = 1024  # that an end receives before the proof of the other one
_UNREAD_MESSAGE_BYTES = 64  # memory of an unread message besides its content
PING_AFTER_S, PONG_WITHIN_S = 10.0, 5.0
_LATE_S = 0.5  # a look that is later than this shows that this process was stopped or busy
_HEAD = struct.Struct(">IBI")
_BEGIN = struct.Struct(">?H")  # whether the request follows; bytes of the method
_PAIR = struct.Struct(">?HI")  # whether the value is bytes; lengths of key and value
_STATUS = struct.Struct(">BI")  # code, bytes of the details
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

Metadata = tuple[tuple[str, str | bytes], ...]


class Kind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    BEGIN = 4
    MESSAGE = 5
    DONE = 6
    STATUS = 7
    CANCEL = 8
    PING = 9
    PONG = 10


def packed(kind: Kind, number: int, body: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    return _HEAD.pack(len(body), kind, number) + body


class Status(NamedTuple):
    """The end of a call."""

    code: grpc.StatusCode
    details: str = ""
    trailing: Metadata = ()


@dataclass(frozen=True, slots=True)
class Begin:
    """The begin of a call. `request` None: its requests follow as messages."""

    method: str
    metadata: Metadata
    request: bytes | None

    def packed(self) -> bytes:
        method = self.method.encode()
        head = _BEGIN.pack(self.request is not None, len(method))
        return b"".join((head, method, _packed_pairs(self.metadata), self.request or b""))

    @staticmethod
    def unpacked(body: bytes) -> "Begin":
        """Raises ValueError, struct.error."""
        has_request, length = _BEGIN.unpack_from(body)
        at = _BEGIN.size + length
        method = body[_BEGIN.size : at].decode()
        metadata, at = _unpacked_pairs(body, at)
        return Begin(method, metadata, body[at:] if has_request else None)


def too_large(message: bytes) -> Status | None:
    """Return the status, as gRPC's, of a call with a message that does not fit into a frame; None if it fits."""
    if len(message) <= MAX_FRAME_BYTES:
        return None
    details = f"Sent message larger than max ({len(message)} vs. {MAX_FRAME_BYTES})"
    return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, details)


def packed_status(status: Status) -> bytes:
    details = status.details.encode(errors="replace")
    return _STATUS.pack(status.code.value[0], len(details)) + details + _packed_pairs(status.trailing)


def unpacked_status(body: bytes) -> Status:
    """Raises ValueError, struct.error."""
    code, length = _STATUS.unpack_from(body)
    at = _STATUS.size + length
    details = body[_STATUS.size : at].decode(errors="replace")
    return Status(_CODES.get(code, grpc.StatusCode.UNKNOWN), details, _unpacked_pairs(body, at)[0])


def _packed_pairs(pairs: Iterable[tuple[str, str | bytes]]) -> bytes:
    parts, number = list[bytes](), 0
    for name, content in pairs:
        key, value = name.encode(), content if isinstance(content, bytes) else content.encode(errors="replace")
        parts += _PAIR.pack(value is content, len(key), len(value)), key, value
        number += 1
    return bytes((number,)) + b"".join(parts)


def _unpacked_pairs(body: bytes, at: int) -> tuple[Metadata, int]:
    """Return the pairs that begin at `at`, and where they end."""
    pairs, number, at = list[tuple[str, str | bytes]](), body[at], at + 1
    for _ in range(number):
        is_bytes, key_length, length = _PAIR.unpack_from(body, at)
        at += _PAIR.size
        key, value = body[at : at + key_length].decode(), body[at + key_length : at + key_length + length]
        pairs.append((key, value if is_bytes else value.decode(errors="replace")))
        at += key_length + length
    return tuple(pairs), at


class Unread:
    """The messages of one call that were received and not read. They are bounded, because a connection is read for all
    of its calls at once."""

    __slots__ = ("_messages", "_num_bytes")

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def append(self, body: bytes) -> None:
        """Raises ValueError above the bound."""
        self._messages.append(body)
        self._num_bytes += _UNREAD_MESSAGE_BYTES + len(body)
        if self._num_bytes > MAX_UNREAD_BYTES:
            raise ValueError(f"a call has more than {MAX_UNREAD_BYTES} bytes that were not read")

    def popleft(self) -> bytes:
        body = self._messages.popleft()
        self._num_bytes -= _UNREAD_MESSAGE_BYTES + len(body)
        return body

    def clear(self) -> None:
        self._messages.clear()
        self._num_bytes = 0


class FrameConnection(asyncio.Protocol):
    """One end of a connection. A subclass handles the frames, in `on_frame`, and the end, in `on_lost`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()  # the beginning of a frame
        self._num_unproven_bytes = 0  # received before the proof
        self._heard_s = self._loop.time()
        self._pinged_s: float | None = None  # when the ping that is not answered was sent
        self._num_written = 0  # bytes
        self._num_taken: int | None = None  # of these by the system, at the last look; None: no bytes waited then
        self._look_s = 0.0  # when the next look is due
        self._timer: asyncio.TimerHandle | None = None
        self._resumed: asyncio.Future[None] | None = None  # while the other end reads too slowly
        self._largest_unsent_bytes = 0  # of the frames that may wait for the other end
        self.transport: asyncio.Transport | None = None
        self.is_proven = False
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def on_frame(self, kind: int, number: int, body: bytes) -> None:
        """Handle a frame. Raises ValueError, struct.error or MemberRefused for one that is not valid here."""
        raise NotImplementedError

    def on_lost(self) -> None:
        """Handle the end of the connection."""
        raise NotImplementedError

    def on_unsent(self) -> None:
        """Handle more than `MAX_UNSENT_BYTES`, besides the largest frame, that the other end does not read, as of many
        calls with one answer each, which do not wait for it. The connection is closed then."""

    def on_too_large(self) -> None:
        """Handle more bytes than may come, in one frame or before the proof. The connection is closed then."""

    def send(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """Send a frame; without effect once the connection is closed. A frame of any size may wait: what waits besides
        the largest frame is bounded, so a connection whose other end reads never ends because of one frame."""
        if self.transport is None or self.transport.is_closing():
            return
        largest_bytes = self._largest_unsent_bytes if self.is_paused else 0
        if self.is_paused and self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES + largest_bytes:
            self.on_unsent()
            self.abort()
            return
        frame = packed(kind, number, body)
        self._largest_unsent_bytes = max(largest_bytes, len(frame))
        self._num_written += len(frame)
        self.transport.write(frame)

    @property
    def is_paused(self) -> bool:
        """Return whether the other end reads too slowly: await `drained` before more messages."""
        return self._resumed is not None

    async def drained(self) -> None:
        while self._resumed is not None:
            await asyncio.shield(self._resumed)

    def close(self) -> None:
        """Close the connection once everything is sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self._timer is not None:
            self._timer.cancel()  # uvloop reports no loss of a connection whose opening was cancelled
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._look_in(PING_AFTER_S)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        self.on_lost()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self._resumed = self._loop.create_future()

    def resume_writing(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._heard_s, self._pinged_s = self._loop.time(), None
        if not self.is_proven:
            self._num_unproven_bytes += len(data)
            if self._num_unproven_bytes > _MAX_UNPROVEN_BYTES:
                self._refuse()
                return
        if self._received:
            self._received += data
            rest = self._parse(self._received)
            del self._received[:rest]
        elif (rest := self._parse(data)) < len(data):
            self._received += data[rest:]

    def _parse(self, data: bytes | bytearray) -> int:
        """Handle all whole frames, and return where the next one begins. None is handled on a closed connection."""
        at, end = 0, len(data)
        while end - at >= _HEAD.size:
            if self.transport is not None and self.transport.is_closing():
                return end
            length, kind, number = _HEAD.unpack_from(data, at)
            if length > (MAX_FRAME_BYTES if self.is_proven else _MAX_UNPROVEN_BYTES):
                self._refuse()
                return end
            begin, next_at = at + _HEAD.size, at + _HEAD.size + length
            if next_at > end:
                break
            at = next_at
            if kind == Kind.PING:
                if not self.is_paused:  # else the other end has frames to read, which show that this one lives
                    self.send(Kind.PONG, 0)
            elif kind != Kind.PONG:
                self.on_frame(kind, number, bytes(data[begin:next_at]))
        return at

    def _refuse(self) -> None:
        self.on_too_large()
        self.abort()

    def _look_in(self, delay_s: float) -> None:
        self._look_s = self._loop.time() + delay_s
        self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        """Send a ping on a silent connection, and close it if the last one was not answered in time."""
        now_s, takes_bytes = self._loop.time(), self._takes_bytes()
        if self._pinged_s is not None and now_s - self._look_s < _LATE_S:
            if takes_bytes:
                self._look_in(PONG_WITHIN_S)
            else:
                self.abort()
            return
        silent_s = now_s - self._heard_s
        if silent_s < PING_AFTER_S:
            self._look_in(PING_AFTER_S - silent_s)
            return
        self._pinged_s = now_s
        self.send(Kind.PING, 0)
        self._look_in(PONG_WITHIN_S)

    def _takes_bytes(self) -> bool:
        """Return whether the other end has read since the last look: bytes waited then, so the system's buffers were
        full, and it has taken some of them since."""
        num_unsent = self.transport.get_write_buffer_size() if self.transport is not None else 0
        before, taken = self._num_taken, self._num_written - num_unsent
        self._num_taken = taken if num_unsent else None
        return before is not None and taken > before
