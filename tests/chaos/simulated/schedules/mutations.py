"""Messages between members with one field outside its bounds, made from a message as it is sent.

Messages and possible values are found in the descriptors (tests/unit/cluster/protocol/member_messages.py). Only
messages that cluster/protocol/message_rules.py refuses are sent.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor

from cluster.errors import MalformedMessage
from cluster.protocol.received import checked
from tests.unit.cluster.protocol.member_messages import FILES, mutations


def _names(kind: Descriptor) -> Iterator[str]:
    """Return a name for each kind of a message with a oneof."""
    if kind.oneofs:
        yield from (f"{kind.name}.{field.name}" for field in kind.oneofs[0].fields)
    elif kind.fields:
        yield kind.name


_METHODS = [
    method for file in FILES for service in file.DESCRIPTOR.services_by_name.values() for method in service.methods
]
MESSAGES = tuple(
    dict.fromkeys(
        name for method in _METHODS for kind in (method.input_type, method.output_type) for name in _names(kind)
    )
)
_FILES = frozenset(file.DESCRIPTOR.name for file in FILES)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of one field of one message between two members to a value that no member may send."""

    message: str  # of MESSAGES
    occurrence: int  # of that message
    draw: int  # seed of the choice of field and value


def draw_mutations(dice: Random) -> tuple[Mutation, ...]:
    """Draw the mutations of one schedule."""
    return tuple(
        Mutation(dice.choice(MESSAGES), occurrence=dice.choice((0, 0, 1, 2, 5)), draw=dice.getrandbits(32))
        for _ in range(dice.choice((1, 1, 2, 3, 4)))
    )


class Mutations:
    """The mutations of one schedule that have not been sent yet."""

    def __init__(self, mutations: Iterable[Mutation]) -> None:
        self._waiting = {(mutation.message, mutation.occurrence): mutation.draw for mutation in mutations}
        self._num_sent: Counter[str] = Counter()

    def of(self, message: Any) -> tuple[str, str, Any] | None:
        """Return the name of the message, the change, and the message to send instead, if a mutation is due."""
        if not self._waiting or message.DESCRIPTOR.file.name not in _FILES:
            return None
        name = _name(message)
        number = self._num_sent[name]
        self._num_sent[name] += 1
        draw = self._waiting.pop((name, number), None)
        malformed = None if draw is None else _malformed(message, Random(draw))
        return None if malformed is None else (name, *malformed)


def _name(message: Any) -> str:
    kind = message.DESCRIPTOR
    return f"{kind.name}.{message.WhichOneof(kind.oneofs[0].name)}" if kind.oneofs else str(kind.name)


def _malformed(message: Any, dice: Random) -> tuple[str, Any] | None:
    """Return a malformed copy of a message; None if each of its fields may have any value. A change that makes it
    another kind of message changes more than one field."""
    changes = [change for change in mutations(message) if _name(change[1]) == _name(message)]
    dice.shuffle(changes)
    for what, mutated in changes:
        try:
            checked(type(message).FromString(mutated.SerializeToString()))
        except MalformedMessage:
            return what, mutated
    return None
