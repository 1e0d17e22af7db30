"""The control connection of an NCCL link: every message arrives unchanged, and invalid bytes raise a named error."""

import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nccl import messages
from kvtransfer.transports.nccl.messages import Answer, Entry, Hello, Read, Ready, Refused, Run, UniqueId, Warm

ENTRY = Entry(b"t" * 16, 7, b"k" * 16)
EXAMPLES: list[messages.Message] = [
    Hello(b"i" * 16, 22_807, ENTRY),
    Ready(22_807),
    Refused("the exporter has not admitted this epoch"),
    UniqueId(bytes(range(128))),
    Warm(),
    Read(ENTRY, 1, ()),
    Read(ENTRY, 2, (Run(0, 5), Run(2**32 - 1, 1))),
    Answer(ENTRY.ticket_id, 7, 2, 2**40),
    Answer(ENTRY.ticket_id, 7, 2, 0, "a block beyond the 8 of the exporter's pool"),
]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.settimeout(5.0)
    other.settimeout(5.0)
    with one, other:
        yield one, other


def test_nccl_messages_arrive_unchanged_and_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    for message in EXAMPLES:
        messages.send(ends[0], message)
    assert [messages.receive_message(ends[1]) for _ in EXAMPLES] == EXAMPLES
    ends[0].close()
    assert messages.receive_message(ends[1]) is None


def test_refusal_and_failure_raise_different_errors(ends: tuple[socket.socket, socket.socket]) -> None:
    messages.send(ends[0], Refused("not now"))
    with pytest.raises(messages.Refusal, match="not now"):
        messages.expect(ends[1], Ready)
    messages.send(ends[0], Warm())
    with pytest.raises(TransportError, match="said Warm where Ready was expected"):
        messages.expect(ends[1], Ready)
    ends[0].close()
    with pytest.raises(TransportError, match="ended the connection where Ready was expected"):
        messages.expect(ends[1], Ready)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<4sBI", b"TNC1", 99, 0),
        struct.pack("<4sBI", b"TNC1", 6, 1 << 31),
        struct.pack("<4sBI", b"TNC1", 2, 3) + b"abc",
        struct.pack("<4sBI", b"TNC1", 4, 5) + b"short",
        struct.pack("<4sBI", b"TNC1", 3, 1) + b"\xff",
    ],
)
def test_an_invalid_header_is_refused_without_waiting_for_a_body(
    raw: bytes, ends: tuple[socket.socket, socket.socket]
) -> None:
    ends[0].sendall(raw)
    with pytest.raises(TransportError):
        messages.receive_message(ends[1])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(kind=st.integers(1, 7), body=st.binary(max_size=200))
def test_random_bodies_raise_only_named_errors(kind: int, body: bytes) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(struct.pack("<4sBI", b"TNC1", kind, len(body)) + body)
        one.shutdown(socket.SHUT_WR)
        try:
            message = messages.receive_message(other)
        except TransportError:
            return
        assert message is not None
