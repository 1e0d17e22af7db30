"""Messages as a version of the far future would send them: with fields, at every level, that nobody here knows."""

from typing import TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)

# One field of each wire type: varint, 64 bits, bytes, 32 bits. No message of ours counts so far.
_NUMBER = 1900
UNKNOWN = b"".join(
    bytes([(_NUMBER << 3 & 0x7F) | wire_type | 0x80, (_NUMBER << 3) >> 7 & 0x7F | 0x80, (_NUMBER << 3) >> 14]) + content
    for wire_type, content in ((0, b"\x07"), (1, bytes(8)), (2, b"\x05later"), (5, bytes(4)))
)


def with_unknown_fields(message: MessageT) -> MessageT:
    """A copy of it that says more than its type knows, in itself and in every message inside it."""
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
