"""Tickets are made only by the cluster, are used only by their importer, and expire."""

import dataclasses

import pytest

from cluster.auth.keys import ClusterKeys
from cluster.errors import HandOffFailed, HandOffReason
from cluster.messages import MemberId, Ticket
from cluster.protocol import tickets
from tandem.internal.v1 import kv_pb2

KEY = ClusterKeys(b"k" * 32)
IMPORTER = MemberId("d0", "b2")
TICKET = Ticket(
    ticket_id=b"t" * 16,
    exporter=MemberId("p0", "a1"),
    exporter_address="127.0.0.1:4242",
    importer=IMPORTER,
    request_id="request-1",
    attempt=1,
    num_tokens=37,
    prompt_hash=b"h" * 16,
    num_choices=2,
    expires_at_s=1000.0,
)


def _refusal(signed: bytes, *, key: ClusterKeys = KEY, importer: MemberId = IMPORTER) -> HandOffReason:
    with pytest.raises(HandOffFailed) as caught:
        tickets.verify(signed, key, importer=str(importer))
    return caught.value.handoff_reason


def test_a_verified_ticket_equals_the_signed_one() -> None:
    assert tickets.verify(tickets.sign(TICKET, KEY), KEY, importer=str(IMPORTER)) == TICKET


def test_another_key_is_a_bad_signature() -> None:
    assert _refusal(tickets.sign(TICKET, ClusterKeys(b"x" * 32))) is HandOffReason.BAD_SIGNATURE


@pytest.mark.parametrize("garbage", [b"", b"\xff\xff\xff", b"ticket"])
def test_bytes_that_are_no_ticket_have_a_bad_signature(garbage: bytes) -> None:
    assert _refusal(garbage) is HandOffReason.BAD_SIGNATURE


def test_every_changed_bit_is_a_bad_signature() -> None:
    envelope = kv_pb2.SignedTicket.FromString(tickets.sign(TICKET, KEY))
    for position in range(len(envelope.ticket)):
        forged = bytearray(envelope.ticket)
        forged[position] ^= 1
        signed = kv_pb2.SignedTicket(ticket=bytes(forged), signature=envelope.signature).SerializeToString()
        assert _refusal(signed) is HandOffReason.BAD_SIGNATURE


def test_an_expired_ticket_is_refused_after_a_minute_of_leeway() -> None:
    tickets.refuse_expired(TICKET, 1059.0)
    with pytest.raises(HandOffFailed) as caught:
        tickets.refuse_expired(TICKET, 1061.0)
    assert caught.value.handoff_reason is HandOffReason.TICKET_EXPIRED


def test_another_importer_or_another_incarnation_is_foreign() -> None:
    signed = tickets.sign(TICKET, KEY)
    assert _refusal(signed, importer=MemberId("d1", "b2")) is HandOffReason.FOREIGN_TICKET
    assert _refusal(signed, importer=MemberId("d0", "c3")) is HandOffReason.FOREIGN_TICKET


def test_a_reissued_ticket_differs_in_attempt_and_importer_only() -> None:
    other = MemberId("d1", "c3")
    signed = tickets.reissue(tickets.sign(TICKET, KEY), KEY, attempt=2, importer=other)
    expected = dataclasses.replace(TICKET, attempt=2, importer=other)
    assert tickets.verify(signed, KEY, importer=str(other)) == expected


def test_a_ticket_signed_with_another_key_is_not_reissued() -> None:
    with pytest.raises(HandOffFailed):
        tickets.reissue(tickets.sign(TICKET, ClusterKeys(b"x" * 32)), KEY, attempt=2, importer=IMPORTER)
