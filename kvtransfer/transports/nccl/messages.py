"""The messages that the two sides of an NCCL link exchange over their control connection, and their form in bytes.

The importer asks and the exporter answers, one exchange at a time:

    Hello -> Ready | Refused, Ready -> UniqueId, then both call the library; Warm -> once its first message has arrived
    Read -> Answer, and the blocks by NCCL; numbered from 1, for NCCL matches by order alone
"""

import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.sockets import receive

UNIQUE_ID_BYTES = 128
TOKEN_BYTES = 16
IDENTITY_BYTES = 16

_HEADER = struct.Struct("<4sBI")  # magic, kind, bytes that follow
_MAGIC = b"TNC1"
_EPOCH = struct.Struct(f"<16sI{TOKEN_BYTES}s")  # ticket id, attempt, token
_RUN = struct.Struct("<II")
_MAX_RUNS = 1 << 22
_MAX_BYTES = _RUN.size * _MAX_RUNS + 256


class Refusal(TransportError):
    """The peer refuses, for a reason that is not a failure of the link."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The epoch of a request, and the token that proves that it was admitted."""

    ticket_id: bytes
    attempt: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of the exporter's pool."""

    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Hello:
    importer: bytes  # names one start of one importer
    version: int  # of its NCCL
    entry: Entry


@dataclass(frozen=True, slots=True)
class Ready:
    version: int


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class UniqueId:
    unique_id: bytes


@dataclass(frozen=True, slots=True)
class Warm:
    """The first message has arrived, so the connections are built."""


@dataclass(frozen=True, slots=True)
class Read:
    entry: Entry
    number: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a Read. Unless it has a refusal, the blocks follow by NCCL."""

    ticket_id: bytes
    attempt: int
    number: int
    num_bytes: int
    refusal: str = ""


Message = Hello | Ready | Refused | UniqueId | Warm | Read | Answer
_Expected = TypeVar("_Expected", bound=Message)


def send(connection: socket.socket, message: Message) -> None:
    """Send one message. Raises OSError."""
    kind, body = _pack(message)
    connection.sendall(_HEADER.pack(_MAGIC, kind, len(body)) + body)


def receive_message(connection: socket.socket) -> Message | None:
    """Return the next message, or None at the end of the connection. Raises OSError, TransportError."""
    header = receive(connection, _HEADER.size)
    if header is None:
        return None
    magic, kind, num_bytes = _HEADER.unpack(header)
    if magic != _MAGIC or kind not in _UNPACK or num_bytes > _MAX_BYTES:
        raise TransportError("the message is damaged or belongs to another transport")
    body = receive(connection, num_bytes) if num_bytes else b""
    if body is None:
        raise TransportError("the peer ended the connection in the middle of a message")
    try:
        return _UNPACK[kind](body)
    except (struct.error, ValueError) as error:
        raise TransportError(f"the peer sent a malformed message: {error}") from error


def expect(connection: socket.socket, kind: type[_Expected]) -> _Expected:
    """Return the next message, which must be of this kind. Raises OSError, TransportError."""
    message = receive_message(connection)
    if isinstance(message, kind):
        return message
    if isinstance(message, Refused):
        raise Refusal(message.reason)
    said = "ended the connection" if message is None else f"said {type(message).__name__}"
    raise TransportError(f"the peer {said} where {kind.__name__} was expected")


def _pack(message: Message) -> tuple[int, bytes]:
    match message:
        case Hello(importer, version, entry):
            return 1, struct.pack(f"<{IDENTITY_BYTES}sI", importer, version) + _pack_entry(entry)
        case Ready(version):
            return 2, struct.pack("<I", version)
        case Refused(reason):
            return 3, reason.encode()
        case UniqueId(unique_id):
            return 4, unique_id
        case Warm():
            return 5, b""
        case Read(entry, number, runs):
            packed_runs = b"".join(_RUN.pack(run.first_block, run.num_blocks) for run in runs)
            return 6, _pack_entry(entry) + struct.pack("<I", number) + packed_runs
        case Answer(ticket_id, attempt, number, num_bytes, refusal):
            return 7, struct.pack("<16sIIQ", ticket_id, attempt, number, num_bytes) + refusal.encode()


def _pack_entry(entry: Entry) -> bytes:
    return _EPOCH.pack(entry.ticket_id, entry.attempt, entry.token)


def _unpack_hello(body: bytes) -> Hello:
    head = struct.Struct(f"<{IDENTITY_BYTES}sI")
    importer, version = head.unpack(body[: head.size])
    return Hello(importer, version, Entry(*_EPOCH.unpack(body[head.size :])))


def _unpack_unique_id(body: bytes) -> UniqueId:
    if len(body) != UNIQUE_ID_BYTES:
        raise ValueError(f"a unique id of {len(body)} bytes")
    return UniqueId(body)


def _unpack_read(body: bytes) -> Read:
    runs_at = _EPOCH.size + 4
    (number,) = struct.unpack("<I", body[_EPOCH.size : runs_at])
    runs = tuple(Run(*fields) for fields in _RUN.iter_unpack(body[runs_at:]))
    return Read(Entry(*_EPOCH.unpack(body[: _EPOCH.size])), number, runs)


def _unpack_answer(body: bytes) -> Answer:
    head = struct.Struct("<16sIIQ")
    ticket_id, attempt, number, num_bytes = head.unpack(body[: head.size])
    return Answer(ticket_id, attempt, number, num_bytes, body[head.size :].decode())


_UNPACK: Mapping[int, Callable[[bytes], Message]] = {
    1: _unpack_hello,
    2: lambda body: Ready(*struct.unpack("<I", body)),
    3: lambda body: Refused(body.decode()),
    4: _unpack_unique_id,
    5: lambda body: Warm(),
    6: _unpack_read,
    7: _unpack_answer,
}
