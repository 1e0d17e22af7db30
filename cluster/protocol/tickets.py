"""Signs, verifies and reissues tickets. The cluster's keys are an argument; this module keeps neither keys nor tickets.

A ticket travels as a serialized tandem.internal.v1.SignedTicket: the ticket's bytes exactly as signed, and their
signature (cluster/auth/keys.py).
"""

import dataclasses

from google.protobuf.message import DecodeError

from cluster.auth.keys import ClusterKeys, Purpose
from cluster.errors import HandOffFailed, HandOffReason, MalformedMessage
from cluster.messages import MemberId, Ticket
from cluster.protocol.received import checked
from cluster.protocol.wire import ticket_from_wire, ticket_to_wire
from tandem.internal.v1 import kv_pb2

TICKET_ID_BYTES = 16
CLOCK_LEEWAY_S = 60.0


def sign(ticket: Ticket, keys: ClusterKeys) -> bytes:
    """Return a serialized SignedTicket."""
    serialized = ticket_to_wire(ticket).SerializeToString(deterministic=True)
    return kv_pb2.SignedTicket(ticket=serialized, signature=keys.sign(Purpose.TICKETS, serialized)).SerializeToString()


def verify(signed: bytes, keys: ClusterKeys, *, importer: str) -> Ticket:
    """Return the ticket if the cluster signed it and it is for this importer ("id@incarnation").

    Raises HandOffFailed: BAD_SIGNATURE, FOREIGN_TICKET.
    """
    ticket = read(signed, keys)
    if str(ticket.importer) != importer:
        raise HandOffFailed(HandOffReason.FOREIGN_TICKET, f"the ticket is for {ticket.importer}, not for {importer}")
    return ticket


def refuse_expired(ticket: Ticket, wall_s: float) -> None:
    """Compare with the wall clock of the exporter that issued the ticket, so that no other clock has to be correct.
    Raises HandOffFailed: TICKET_EXPIRED."""
    late_s = wall_s - ticket.expires_at_s
    if late_s > CLOCK_LEEWAY_S:
        raise HandOffFailed(HandOffReason.TICKET_EXPIRED, f"the ticket expired {late_s:.0f} s ago")


def read(signed: bytes, keys: ClusterKeys) -> Ticket:
    """Return the ticket if the cluster signed it, for any importer. Raises HandOffFailed: BAD_SIGNATURE,
    MALFORMED_MESSAGE."""
    try:
        envelope = kv_pb2.SignedTicket.FromString(signed)
        if not keys.verify(Purpose.TICKETS, envelope.ticket, envelope.signature):
            raise HandOffFailed(HandOffReason.BAD_SIGNATURE, "the ticket was not signed with this cluster's key")
        return ticket_from_wire(checked(kv_pb2.Ticket.FromString(envelope.ticket)))
    except DecodeError as error:
        raise HandOffFailed(HandOffReason.BAD_SIGNATURE, "the bytes are not a ticket") from error
    except MalformedMessage as error:
        raise HandOffFailed(HandOffReason.MALFORMED_MESSAGE, error.message) from error


def reissue(signed: bytes, keys: ClusterKeys, *, attempt: int, importer: MemberId) -> bytes:
    """Return the same ticket for another attempt or another importer. Raises HandOffFailed: BAD_SIGNATURE."""
    return sign(dataclasses.replace(read(signed, keys), attempt=attempt, importer=importer), keys)
