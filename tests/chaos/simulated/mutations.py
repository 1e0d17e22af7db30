"""Messages between members with one field out of its bounds, made of a message as it is sent.

Which messages there are, and what may become of a field, is found in the descriptors (tests/unit/member_messages.py).
Only what cluster/protocol/message_rules.py refuses is sent: a value that the rules admit is one that a member may send.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import Descriptor

from cluster.errors import MalformedMessage
from cluster.protocol.received import checked
from tests.unit.member_messages import FILES, mutations

if TYPE_CHECKING:
    from tests.chaos.simulated.schedule import Mutation


def _names(kind: Descriptor) -> Iterator[str]:
    """Of a message that may be one of several, a name for each of them."""
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


class Mutations:
    """Those of one schedule that have not been sent yet."""

    def __init__(self, mutations: "Iterable[Mutation]") -> None:
        self._waiting = {(mutation.message, mutation.occurrence): mutation.draw for mutation in mutations}
        self._num_sent: Counter[str] = Counter()

    def of(self, message: Any) -> tuple[str, str, Any] | None:
        """(name of the message, what was changed, the message to send instead), where one is due."""
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
    """None: each of its fields may have any value. What makes another message of it changes more than one field."""
    changes = [change for change in mutations(message) if _name(change[1]) == _name(message)]
    dice.shuffle(changes)
    for what, mutated in changes:
        try:
            checked(type(message).FromString(mutated.SerializeToString()))
        except MalformedMessage:
            return what, mutated
    return None
