"""Wire messages of the hand-off (tandem/v1/kv.proto) from and to the values of cluster/messages.py."""

import struct
from collections.abc import Sequence

from cluster.messages import Epoch, LayoutFingerprint, MemberId, Ticket
from kvtransfer.digest import DIGEST_BYTES
from tandem.v1 import kv_pb2


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


def ticket_from_wire(wire: kv_pb2.Ticket) -> Ticket:
    """Raises ValueError on a malformed member id."""
    return Ticket(
        ticket_id=wire.ticket_id,
        exporter=MemberId(wire.exporter_id, wire.exporter_incarnation),
        exporter_address=wire.exporter_address,
        importer=MemberId.parse(wire.importer),
        request_id=wire.request_id,
        attempt=wire.attempt,
        num_tokens=wire.num_tokens,
        prompt_hash=wire.prompt_hash,
        num_choices=wire.num_choices,
        expires_at_s=wire.expires_at_s,
    )


def epoch_to_wire(epoch: Epoch) -> kv_pb2.Epoch:
    return kv_pb2.Epoch(
        member_id=epoch.exporter.id,
        incarnation=epoch.exporter.incarnation,
        ticket_id=epoch.ticket_id,
        attempt=epoch.attempt,
    )


def epoch_from_wire(wire: kv_pb2.Epoch) -> Epoch:
    return Epoch(MemberId(wire.member_id, wire.incarnation), wire.ticket_id, wire.attempt)


def layout_to_wire(layout: LayoutFingerprint) -> kv_pb2.LayoutFingerprint:
    return kv_pb2.LayoutFingerprint(
        weights=layout.weights,
        model_config=layout.model_config,
        dtype=layout.dtype,
        block_table=layout.block_table,
        tp_size=layout.tp_size,
        tp_rank=layout.tp_rank,
        wire_dtype=layout.wire_dtype,
        kv_format=layout.kv_format,
    )


def layout_from_wire(wire: kv_pb2.LayoutFingerprint) -> LayoutFingerprint:
    return LayoutFingerprint(
        weights=wire.weights,
        model_config=wire.model_config,
        dtype=wire.dtype,
        block_table=wire.block_table,
        tp_size=wire.tp_size,
        tp_rank=wire.tp_rank,
        wire_dtype=wire.wire_dtype,
        kv_format=wire.kv_format,
    )


def pack_block_ids(block_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(block_ids)}I", *block_ids)


def unpack_block_ids(packed: bytes) -> tuple[int, ...]:
    """Raises ValueError when it is not a whole number of ids."""
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes are not a whole number of block ids")
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def split_digests(packed: bytes) -> tuple[bytes, ...]:
    """Raises ValueError when it is not a whole number of digests."""
    if len(packed) % DIGEST_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of digests")
    return tuple(packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES))
