"""Inputs made from others: bytes changed, cut, repeated, joined; values of JSON and of protobuf messages replaced."""

import json
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

_MOST_BYTES = 1 << 16
_INTEGERS = (0, 1, -1, 7, 127, 128, 255, 256, 65_535, 65_536, (1 << 31) - 1, -(1 << 31), 1 << 31, (1 << 32) - 1)
_LONG_INTEGERS = (*_INTEGERS, 1 << 32, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
_REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 5e-324, 1e-9, 1e9, 1e300, -1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "x",
    "@",
    "a@b",
    "\0",
    "\n",
    "☃",
    "\U0001f600",
    "x" * 300,
    "x" * 5000,
    "-1",
    "nan",
    "1e999",
    "٣",
    " ",
    "{}",
)
_JSON_TEXTS = (*_TEXTS, "\ud800", "\udfff x", "[" * 3000, '{"a":' * 1500, "\u202e", "<|im_end|>", "</s>", "(a*)*", "$")
_HUGE = (10**19, 10**400, -(10**400), 1e308, float("nan"), float("inf"), -0.0, 2**53 + 1)


def mutated(draw: random.Random, known: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """Return one of the known inputs, or two joined, with a few changes to its bytes."""
    data = bytearray(draw.choice(known) if known else b"")
    for _ in range(draw.choice((0, 1, 1, 2, 3, 5))):
        _change(draw, data, known, words)
    return bytes(data[:_MOST_BYTES])


def _change(draw: random.Random, data: bytearray, known: Sequence[bytes], words: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice((1, 2, 4, 8, 16, 64)))
    match draw.randrange(9):
        case 0:
            data[at:end] = bytes(draw.randrange(256) for _ in range(end - at))
        case 1:
            del data[at:end]
        case 2:
            data[at:at] = data[at:end] * draw.choice((1, 2, 50))
        case 3:
            del data[at:]
        case 4:
            other = draw.choice(known) if known else b""
            data[at:] = other[draw.randrange(len(other) + 1) :]
        case 5 if words:
            data[at:at] = draw.choice(words)
        case 6 if at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        case 7:
            width = draw.choice((1, 2, 4, 8))
            number = draw.choice(_LONG_INTEGERS) & ((1 << (8 * width)) - 1)
            data[at : at + width] = number.to_bytes(width, draw.choice(("little", "big")))
        case _:
            data[at:at] = bytes((draw.randrange(256),))


def mutated_json(draw: random.Random, values: Sequence[Any], names: Sequence[str] = ()) -> Any:
    """Return one of the values with a few parts of it replaced by others, renamed, repeated or nested."""
    value = json.loads(json.dumps(draw.choice(values)))
    for _ in range(draw.choice((1, 1, 2, 4))):
        value = _changed(draw, value, names, depth=0)
    return value


def _changed(draw: random.Random, value: Any, names: Sequence[str], depth: int) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.85:
        if names and draw.random() < 0.3:
            return value | {draw.choice(names): any_json(draw, names, depth)}
        name = draw.choice(list(value))
        if draw.random() < 0.1:
            return {other: content for other, content in value.items() if other != name}
        return value | {name: _changed(draw, value[name], names, depth + 1)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        if draw.random() < 0.2:
            return value + [value[at]] * draw.choice((1, 3, 200))
        return [*value[:at], _changed(draw, value[at], names, depth + 1), *value[at + 1 :]]
    return any_json(draw, names, depth)


def any_json(draw: random.Random, names: Sequence[str], depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 4 else 5)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind == 1:
        return draw.choice(_LONG_INTEGERS + _HUGE)
    if kind in (2, 3):
        return draw.choice(_JSON_TEXTS)
    if kind == 4:
        return draw.choice((draw.random() * 3, draw.randrange(40), -draw.random(), [], {}))
    if kind == 5:
        return [any_json(draw, names, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        nested: Any = draw.choice((1, [], {}, "x"))
        for _ in range(draw.choice((5, 60, 400))):
            nested = [nested] if draw.random() < 0.5 else {"a": nested}
        return nested
    keys = [draw.choice(names or ("a",)) for _ in range(draw.randrange(4))]
    return {key: any_json(draw, names, depth + 1) for key in keys}


def any_message(draw: random.Random, kind: type[Message], depth: int = 0) -> Any:
    """Return a message with any of its fields set to any values of their types."""
    message: Any = kind()
    for field in kind.DESCRIPTOR.fields:
        if draw.random() < (0.6 if depth < 3 else 0.1):
            _set(draw, message, field, depth)
    return message


def changed_message(draw: random.Random, message: Any) -> Any:
    """Return a copy of the message in which a few fields, at any depth, have other values."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(draw.choice((1, 1, 2, 3))):
        _change_field(draw, copy)
    return copy


def _change_field(draw: random.Random, message: Any) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = draw.choice(fields)
    content = getattr(message, field.name)
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if field.message_type is not None and not is_map and draw.random() < 0.8:
        if not field.is_repeated:
            _change_field(draw, content)
            return
        if content:
            _change_field(draw, draw.choice(content))
            return
    if draw.random() < 0.2:
        message.ClearField(field.name)
    else:
        _set(draw, message, field, depth=2)


def _set(draw: random.Random, message: Any, field: Any, depth: int) -> None:
    kind, content = field.message_type, getattr(message, field.name)
    count = draw.choice((1, 1, 2, 5, 100))
    try:
        if kind is not None and kind.GetOptions().map_entry:
            for _ in range(count):
                content[_value(draw, kind.fields_by_name["key"])] = _value(draw, kind.fields_by_name["value"])
        elif kind is not None and field.is_repeated:
            content.extend(any_message(draw, kind._concrete_class, depth + 1) for _ in range(min(count, 5)))
        elif kind is not None:
            content.CopyFrom(any_message(draw, kind._concrete_class, depth + 1))
        elif field.is_repeated:
            content.extend(_value(draw, field) for _ in range(count))
        else:
            setattr(message, field.name, _value(draw, field))
    except (ValueError, TypeError, UnicodeEncodeError):
        return  # no value of the field's type: it cannot be sent


def _value(draw: random.Random, field: Any) -> Any:
    match field.cpp_type:
        case Field.CPPTYPE_FLOAT | Field.CPPTYPE_DOUBLE:
            return draw.choice(_REALS)
        case Field.CPPTYPE_STRING if field.type == Field.TYPE_BYTES:
            return draw.randbytes(draw.choice((0, 1, 3, 4, 8, 16, 16, 32, 33, 64, 600)))
        case Field.CPPTYPE_STRING:
            return draw.choice(_TEXTS)
        case Field.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case Field.CPPTYPE_ENUM:
            return draw.choice((0, 1, 2, 3, 4, 5, 99, -1))
    return draw.choice(_INTEGERS if draw.random() < 0.5 else _LONG_INTEGERS)
