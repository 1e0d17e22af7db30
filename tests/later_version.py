"""Messages as a later version would send them: with unknown fields at every level.

The tests that use them are suspended until the first release: before it, no two versions meet.
"""

from typing import TypeVar

import pytest
from google.protobuf.message import Message

suspended = pytest.mark.skip(
    reason="tests of mixed versions start again when the first release is cut: CONTRIBUTING.md"
)
MessageT = TypeVar("MessageT", bound=Message)

# One field of each wire type: varint, 64 bits, bytes, 32 bits. No message of ours counts so far.
_NUMBER = 1900
UNKNOWN = b"".join(
    bytes([(_NUMBER << 3 & 0x7F) | wire_type | 0x80, (_NUMBER << 3) >> 7 & 0x7F | 0x80, (_NUMBER << 3) >> 14]) + content
    for wire_type, content in ((0, b"\x07"), (1, bytes(8)), (2, b"\x05later"), (5, bytes(4)))
)


def with_unknown_fields(message: MessageT) -> MessageT:
    """Return a copy of the message with unknown fields, in itself and in every message inside it."""
    copy = type(message)()
    copy.CopyFrom(message)
    _add(copy)
    return copy


def _add(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            _add(inner)
    message.MergeFromString(UNKNOWN)
