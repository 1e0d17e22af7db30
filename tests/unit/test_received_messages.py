"""A member that sends a message with any field out of its bounds gets one named error, and no other exception."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from google.protobuf.message import Message

from cluster.errors import HandOffFailed, MalformedMessage
from cluster.messages import Epoch, MemberId
from cluster.protocol import kv_wire, pair_wire, prefix_news, tickets, wire
from cluster.protocol.message_rules import RULES
from cluster.protocol.received import checked
from kvtransfer.exporter import prefix_offers
from kvtransfer.wire import handoff_wire
from router.fleet import decode_events
from tandem.v1 import kv_pb2, worker_pb2
from tests.unit.member_messages import examples, kinds, mutations

KEY = b"k" * 32
EPOCH = Epoch(MemberId("p0", "a"), b"t" * 16, 1)


def _ticket(message: kv_pb2.Ticket) -> object:
    signed = kv_pb2.SignedTicket(ticket=message.SerializeToString())
    signed.signature = tickets._signature(signed.ticket, KEY)
    return tickets.read(signed.SerializeToString(), KEY)


def _importer_message(message: kv_pb2.ImporterMessage) -> object:
    checked(message)
    if message.WhichOneof("message") in (None, "attach"):
        attach = message.attach
        return handoff_wire.protocol_from_wire(attach), kv_wire.fingerprint_from_wire(attach.layout)
    return handoff_wire.renew_or_settle_from_wire(message, EPOCH)


def _exporter_message(message: kv_pb2.ExporterMessage) -> object:
    checked(message)
    return [handoff_wire.from_wire(one, EPOCH) for one in (message, *message.then) if one.WhichOneof("message")]


def _after_check(convert: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda message: convert(checked(message))


# What the receiver makes of a message; of the others it reads the fields as they are, after the check.
CONVERSIONS: Mapping[type[Message], Callable[[Any], object]] = {
    worker_pb2.PrefillRequest: wire.prefill_job_from_wire,
    worker_pb2.StartRequest: wire.decode_job_from_wire,
    worker_pb2.PrefixNews: prefix_news.from_wire,
    worker_pb2.FirstTokens: _after_check(lambda m: [wire.sampled_token_from_wire(token) for token in m.tokens]),
    worker_pb2.StepOutput: _after_check(lambda m: list(decode_events.tokens_of(m))),
    worker_pb2.SequenceStarted: _after_check(lambda m: wire.unpack_ids(m.first_token_ids)),
    worker_pb2.CancelSequences: _after_check(lambda m: wire.unpack_ids(m.handles)),
    worker_pb2.Heartbeat: _after_check(lambda m: pair_wire.figures_from_wire(m.pairs)),
    kv_pb2.Ticket: _ticket,
    kv_pb2.ImporterMessage: _importer_message,
    kv_pb2.ExporterMessage: _exporter_message,
    kv_pb2.Epoch: _after_check(kv_wire.epoch_from_wire),
    kv_pb2.LayoutFingerprint: _after_check(kv_wire.fingerprint_from_wire),
    kv_pb2.OfferPrefixRequest: _after_check(lambda m: prefix_offers._hashes(m.block_hashes)),
}


def test_every_field_of_every_message_between_members_has_a_rule() -> None:
    assert set(kinds()) <= set(RULES)
    for kind, rules in RULES.items():
        assert list(rules) == [field.name for field in kind.DESCRIPTOR.fields], kind


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: str(kind.DESCRIPTOR.name))
def test_a_field_out_of_its_bounds_is_refused_by_name_and_by_nothing_else(kind: type[Message]) -> None:
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


def _assert_within_bounds(value: object, what: str) -> None:
    """As far as a type tells: what is counted is not negative, and what is measured is finite."""
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
        (kv_pb2.OfferPrefixResponse(ticket=b"x", num_blocks=0), "num_blocks must be 0 exactly without a ticket"),
        (kv_pb2.OfferPrefixResponse(num_blocks=2), "num_blocks must be 0 exactly without a ticket"),
        (worker_pb2.StepOutput(handles=bytes(8), token_ids=bytes(4), indices=bytes(8)), "equally long"),
        (worker_pb2.SequenceStarted(handles=[1, 2], first_token_ids=bytes(4)), "one for each of 2 handles"),
        (worker_pb2.PrefixNews(first_number=2, next_number=1), "next_number must not be less"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(message: Message, said: str) -> None:
    with pytest.raises(MalformedMessage, match=said):
        checked(message)


def test_a_short_list_of_logprobs_is_refused() -> None:
    """It used to raise IndexError at the first token without an entry."""
    step = worker_pb2.StepOutput(handles=bytes(8), token_ids=bytes(8), indices=bytes(8))
    step.logprobs.add().chosen.token_id = 1
    with pytest.raises(MalformedMessage, match=r"StepOutput: logprobs must be none or one for each of 2 tokens, not 1"):
        checked(step)


def test_an_error_shows_the_beginning_of_a_long_value() -> None:
    with pytest.raises(MalformedMessage) as caught:
        checked(worker_pb2.SequenceFailed(handles=[1], reason="x" * 100_000))
    assert "SequenceFailed: reason must be a text" in caught.value.message
    assert len(caught.value.message) < 300
