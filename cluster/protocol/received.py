"""Validates messages from other members: every field is within its bounds, or one error names the field.

Receivers call `checked` once per message, before they convert it to a value. A faulty member can therefore end the call
or the attempt that its message belongs to, and nothing else.
"""

from typing import TypeVar

from google.protobuf.message import Message

from cluster.errors import MalformedMessage
from cluster.protocol.across_fields import ACROSS_FIELDS
from cluster.protocol.field_rules import Many, Part, Rule
from cluster.protocol.message_rules import RULES

Received = TypeVar("Received", bound=Message)
_MOST_SHOWN = 80  # characters of a value
_PLANS: dict[type[Message], tuple[tuple[str, Rule, bool], ...]] = {
    kind: tuple((field, rule, isinstance(rule, Part)) for field, rule in rules.items()) for kind, rules in RULES.items()
}


def checked(message: Received) -> Received:
    """Return the message itself if it and all messages in it are within their bounds. Raises MalformedMessage."""
    for field, rule, is_part in _PLANS[type(message)]:
        if is_part:
            _check_part(message, field, rule)
            continue
        value = getattr(message, field)
        if not rule.admits(value):
            raise malformed(message, f"{field} must be {rule}, not {_shown(value)}")
        if isinstance(rule, Many) and isinstance(rule.item, Part):
            for item in value:
                checked(item)
    across = ACROSS_FIELDS.get(type(message))
    problem = across(message) if across is not None else ""
    if problem:
        raise malformed(message, problem)
    return message


def malformed(message: Message, problem: str) -> MalformedMessage:
    """Return the error about a message, in the one form that all receivers use."""
    return MalformedMessage(f"{message.DESCRIPTOR.name}: {problem}")


def _check_part(message: Message, field: str, rule: Rule) -> None:
    if message.HasField(field):
        checked(getattr(message, field))
    elif not rule.admits(None):
        raise malformed(message, f"{field} must be {rule}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"
