"""The kinds of bounds that cluster/protocol/message_rules.py gives to each field of a message.

A rule says whether a value is within its bounds, and its text says which bounds those are. Standard library only, pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.messages import MemberId

NAME_CHARACTERS = 256  # of an id, a reason, a transport, a hash in text
TEXT_CHARACTERS = 65_536  # of a text for people: an error's detail, both values of a comparison
LARGEST_INT = (1 << 63) - 1
LONGEST_S = 1e9  # thirty years: every duration is added to a clock without losing it


class Rule(Protocol):
    """A rule for the value of one field. Its text completes "must be ..."."""

    def admits(self, value: object) -> bool: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer from `least` to `most`."""

    least: int = 0
    most: int = (1 << 31) - 1

    def admits(self, value: object) -> bool:
        return isinstance(value, int) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number from `least` to `most`; above `least` if that is excluded."""

    least: float = 0.0
    most: float = LONGEST_S
    excludes_least: bool = False

    def admits(self, value: object) -> bool:
        if not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return self.least <= value <= self.most and not (self.excludes_least and value == self.least)

    def __str__(self) -> str:
        return f"a finite number {'above' if self.excludes_least else 'from'} {self.least:g} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class Text:
    most: int = NAME_CHARACTERS
    least: int = 0

    def admits(self, value: object) -> bool:
        return isinstance(value, str) and self.least <= len(value) <= self.most

    def __str__(self) -> str:
        return f"a text of {self.least} to {self.most} characters"


@dataclass(frozen=True, slots=True)
class EnumValue:
    """A value of an enum: one of the numbers of `names`. A number that this version does not know is refused."""

    names: Mapping[int, str]

    @staticmethod
    def of(enum: type[int], *, may_be_unset: bool = False) -> "EnumValue":
        """Return the rule for an enum of the protocol. 0, which means "not set", is admitted only with
        `may_be_unset`."""
        values = enum.DESCRIPTOR.values  # type: ignore[attr-defined]
        return EnumValue({value.number: value.name for value in values if value.number or may_be_unset})

    def without(self, number: int) -> "EnumValue":
        return EnumValue({known: name for known, name in self.names.items() if known != number})

    def admits(self, value: object) -> bool:
        return value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names.values())}"


@dataclass(frozen=True, slots=True)
class Flag:
    """A boolean field."""

    def admits(self, value: object) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class MemberName:
    """ "id@incarnation"."""

    may_be_empty: bool = False

    def admits(self, value: object) -> bool:
        if not isinstance(value, str) or len(value) > 2 * NAME_CHARACTERS:
            return False
        if not value:
            return self.may_be_empty
        try:
            MemberId.parse(value)
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        return "a member's id@incarnation" + (" or empty" if self.may_be_empty else "")


@dataclass(frozen=True, slots=True)
class Octets:
    """Bytes, whose number is a multiple of `unit`."""

    most: int
    least: int = 0
    unit: int = 1

    def admits(self, value: object) -> bool:
        return isinstance(value, bytes) and self.least <= len(value) <= self.most and len(value) % self.unit == 0

    def __str__(self) -> str:
        return f"{self.least} to {self.most} bytes" + (f", a multiple of {self.unit}" if self.unit > 1 else "")


@dataclass(frozen=True, slots=True)
class Part:
    """A message field, whose message has its own rules."""

    is_required: bool = False

    def admits(self, value: object) -> bool:
        return value is not None or not self.is_required

    def __str__(self) -> str:
        return "set"


@dataclass(frozen=True, slots=True)
class Many:
    """A repeated field of scalars or, with Part, of messages."""

    item: Rule
    most: int
    least: int = 0
    is_distinct: bool = False

    def admits(self, value: object) -> bool:
        """Return whether the number of items is within its bounds and each scalar follows the rule of the items."""
        if not isinstance(value, Sequence) or not self.least <= len(value) <= self.most:
            return False
        if isinstance(self.item, Part):
            return True
        return all(map(self.item.admits, value)) and not (self.is_distinct and len(set(value)) < len(value))

    def __str__(self) -> str:
        distinct = "different " if self.is_distinct else ""
        return f"{self.least} to {self.most} {distinct}items, each {self.item}"


@dataclass(frozen=True, slots=True)
class Table:
    """A map from names to scalars."""

    value: Rule
    most: int

    def admits(self, value: object) -> bool:
        if not hasattr(value, "items") or not hasattr(value, "__len__") or len(value) > self.most:
            return False
        return all(len(name) <= NAME_CHARACTERS and self.value.admits(item) for name, item in value.items())

    def __str__(self) -> str:
        return f"at most {self.most} entries, each {self.value}"
