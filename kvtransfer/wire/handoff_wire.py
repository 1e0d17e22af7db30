"""Converts the hand-off's messages from and to the wire.

Received messages were checked before (cluster/protocol/received.py); the only error left is a message that is not
allowed at this point. Ticket, transports, layout and endpoint, which only drivers use, are not part of a machine's
messages: drivers add them to Attach and Accepted, and read them from there.
"""

from collections.abc import Container, Iterable, Mapping

from cluster.errors import HandOffReason
from cluster.member import ProtocolRange
from cluster.messages import Epoch, ExportWait, LayoutFingerprint
from cluster.protocol.wire import epoch_from_wire, epoch_to_wire, fingerprint_to_wire, pack_ids, unpack_ids
from kvtransfer.digests import split_digests
from kvtransfer.protocol.handoff import (
    Accepted,
    ExporterMessage,
    ExportFailed,
    Finished,
    FirstToken,
    Outcome,
    Refused,
    RemoteBlock,
    Renew,
    Sealed,
    Settle,
    Settled,
    Tail,
)
from tandem.internal.v1 import kv_pb2

IMPORTER_METADATA = "tandem-importer"  # metadata of a HandOff call: "id@incarnation" of the importer
_UNSAID = 1  # the protocol's version where a message names none

_OUTCOMES = {
    Outcome.OK: kv_pb2.Settle.OUTCOME_OK,
    Outcome.UNNEEDED: kv_pb2.Settle.OUTCOME_UNNEEDED,
    Outcome.FAILED: kv_pb2.Settle.OUTCOME_FAILED,
}
_OUTCOMES_FROM_WIRE = {wire: outcome for outcome, wire in _OUTCOMES.items()}
_REASONS = {str(reason): reason for reason in HandOffReason}


def attach_to_wire(
    signed_ticket: bytes,
    layout: LayoutFingerprint,
    endpoints: Mapping[str, bytes],
    protocol: ProtocolRange,
    digests: Iterable[str],
) -> kv_pb2.ImporterMessage:
    """Return an Attach that offers the transports of these endpoints, best first, and these definitions of digests."""
    return kv_pb2.ImporterMessage(
        attach=kv_pb2.Attach(
            ticket=kv_pb2.SignedTicket.FromString(signed_ticket),
            transports=list(endpoints),
            layout=fingerprint_to_wire(layout),
            endpoints=endpoints,
            protocol_oldest=protocol.oldest,
            protocol_newest=protocol.newest,
            digests=list(digests),
            reads_then=True,
        )
    )


def renew_to_wire(wait: ExportWait) -> kv_pb2.ImporterMessage:
    return kv_pb2.ImporterMessage(renew=kv_pb2.Renew(wait_depth=wait.depth, wait_mark=wait.mark))


def settle_to_wire(settle: Settle) -> kv_pb2.ImporterMessage:
    return kv_pb2.ImporterMessage(
        settle=kv_pb2.Settle(
            epoch=epoch_to_wire(settle.epoch), outcome=_OUTCOMES[settle.outcome], reason=settle.reason or ""
        )
    )


def renew_or_settle_from_wire(wire: kv_pb2.ImporterMessage, epoch: Epoch) -> Renew | Settle:
    """Return a Renew or Settle, which may follow Attach on the stream of this epoch. Raises ValueError."""
    match wire.WhichOneof("message"):
        case "renew":
            return Renew(epoch, ExportWait(wire.renew.wait_depth, wire.renew.wait_mark))
        case "settle":
            outcome = _OUTCOMES_FROM_WIRE.get(wire.settle.outcome)
            if outcome is None:
                raise ValueError("the message Settle has no outcome")
            reason = reason_from_wire(wire.settle.reason) if wire.settle.reason else None
            return Settle(epoch_from_wire(wire.settle.epoch), outcome, reason)
        case other:
            raise ValueError(f"received {other}, where only Renew or Settle may follow")


def protocol_from_wire(attach: kv_pb2.Attach) -> ProtocolRange:
    """Return the importer's versions. An importer that sends none speaks the first."""
    return ProtocolRange(attach.protocol_oldest or _UNSAID, attach.protocol_newest or _UNSAID)


def require_offered(accepted: kv_pb2.Accepted, protocol: ProtocolRange, digests: Container[str]) -> None:
    """Check that the exporter accepted a version and a definition of digests that were offered. Raises ValueError."""
    version = accepted.protocol or _UNSAID
    if version not in protocol:
        raise ValueError(f"the exporter accepted protocol {version}, where {protocol} was offered")
    if accepted.digest not in digests:
        raise ValueError(f"the exporter accepted digests of {accepted.digest!r}, which was not offered")


