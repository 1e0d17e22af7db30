"""The words of the enums of tandem.v1, and its messages as plain objects with these words, for JSON.

Python code uses words in place of protobuf's numbers: "stop" for FINISH_REASON_STOP, and "" for the value 0, which
means "not set". A word is the name of the value in lower case, without the name of its enum.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tandem.v1 import admin_pb2, inference_pb2

EnumT = TypeVar("EnumT", bound=int)


class EnumWords(Generic[EnumT]):
    """Converts between the numbers of one enum and their words."""

    def __init__(self, enum: type[EnumT]) -> None:
        """`enum` is an enum of a generated module, such as inference_pb2.FinishReason."""
        values = enum.DESCRIPTOR.values  # type: ignore[attr-defined]
        self.name = str(enum.DESCRIPTOR.name)  # type: ignore[attr-defined]
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).upper() + "_"
        self._words: dict[int, str] = {value.number: value.name.removeprefix(prefix).lower() for value in values}
        self._words[0] = ""
        self._numbers: dict[str, EnumT] = {word: number for number, word in self._words.items()}  # type: ignore[misc]

    @property
    def words(self) -> tuple[str, ...]:
        """The words of all values, without the empty word of the value 0."""
        return tuple(filter(None, self._numbers))

    def number(self, word: str) -> EnumT:
        """Return the number of a word, 0 for "". Raises ValueError for an unknown word and names the known words."""
        number = self._numbers.get(word)
        if number is None:
            raise ValueError(f"{word!r} is not a valid {self.name}: use one of {', '.join(self.words)}")
        return number

    def word(self, number: int) -> str:
        """Return the word of a number, "" for 0. Raises ValueError for an unknown number and names the known words."""
        word = self._words.get(number)
        if word is None:
            raise ValueError(f"{number} is not a valid {self.name}: the known ones are {', '.join(self.words)}")
        return word

    def label(self, number: int) -> str:
        """Return the word of a number for display, and the number itself as text if it is unknown."""
        return self._words.get(number, str(number))


FINISH_REASONS = EnumWords(inference_pb2.FinishReason)
GRAMMAR_KINDS = EnumWords(inference_pb2.GrammarKind)
CHAT_ROLES = EnumWords(inference_pb2.ChatRole)
TOOL_CHOICE_MODES = EnumWords(inference_pb2.ToolChoiceMode)
REQUEST_PHASES = EnumWords(inference_pb2.RequestPhase)
MEMBER_ROLES = EnumWords(admin_pb2.MemberRole)
MEMBER_STATES = EnumWords(admin_pb2.MemberState)
DRAIN_OUTCOMES = EnumWords(admin_pb2.DrainOutcome)
DISAGGREGATION_VERDICTS = EnumWords(admin_pb2.DisaggregationVerdict)
EFFECT_BASES = EnumWords(admin_pb2.EffectBasis)
EVENT_KINDS = EnumWords(admin_pb2.EventKind)
KEY_ACCESSES = EnumWords(admin_pb2.KeyAccess)


_ENUMS: dict[str, EnumWords[Any]] = {
    words.name: words for words in tuple(globals().values()) if isinstance(words, EnumWords)
}
_DIGITS = 9  # after the point: nanoseconds
_Convert = Callable[[Any], Any]


def plain_object(message: Message) -> dict[str, Any]:
    """Return the message as an object that `json.dumps` takes. Enums become words. Every field is present except unset
    messages and unset optional fields."""
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
