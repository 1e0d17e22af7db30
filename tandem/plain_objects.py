"""Converts messages of tandem.v1 into plain objects for JSON.

Enums become words. Every field is present except unset messages and unset optional fields.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tandem import enum_words
from tandem.enum_words import EnumWords

_ENUMS: dict[str, EnumWords[Any]] = {
    words.name: words for words in vars(enum_words).values() if isinstance(words, EnumWords)
}
_DIGITS = 9  # after the point: nanoseconds
_Convert = Callable[[Any], Any]


def plain_object(message: Message) -> dict[str, Any]:
    """Return the message as an object that `json.dumps` takes."""
    converted = {}
    for name, has_presence, convert in _fields(message.DESCRIPTOR):
        if not has_presence or message.HasField(name):
            converted[name] = convert(getattr(message, name))
    return converted


@cache
def _fields(kind: Descriptor) -> tuple[tuple[str, bool, _Convert], ...]:
    """Return name, presence and conversion of each field of a message."""
    return tuple((field.name, field.has_presence, _conversion(field)) for field in kind.fields)


def _conversion(field: FieldDescriptor) -> _Convert:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        value = _one(kind.fields_by_name["value"])
        return lambda entries: {key: value(entries[key]) for key in entries}
    one = _one(field)
    return (lambda values: [one(value) for value in values]) if field.is_repeated else one


def _one(field: FieldDescriptor) -> _Convert:
    if field.message_type is not None:
        return plain_object
    if field.enum_type is not None:
        return _ENUMS[field.enum_type.name].label
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return lambda value: round(value, _DIGITS)
    return lambda value: value