def require_in_vocabulary(finished: Finished, vocab_size: int) -> None:
    """Check that the model has the first tokens. Raises ValueError."""
    highest = max((first.token_id for first in finished.first_tokens), default=-1)
    if highest >= vocab_size:
        raise ValueError(f"first token {highest} is outside the vocabulary of {vocab_size}")


def to_wire(message: ExporterMessage) -> kv_pb2.ExporterMessage:
    match message:
        case Accepted():
            accepted = kv_pb2.Accepted(
                epoch=epoch_to_wire(message.epoch), lease_s=message.lease_s, max_lease_s=message.max_lease_s
            )
            return kv_pb2.ExporterMessage(accepted=accepted)
        case Refused():
            return kv_pb2.ExporterMessage(refused=kv_pb2.Refused(reason=message.reason, detail=message.detail))
        case Sealed():
            return kv_pb2.ExporterMessage(sealed=_sealed_to_wire(message))
        case Finished():
            return kv_pb2.ExporterMessage(finished=_finished_to_wire(message))
        case ExportFailed():
            failed = kv_pb2.Failed(epoch=epoch_to_wire(message.epoch), reason=message.reason, detail=message.detail)
            return kv_pb2.ExporterMessage(failed=failed)
        case Settled():
            settled = kv_pb2.Settled(epoch=epoch_to_wire(message.epoch), valid=message.valid)
            return kv_pb2.ExporterMessage(settled=settled)


def from_wire(wire: kv_pb2.ExporterMessage, epoch: Epoch) -> ExporterMessage:
    """Return the message on the stream of this epoch. Raises ValueError."""
    match wire.WhichOneof("message"):
        case "accepted":
            accepted = wire.accepted
            epoch = epoch_from_wire(accepted.epoch)
            return Accepted(epoch, accepted.lease_s, accepted.max_lease_s, len(accepted.alternatives))
        case "refused":
            return Refused(epoch, reason_from_wire(wire.refused.reason), wire.refused.detail)
        case "sealed":
            return _sealed_from_wire(wire.sealed)
        case "finished":
            return _finished_from_wire(wire.finished)
        case "failed":
            failed = wire.failed
            return ExportFailed(epoch_from_wire(failed.epoch), reason_from_wire(failed.reason), failed.detail)
        case "settled":
            return Settled(epoch_from_wire(wire.settled.epoch), wire.settled.valid)
        case _:
            raise ValueError("the message has no content or an unknown kind")


def reason_from_wire(name: str) -> HandOffReason:
    """Return the reason. An unknown name counts as a violation of the protocol."""
    return _REASONS.get(name, HandOffReason.PROTOCOL)


def _sealed_to_wire(message: Sealed) -> kv_pb2.Sealed:
    return kv_pb2.Sealed(
        epoch=epoch_to_wire(message.epoch),
        first_index=message.first_index,
        block_ids=pack_ids([block.block_id for block in message.blocks]),
        digests=b"".join(block.digest for block in message.blocks),
        unverified_block_ids=pack_ids([block.block_id for block in message.blocks if block.is_unverified]),
    )


def _sealed_from_wire(wire: kv_pb2.Sealed) -> Sealed:
    block_ids = unpack_ids(wire.block_ids)
    digests = split_digests(wire.digests) if wire.digests else (b"",) * len(block_ids)
    unverified = frozenset(unpack_ids(wire.unverified_block_ids))
    pairs = zip(block_ids, digests, strict=True)
    blocks = tuple([RemoteBlock(block_id, digest, block_id in unverified) for block_id, digest in pairs])
    return Sealed(epoch_from_wire(wire.epoch), wire.first_index, blocks)


def _finished_to_wire(message: Finished) -> kv_pb2.Finished:
    finished = kv_pb2.Finished(
        epoch=epoch_to_wire(message.epoch),
        first_tokens=[kv_pb2.FirstToken(token_id=t.token_id, ended=t.ended) for t in message.first_tokens],
        num_tokens=message.num_tokens,
        prompt_hash=message.prompt_hash,
    )
    if message.tail is not None:
        block = message.tail.block
        tail = kv_pb2.TailBlock(
            block_id=block.block_id,
            digest=block.digest,
            num_valid=message.tail.num_valid,
            is_unverified=block.is_unverified,
        )
        finished.tail.CopyFrom(tail)
    return finished


def _finished_from_wire(wire: kv_pb2.Finished) -> Finished:
    tail = None
    if wire.HasField("tail"):
        block = RemoteBlock(wire.tail.block_id, wire.tail.digest, wire.tail.is_unverified)
        tail = Tail(block, wire.tail.num_valid)
    return Finished(
        epoch_from_wire(wire.epoch),
        tuple(FirstToken(first.token_id, first.ended) for first in wire.first_tokens),
        wire.num_tokens,
        wire.prompt_hash,
        tail,
    )
