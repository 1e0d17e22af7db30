"""A member that sends a message with any field out of its bounds gets one named error, and no other exception."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from google.protobuf.message import Message

from cluster.auth.keys import ClusterKeys, Purpose
from cluster.errors import HandOffFailed, MalformedMessage
from cluster.messages import Epoch, MemberId
from cluster.protocol import report_wire, tickets, wire
from cluster.protocol.hashing import split_hashes
from cluster.protocol.message_rules import RULES
from cluster.protocol.received import checked
from cluster.protocol.report_wire import link_speeds_from_wire, service_times_of
from kvtransfer.wire import handoff_wire
from router.fleet import decode_events
from tandem.internal.v1 import kv_pb2, worker_pb2
from tandem.v1 import admin_pb2
from tests.unit.cluster.protocol.member_messages import examples, kinds, mutations

KEY = ClusterKeys(b"k" * 32)
EPOCH = Epoch(MemberId("p0", "a"), b"t" * 16, 1)


def _ticket(message: kv_pb2.Ticket) -> object:
    signed = kv_pb2.SignedTicket(ticket=message.SerializeToString())
    signed.signature = KEY.sign(Purpose.TICKETS, signed.ticket)
    return tickets.read(signed.SerializeToString(), KEY)


def _importer_message(message: kv_pb2.ImporterMessage) -> object:
    checked(message)
    if message.WhichOneof("message") in (None, "attach"):
        attach = message.attach
        return handoff_wire.protocol_from_wire(attach), wire.fingerprint_from_wire(attach.layout)
    return handoff_wire.renew_or_settle_from_wire(message, EPOCH)


def _exporter_message(message: kv_pb2.ExporterMessage) -> object:
    checked(message)
    return [handoff_wire.from_wire(one, EPOCH) for one in (message, *message.then) if one.WhichOneof("message")]


def _after_check(convert: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda message: convert(checked(message))


# The receiver's conversion of each message; of other messages it reads the fields directly, after the check.
CONVERSIONS: Mapping[type[Message], Callable[[Any], object]] = {
    worker_pb2.PrefillRequest: wire.prefill_job_from_wire,
    worker_pb2.StartRequest: wire.decode_job_from_wire,
    worker_pb2.CacheEvents: report_wire.cache_events_from_wire,
    worker_pb2.FirstTokens: _after_check(lambda m: [wire.sampled_token_from_wire(token) for token in m.tokens]),
    worker_pb2.PromptLogprobs: _after_check(lambda m: list(wire.prompt_logprobs_from_wire(m).values())),
    worker_pb2.StepOutput: _after_check(lambda m: list(decode_events.tokens_of(m, received_s=0.0))),
    worker_pb2.SequenceStarted: _after_check(lambda m: wire.unpack_ids(m.first_token_ids)),
    worker_pb2.CancelSequences: _after_check(lambda m: wire.unpack_ids(m.handles)),
    worker_pb2.Heartbeat: _after_check(lambda m: (link_speeds_from_wire(m.links), service_times_of(m))),
    kv_pb2.Ticket: _ticket,
    kv_pb2.ImporterMessage: _importer_message,
    kv_pb2.ExporterMessage: _exporter_message,
    kv_pb2.Epoch: _after_check(wire.epoch_from_wire),
    kv_pb2.LayoutFingerprint: _after_check(wire.fingerprint_from_wire),
    kv_pb2.LeasePrefixRequest: _after_check(lambda m: split_hashes(m.block_hashes)),
}


def test_every_field_of_every_message_between_members_has_a_rule() -> None:
    assert set(kinds()) <= set(RULES)
    for kind, rules in RULES.items():
        assert list(rules) == [field.name for field in kind.DESCRIPTOR.fields], kind


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: str(kind.DESCRIPTOR.name))
def test_a_field_out_of_its_bounds_raises_only_the_named_error(kind: type[Message]) -> None:
    convert = CONVERSIONS.get(kind, checked)
    num_refused = 0
    for example in examples(kind):
        convert(example)  # as it is, it is accepted
        for what, mutated in mutations(example):
            received = kind.FromString(mutated.SerializeToString())
            try:
                value = convert(received)
            except (MalformedMessage, HandOffFailed) as error:
                num_refused += 1
                refused_as = error.handoff_reason if isinstance(error, HandOffFailed) else error.reason
                assert refused_as in ("malformed_message", "malformed_handoff_message"), what
            else:
                _assert_within_bounds(value, what)
    flags_only = all(field.cpp_type == field.CPPTYPE_BOOL for field in kind.DESCRIPTOR.fields)
    assert num_refused or flags_only, "no mutation was refused: what does this test look at?"


def _resumed_prefill() -> Message:
    """Return a job that wants the log-probabilities of a prompt that has been answered in part."""
    job: worker_pb2.PrefillRequest = next(examples(worker_pb2.PrefillRequest))
    job.token_ids, job.num_committed, job.prompt_logprobs_plus_one = bytes(16), 1, 1
    return job


def _assert_within_bounds(value: object, what: str) -> None:
    """Check the bounds that follow from the type: no count is negative, and every measured value is finite."""
    if isinstance(value, float):
        assert math.isfinite(value), what
    elif isinstance(value, int):
        assert -(1 << 31) <= value < 1 << 64, what
    elif isinstance(value, str | bytes | Message):
        return
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _assert_within_bounds(getattr(value, field.name), f"{what}: {field.name}")
    elif isinstance(value, Sequence | frozenset):
        for item in value:
            _assert_within_bounds(item, what)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (kv_pb2.LeasePrefixResponse(ticket=b"x", num_blocks=0), "num_blocks must be 0 exactly without a ticket"),
        (kv_pb2.LeasePrefixResponse(num_blocks=2), "num_blocks must be 0 exactly without a ticket"),
        (worker_pb2.StepOutput(handles=bytes(8), token_ids=bytes(4), indices=bytes(8)), "equally long"),
        (worker_pb2.SequenceStarted(handles=[1, 2], first_token_ids=bytes(4)), "one for each of 2 handles"),
        (_resumed_prefill(), "prompt_logprobs_plus_one must be 0 once there are committed tokens"),
        (worker_pb2.CacheEvents(first_number=2, next_number=1), "next_number must not be less"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(message: Message, said: str) -> None:
    with pytest.raises(MalformedMessage, match=said):
        checked(message)


def test_an_offer_of_a_prefix_names_at_most_65536_blocks() -> None:
    request = kv_pb2.LeasePrefixRequest(request_id="r", importer="me@1", block_hashes=bytes(16 * 65_536))
    checked(request)
    request.block_hashes += bytes(16)
    with pytest.raises(MalformedMessage, match="block_hashes"):
        checked(request)


def test_a_short_list_of_logprobs_is_refused() -> None:
    """Such a list once raised IndexError at the first token without an entry."""
    step = worker_pb2.StepOutput(handles=bytes(8), token_ids=bytes(8), indices=bytes(8))
    step.logprobs.add().chosen.token_id = 1
    with pytest.raises(MalformedMessage, match=r"StepOutput: logprobs must be none or one for each of 2 tokens, not 1"):
        checked(step)


def _enum_fields() -> list[tuple[type[Message], str]]:
    """Yield every field of an enum type in a message between members."""
    return [(kind, field.name) for kind in kinds() for field in kind.DESCRIPTOR.fields if field.enum_type is not None]


def test_an_unknown_value_of_an_enum_is_refused_with_the_names_of_the_known_values() -> None:
    for kind, name in _enum_fields():
        enum = kind.DESCRIPTOR.fields_by_name[name].enum_type
        assert enum is not None
        for unknown in (len(enum.values), -1, (1 << 31) - 1):
            (message,) = examples(kind)
            setattr(message, name, unknown)
            received = kind.FromString(message.SerializeToString())
            with pytest.raises(MalformedMessage, match=f"{name} must be one of .*, not {unknown}") as caught:
                checked(received)
            assert enum.values[2].name in caught.value.message


def test_an_unset_enum_is_refused_where_the_message_needs_a_value() -> None:
    may_be_unset = set()
    for kind, name in _enum_fields():
        (message,) = examples(kind)
        message.ClearField(name)
        try:
            checked(message)
        except MalformedMessage:
            continue
        may_be_unset.add((kind.DESCRIPTOR.name, name))
    assert len(_enum_fields()) == 7
    # A token that does not end its sequence, and an answer to a caller that did not wait.
    assert may_be_unset == {("SampledToken", "finish_reason"), ("DrainWorkerResponse", "outcome")}


def test_a_drain_response_with_the_outcome_lost_is_refused() -> None:
    with pytest.raises(
        MalformedMessage, match="outcome must be one of DRAIN_OUTCOME_UNSPECIFIED, DRAIN_OUTCOME_DRAINED"
    ):
        checked(worker_pb2.DrainWorkerResponse(outcome=admin_pb2.DRAIN_OUTCOME_LOST))


def test_an_error_shows_the_beginning_of_a_long_value() -> None:
    with pytest.raises(MalformedMessage) as caught:
        checked(worker_pb2.SequenceFailed(handles=[1], reason="x" * 100_000))
    assert "SequenceFailed: reason must be a text" in caught.value.message
    assert len(caught.value.message) < 300
