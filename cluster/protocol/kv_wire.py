"""Convert tickets, epochs and fingerprints between tandem/internal/v1/kv.proto and the values of cluster/messages.py.

Messages were checked before (cluster/protocol/received.py). Signatures are checked by cluster/protocol/tickets.py.
"""

from cluster.messages import Epoch, LayoutFingerprint, MemberId, Ticket
from cluster.protocol.wire import member_from_wire
from tandem.enum_words import EnumWords
from tandem.internal.v1 import kv_pb2

WIRE_DTYPES = EnumWords(kv_pb2.WireDtype)  # their words are the values of --kv-wire-dtype


def epoch_to_wire(epoch: Epoch) -> kv_pb2.Epoch:
    return kv_pb2.Epoch(
        member_id=epoch.exporter.id,
        incarnation=epoch.exporter.incarnation,
        ticket_id=epoch.ticket_id,
        attempt=epoch.attempt,
    )


def epoch_from_wire(message: kv_pb2.Epoch) -> Epoch:
    return Epoch(MemberId(message.member_id, message.incarnation), message.ticket_id, message.attempt)


def ticket_to_wire(ticket: Ticket) -> kv_pb2.Ticket:
    return kv_pb2.Ticket(
        ticket_id=ticket.ticket_id,
        exporter_id=ticket.exporter.id,
        exporter_incarnation=ticket.exporter.incarnation,
        exporter_address=ticket.exporter_address,
        importer=str(ticket.importer),
        request_id=ticket.request_id,
        attempt=ticket.attempt,
        num_tokens=ticket.num_tokens,
        prompt_hash=ticket.prompt_hash,
        num_choices=ticket.num_choices,
        expires_at_s=ticket.expires_at_s,
    )


def ticket_from_wire(message: kv_pb2.Ticket) -> Ticket:
    """Convert a checked message. The signature is not verified here; the exporter does that."""
    return Ticket(
        ticket_id=message.ticket_id,
        exporter=MemberId(message.exporter_id, message.exporter_incarnation),
        exporter_address=message.exporter_address,
        importer=member_from_wire(message.importer),
        request_id=message.request_id,
        attempt=message.attempt,
        num_tokens=message.num_tokens,
        prompt_hash=message.prompt_hash,
        num_choices=message.num_choices,
        expires_at_s=message.expires_at_s,
    )


def fingerprint_to_wire(fingerprint: LayoutFingerprint) -> kv_pb2.LayoutFingerprint:
    return kv_pb2.LayoutFingerprint(
        weights=fingerprint.weights,
        model_config=fingerprint.model_config,
        dtype=fingerprint.dtype,
        block_table=fingerprint.block_table,
        wire_dtype=WIRE_DTYPES.number(fingerprint.wire_dtype),
        kv_format=fingerprint.kv_format,
    )


def fingerprint_from_wire(message: kv_pb2.LayoutFingerprint) -> LayoutFingerprint:
    return LayoutFingerprint(
        weights=message.weights,
        model_config=message.model_config,
        dtype=message.dtype,
        block_table=message.block_table,
        wire_dtype=WIRE_DTYPES.word(message.wire_dtype),
        kv_format=message.kv_format,
    )
