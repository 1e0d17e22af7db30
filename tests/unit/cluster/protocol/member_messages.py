"""Every message that members send to each other, found in the descriptors: an example of each, and mutations of it.

A field that is added to worker.proto or kv.proto is mutated automatically.
"""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from cluster.protocol.field_rules import (
    EnumValue,
    Flag,
    Many,
    MemberName,
    Octets,
    Part,
    Real,
    Rule,
    Table,
    Text,
    Whole,
)
from cluster.protocol.message_rules import RULES
from tandem.internal.v1 import kv_pb2, worker_pb2

FILES = (worker_pb2, kv_pb2)
_INTEGERS = (0, 1, -1, -(1 << 31), (1 << 31) - 1, 1 << 31, (1 << 32) - 1, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1)
_REALS = (0.0, -1.0, 5e-324, 1e-9, 1e9, 1e300, -1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "@", "no-incarnation", "a@b", "\0", "\N{SNOWMAN}" * 3, "x" * 70_000, "-1", "nan")
_BYTES = (*(b"x" * length for length in (0, 1, 3, 5, 8, 15, 16, 17, 32, 33, 70_001)), b"\xff" * 4)
_EXAMPLES: dict[tuple[str, str], object] = {("LeasePrefixResponse", "num_blocks"): 1, ("PromptLogprobs", "num_top"): 1}


def kinds() -> list[type[Message]]:
    return [getattr(file, name) for file in FILES for name in file.DESCRIPTOR.message_types_by_name]


def examples(kind: type[Message]) -> Iterator[Any]:
    """Return messages of a kind with every field set; one message for each alternative of a oneof."""
    alternatives = [field.name for oneof in kind.DESCRIPTOR.oneofs for field in oneof.fields]
    for chosen in alternatives or [""]:
        message = kind()
        for name, rule in RULES[kind].items():
            if name == chosen or name not in alternatives:
                _fill(message, name, rule)
        yield message


def mutations(message: Any) -> Iterator[tuple[str, Any]]:
    """Yield (description of the change, changed message) for each field of the message and of the messages in it."""
    for field in message.DESCRIPTOR.fields:
        for what, change in _changes(message, field):
            mutated = type(message)()
            mutated.CopyFrom(message)
            try:
                change(mutated)
            except (ValueError, TypeError, UnicodeEncodeError):
                continue  # no value of the field's type: it cannot be sent
            yield f"{message.DESCRIPTOR.name}.{what}", mutated


def _fill(message: Any, name: str, rule: Rule) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    if name == "then":
        return
    if isinstance(rule, Part):
        getattr(message, name).CopyFrom(next(examples(type(getattr(message, name)))))
    elif isinstance(rule, Table):
        getattr(message, name)["name"] = _value(rule.value)
    elif isinstance(rule, Many) and field.message_type is not None:
        item = getattr(message, name).add()
        item.CopyFrom(next(examples(type(item))))
    elif isinstance(rule, Many):
        getattr(message, name).append(_value(rule.item))
    else:
        setattr(message, name, _EXAMPLES.get((message.DESCRIPTOR.name, name), _value(rule)))


def _value(rule: Rule) -> object:
    match rule:
        case Whole(least=least):
            return max(least, 0)
        case Real(least=least, most=most):
            return min(max(least, 0.5), most)
        case Text(least=least):
            return "x" * max(least, 1)
        case MemberName():
            return "member@1"
        case Octets(least=least, unit=unit):
            return bytes(max(least, unit))
        case EnumValue(names=names):
            return max(names)
        case Flag():
            return True
    raise AssertionError(f"no example of {rule}")


def _changes(message: Any, field: Field) -> Iterator[tuple[str, Any]]:
    name = field.name
    yield f"{name} cleared", lambda mutated: mutated.ClearField(name)
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        for value in _values(kind.fields_by_name["value"]):
            yield (
                f"{name}[...] = {value!r:.40}",
                lambda mutated, value=value: getattr(mutated, name).update({"k": value}),
            )
        yield f"{name} of 5,000", lambda mutated: [getattr(mutated, name)[str(i)] for i in range(5_000)]
    elif field.is_repeated:
        yield from _changes_of_many(message, field)
    elif field.message_type is not None:
        yield f"{name} empty", lambda mutated: (mutated.ClearField(name), getattr(mutated, name).SetInParent())
        if message.HasField(name):
            for what, part in mutations(getattr(message, name)):
                yield f"{name}: {what}", lambda mutated, part=part: getattr(mutated, name).CopyFrom(part)
    else:
        for value in _values(field):
            yield f"{name} = {value!r:.40}", lambda mutated, value=value: setattr(mutated, name, value)


def _changes_of_many(message: Any, field: Field) -> Iterator[tuple[str, Any]]:
    name = field.name

    def repeated(mutated: Any, times: int) -> None:
        getattr(mutated, name).extend(list(getattr(mutated, name)) * times)

    for times in (1, 1_100):
        yield f"{name} x {times + 1}", lambda mutated, times=times: repeated(mutated, times)
    if field.message_type is None:
        for value in _values(field):
            yield f"{name} + {value!r:.40}", lambda mutated, value=value: getattr(mutated, name).append(value)
        return
    yield f"{name} + an empty one", lambda mutated: getattr(mutated, name).add()
    for item in list(getattr(message, name))[:1]:
        for what, part in mutations(item):
            yield f"{name}[0]: {what}", lambda mutated, part=part: getattr(mutated, name)[0].CopyFrom(part)


def _values(field: Field) -> tuple[object, ...]:
    match field.cpp_type:
        case Field.CPPTYPE_FLOAT | Field.CPPTYPE_DOUBLE:
            return _REALS
        case Field.CPPTYPE_STRING:
            return _BYTES if field.type == Field.TYPE_BYTES else _TEXTS
        case Field.CPPTYPE_BOOL:
            return (False, True)
    return _INTEGERS
