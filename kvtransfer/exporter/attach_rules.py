"""Who may attach: every check that an Attach must pass before the ticket's machine hears of it, each with its name."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cluster.errors import HandOffFailed, HandOffReason
from cluster.messages import LayoutFingerprint, MemberId, Ticket
from cluster.protocol import tickets
from cluster.protocol.kv_wire import fingerprint_from_wire
from cluster.protocol.versions import ProtocolRange
from kvtransfer.digest.definitions import DigestDefinition
from kvtransfer.transports.base import ExporterTransport, negotiate
from kvtransfer.wire.handoff_wire import common_digests, protocol_from_wire
from tandem.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class AcceptedAttach:
    ticket: Ticket
    transports: tuple[ExporterTransport, ...]  # at least one; what the importer likes best comes first
    protocol: int  # that both speak
    reads_then: bool  # as Attach says
    digests: DigestDefinition  # the best that both know


class AttachRules:
    def __init__(
        self,
        *,
        member: MemberId,
        layout: LayoutFingerprint,
        key: bytes,
        transports: Sequence[ExporterTransport],
        protocol: ProtocolRange,
        digests: Sequence[DigestDefinition],
    ) -> None:
        self._member, self._layout, self._key, self._protocol = member, layout, key, protocol
        self._transports, self._digests = tuple(transports), tuple(digests)

    def check(self, attach: kv_pb2.Attach, *, importer: str, wall_s: float) -> AcceptedAttach:
        """Raises HandOffFailed with the first reason that applies, ValueError for versions that are no range."""
        signed = attach.ticket.SerializeToString()
        ticket = tickets.verify(signed, self._key, importer=importer)
        tickets.refuse_expired(ticket, wall_s)
        if ticket.exporter.id != self._member.id:
            raise HandOffFailed(HandOffReason.UNKNOWN_TICKET, f"a ticket of {ticket.exporter}; this is {self._member}")
        if ticket.exporter != self._member:
            detail = f"a ticket of {ticket.exporter}; this is its successor {self._member}"
            raise HandOffFailed(HandOffReason.STALE_INCARNATION, detail)
        protocol = self._common_protocol(protocol_from_wire(attach))
        self._check_layout(fingerprint_from_wire(attach.layout))
        transports = negotiate(attach.transports, attach.endpoints, self._transports)
        if not transports:
            theirs, ours = ", ".join(attach.transports), ", ".join(t.name for t in self._transports)
            detail = f"the importer has [{theirs}], the exporter [{ours}], as far as each reaches the other"
            raise HandOffFailed(HandOffReason.NO_COMMON_TRANSPORT, detail)
        digests = common_digests(attach, self._digests)
        return AcceptedAttach(ticket, transports, protocol, attach.reads_then, digests)

    def _common_protocol(self, theirs: ProtocolRange) -> int:
        """Before the layout: a newer version may say more in it."""
        version = self._protocol.common(theirs)
        if version is None:
            detail = f"the importer speaks protocol {theirs}, the exporter {self._protocol}"
            raise HandOffFailed(HandOffReason.NO_COMMON_PROTOCOL, detail)
        return version

    def _check_layout(self, theirs: LayoutFingerprint) -> None:
        if theirs == self._layout:
            return
        ours = asdict(self._layout)
        differing = [
            f"{name}: importer {value}, exporter {ours[name]}"
            for name, value in asdict(theirs).items()
            if value != ours[name]
        ]
        raise HandOffFailed(HandOffReason.LAYOUT_MISMATCH, "; ".join(differing))
