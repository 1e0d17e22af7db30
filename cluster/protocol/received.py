"""Validates messages from other members: every field is within its bounds, or one error names the field.

Receivers call `checked` once per message, before they convert it to a value. A faulty member can therefore end the call
or the attempt that its message belongs to, and nothing else. The bounds of single fields are in message_rules.py; the
rules that span several fields are here.
"""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from google.protobuf.message import Message

from cluster.errors import MalformedMessage
from cluster.protocol.field_rules import Many, Part, Rule
from cluster.protocol.message_rules import DIGEST_BYTES, ID_BYTES, RULES
from tandem.internal.v1 import kv_pb2, worker_pb2

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


def _prefill(message: worker_pb2.PrefillRequest) -> str:
    if message.num_committed * ID_BYTES >= len(message.token_ids):
        return "num_committed must leave at least one token of prompt"
    if message.num_committed and message.prompt_logprobs_plus_one:
        return "prompt_logprobs_plus_one must be 0 once there are committed tokens: they come before any token"
    return ""


def _start(message: worker_pb2.StartRequest) -> str:
    handles = [sequence.handle for sequence in message.sequences]
    return "" if len(set(handles)) == len(handles) else f"sequences must have different handles, not {handles[:8]}"


def _step(message: worker_pb2.StepOutput) -> str:
    num_bytes = len(message.handles)
    if not num_bytes == len(message.token_ids) == len(message.indices):
        return "handles, token_ids and indices must be equally long"
    if message.logprobs and len(message.logprobs) * ID_BYTES != num_bytes:
        return f"logprobs must be none or one for each of {num_bytes // ID_BYTES} tokens, not {len(message.logprobs)}"
    return ""


def _started(message: worker_pb2.SequenceStarted) -> str:
    if message.first_token_ids and len(message.first_token_ids) != len(message.handles) * ID_BYTES:
        return f"first_token_ids must be none or one for each of {len(message.handles)} handles"
    return ""


def _prompt_logprobs(message: worker_pb2.PromptLogprobs) -> str:
    num_bytes, per_top = len(message.logprobs), message.num_top * len(message.logprobs)
    if (len(message.ranks), len(message.top_token_ids), len(message.top_logprobs)) != (num_bytes, per_top, per_top):
        return f"ranks must be one, top_token_ids and top_logprobs num_top for each of {num_bytes // ID_BYTES} tokens"
    values = (*memoryview(message.logprobs).cast("f"), *memoryview(message.top_logprobs).cast("f"))
    are_logprobs = all(-math.inf < value <= 1.0 for value in values)
    return "" if are_logprobs else "logprobs and top_logprobs must be finite and at most 1"


def _cache_events(message: worker_pb2.CacheEvents) -> str:
    return "" if message.first_number <= message.next_number else "next_number must not be less than first_number"


def _offer(message: kv_pb2.LeasePrefixResponse) -> str:
    return "" if bool(message.ticket) == bool(message.num_blocks) else "num_blocks must be 0 exactly without a ticket"


def _attach(message: kv_pb2.Attach) -> str:
    is_range = (message.protocol_oldest or 1) <= (message.protocol_newest or 1)
    return "" if is_range else "protocol_oldest must not be above protocol_newest"


def _exporter_message(message: kv_pb2.ExporterMessage) -> str:
    return "then must have no messages of its own" if any(one.then for one in message.then) else ""


def _accepted(message: kv_pb2.Accepted) -> str:
    return "" if message.lease_s <= message.max_lease_s else "lease_s must not be above max_lease_s"


def _sealed(message: kv_pb2.Sealed) -> str:
    num_blocks = len(message.block_ids) // ID_BYTES
    if message.digests and len(message.digests) != num_blocks * DIGEST_BYTES:
        return f"digests must be none or one for each of {num_blocks} blocks"
    ids = memoryview(message.block_ids).cast("I")
    if len(set(ids)) < num_blocks:
        return "block_ids must differ from each other"
    are_among = set(memoryview(message.unverified_block_ids).cast("I")) <= set(ids)
    return "" if are_among else "unverified_block_ids must be among block_ids"


# Rules over several fields return the fault, or an empty text. Each field has passed its own rule.
ACROSS_FIELDS: Mapping[type[Message], Callable[..., str]] = {
    worker_pb2.PrefillRequest: _prefill,
    worker_pb2.StartRequest: _start,
    worker_pb2.StepOutput: _step,
    worker_pb2.SequenceStarted: _started,
    worker_pb2.PromptLogprobs: _prompt_logprobs,
    worker_pb2.CacheEvents: _cache_events,
    kv_pb2.LeasePrefixResponse: _offer,
    kv_pb2.Attach: _attach,
    kv_pb2.ExporterMessage: _exporter_message,
    kv_pb2.Accepted: _accepted,
    kv_pb2.Sealed: _sealed,
}
