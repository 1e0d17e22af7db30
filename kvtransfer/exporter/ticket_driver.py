"""One ticket at its exporter: the checks of an Attach, the calls of its importers, and the state machine behind them.

`AttachRules` decides whether an importer may attach. `IncomingCall` is one HandOff stream as the exporter sees it.
`TicketDriver` runs the ticket's `export_machine`, performs its actions and keeps the one timer that it needs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass

from cluster.auth.keys import ClusterKeys
from cluster.clock import Clock, DeadlineTimer
from cluster.errors import HandOffFailed, HandOffReason
from cluster.member import ProtocolRange
from cluster.messages import NO_WAIT, LayoutFingerprint, MemberId, Ticket
from cluster.protocol import tickets
from cluster.protocol.wire import fingerprint_from_wire
from kvtransfer.counters import TransferCounters
from kvtransfer.keyed_digests import BlockTags, DigestDefinition
from kvtransfer.protocol import export_machine as machine
from kvtransfer.protocol.handoff import (
    Accepted,
    Attach,
    ExporterMessage,
    ExportFailed,
    Finished,
    Outcome,
    Refused,
    Renew,
    Settle,
    Settled,
)
from kvtransfer.protocol.leases import LeasePhase, LeasePolicy
from kvtransfer.transports.base import ExporterTransport, negotiate
from kvtransfer.wire.handoff_wire import protocol_from_wire, to_wire
from tandem.internal.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class AcceptedAttach:
    ticket: Ticket
    transports: tuple[ExporterTransport, ...]  # at least one; the importer's first choice comes first
    protocol: int  # the version that both sides use
    reads_then: bool  # the importer reads ExporterMessage.then (from Attach)
    digest: str  # the name of the best definition that both sides support


class AttachRules:
    def __init__(
        self,
        *,
        member: MemberId,
        layout: LayoutFingerprint,
        keys: ClusterKeys,
        transports: Sequence[ExporterTransport],
        protocol: ProtocolRange,
        digests: Sequence[str],  # the definitions without a key that it offers, best first
    ) -> None:
        self._member, self._layout, self._keys, self._protocol = member, layout, keys, protocol
        self._transports, self._digests = tuple(transports), tuple(digests)

    def check(
        self,
        attach: kv_pb2.Attach,
        *,
        importer: str,
        wall_s: float,
        definition_of: Callable[[bytes], DigestDefinition],  # of the digests of a ticket; raises HandOffFailed
    ) -> AcceptedAttach:
        """Return the agreed transports and versions. Raises HandOffFailed with the first reason that applies;
        ValueError for an invalid range."""
        signed = attach.ticket.SerializeToString()
        ticket = tickets.verify(signed, self._keys, importer=importer)
        tickets.refuse_expired(ticket, wall_s)
        if ticket.exporter.id != self._member.id:
            raise HandOffFailed(
                HandOffReason.UNKNOWN_TICKET, f"the ticket is from {ticket.exporter}, and this is {self._member}"
            )
        if ticket.exporter != self._member:
            detail = f"the ticket is from {ticket.exporter}, and this is its successor {self._member}"
            raise HandOffFailed(HandOffReason.STALE_INCARNATION, detail)
        protocol = self._common_protocol(protocol_from_wire(attach))
        self._check_layout(fingerprint_from_wire(attach.layout))
        transports = negotiate(attach.transports, attach.endpoints, self._transports)
        if not transports:
            theirs, ours = ", ".join(attach.transports), ", ".join(t.name for t in self._transports)
            detail = f"the importer has [{theirs}], the exporter [{ours}], of those that connect the two"
            raise HandOffFailed(HandOffReason.NO_COMMON_TRANSPORT, detail)
        digest = self._common_digest(attach.digests, definition_of(ticket.ticket_id))
        return AcceptedAttach(ticket, transports, protocol, attach.reads_then, digest)

    def _common_digest(self, theirs: Sequence[str], definition: DigestDefinition) -> str:
        ours = (definition.name,) if definition.is_keyed else self._digests
        for name in ours:
            if name in theirs:
                return name
        detail = f"the importer computes digests by [{', '.join(theirs)}], the exporter by [{', '.join(ours)}]"
        raise HandOffFailed(HandOffReason.NO_COMMON_PROTOCOL, detail)

    def _common_protocol(self, theirs: ProtocolRange) -> int:
        """Return the version that both sides speak. It is checked before the layout, which a newer version may
        extend."""
        version = self._protocol.common(theirs)
        if version is None:
            detail = f"the importer supports protocol {theirs}, the exporter {self._protocol}"
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


class IncomingCall:
    def __init__(self, *, number: int, importer: str, counters: TransferCounters) -> None:
        self.number = number
        self.importer = importer
        self.attached: AcceptedAttach | None = None  # once its Attach has passed every check
        self._counters = counters
        self._counted = False
        self._outbox: asyncio.Queue[kv_pb2.ExporterMessage | None] = asyncio.Queue()

    async def messages(self) -> AsyncIterator[kv_pb2.ExporterMessage]:
        """Yield every message to send until the call is over.

        Messages that are ready together leave as one if the importer can read that: each message costs both sides a
        turn of their event loop."""
        while (message := await self._outbox.get()) is not None:
            is_last = self.attached is not None and self.attached.reads_then and self._append_ready(message)
            yield message
            if is_last:
                return

    def _append_ready(self, message: kv_pb2.ExporterMessage) -> bool:
        """Append the messages that are ready to `then`. Return True if the end of the call was among them."""
        while not self._outbox.empty():
            following = self._outbox.get_nowait()
            if following is None:
                return True
            message.then.append(following)
        return False

    def send(self, message: ExporterMessage, *, age_s: float) -> None:
        """Queue a message. Refused and Settled are the last ones. `age_s` is the time since the prefill's last step,
        for Finished."""
        wire = to_wire(message)
        if isinstance(message, Finished):
            wire.finished.age_s = age_s
        if isinstance(message, Accepted):
            assert self.attached is not None, "accepted before it was attached"
            self._admit(self.attached, wire.accepted)
        self._outbox.put_nowait(wire)
        if isinstance(message, Refused):
            self.count("refused", message.reason)
        if isinstance(message, Refused | Settled):
            self.end()

    @staticmethod
    def _admit(attached: AcceptedAttach, accepted: kv_pb2.Accepted) -> None:
        """Grant the epoch access to the pool by every agreed transport."""
        accepted.protocol, accepted.digest = attached.protocol, attached.digest
        first, *others = attached.transports
        accepted.transport, accepted.endpoint = first.name, first.grant(attached.ticket.epoch)
        for other in others:
            accepted.alternatives.add(transport=other.name, endpoint=other.grant(attached.ticket.epoch))

    def refuse(self, reason: HandOffReason, detail: str) -> None:
        """Refuse the call before a ticket's machine has received it."""
        self.count("refused", reason)
        self._outbox.put_nowait(kv_pb2.ExporterMessage(refused=kv_pb2.Refused(reason=reason, detail=detail)))
        self.end()

    def end(self) -> None:
        """Send nothing more after the queued messages."""
        self._outbox.put_nowait(None)

    def count(self, outcome: str, reason: HandOffReason | None) -> None:
        """Count how the hand-off ended. Only the first call counts."""
        if not self._counted:
            self._counted = True
            transport = self.attached.transports[0].name if self.attached is not None else ""
            self._counters.handoff(side="exporter", transport=transport, outcome=outcome, reason=reason or "")


class TicketDriver:
    """Drives one ticket's state machine.

    It outlives the release of the ticket while calls refer to it, so that a late Settle still gets its answer."""

    def __init__(
        self,
        *,
        ticket: Ticket,
        definition: DigestDefinition,  # of its blocks' digests
        policy: LeasePolicy,
        clock: Clock,
        counters: TransferCounters,
        released: "Callable[[TicketDriver], None]",
    ) -> None:
        self.ticket = ticket
        self.tags = BlockTags(definition, ticket.exporter, ticket.ticket_id)
        self.ended_s = 0.0  # when its last step ended; sent with Finished
        self.wait = NO_WAIT  # of its importer
        self._state = machine.export(ticket.exporter, ticket.ticket_id, ticket.attempt, policy)
        self._linger_s = policy.lease_s
        self._clock, self._counters = clock, counters
        self._released = released
        self._calls: dict[int, IncomingCall] = {}
        self._timer = DeadlineTimer(clock, lambda: self.apply(machine.Tick()))

    @property
    def was_attached(self) -> bool:
        """Return whether any attempt has attached, over or not."""
        return bool(self._state.calls)

    def attach(self, call: IncomingCall, accepted: AcceptedAttach) -> None:
        """Attach a call that passed every check. A signed attempt that is new to this ticket was reissued by the
        router."""
        epoch = accepted.ticket.epoch
        call.attached = accepted
        self._calls[call.number] = call
        if self._state.leases.find(epoch.attempt) is None and machine.can_reissue(self._state, epoch.attempt):
            self.apply(machine.Reissue(epoch.attempt))
        self.apply(machine.FromImporter(call.number, Attach(epoch)))

    def receive(self, call: IncomingCall, message: Renew | Settle) -> None:
        if isinstance(message, Settle) and message.outcome is not Outcome.OK:
            call.count(message.outcome, message.reason)
        self.apply(machine.FromImporter(call.number, message))

    def call_ended(self, call: IncomingCall) -> None:
        """Handle the end of a call. Without a settlement the attempt counts as failed."""
        call.count("failed", HandOffReason.IMPORTER_LOST)
        self.apply(machine.CallEnded(call.number))
        del self._calls[call.number]

    def apply(self, event: machine.Event) -> None:
        """Apply one event and perform all actions that follow from it."""
        self._state, actions = machine.advance(self._state, event, self._clock.now_s())
        for action in actions:
            match action:
                case machine.Send(number, message):
                    self._send(number, message)
                case machine.AttemptEnded(attempt, how):
                    self._on_attempt_ended(attempt, how, event)
                case machine.Release():
                    self._end()
        self._timer.set(self._state.next_deadline_s)

    def _send(self, number: int, message: ExporterMessage) -> None:
        call = self._calls.get(number)
        if call is None:
            return  # the call ended in the meantime
        if isinstance(message, ExportFailed):
            call.count("failed", message.reason)
        if isinstance(message, Settled):
            call.count("ok" if message.valid else "failed", None if message.valid else HandOffReason.LEASE_LAPSED)
        call.send(message, age_s=self._clock.now_s() - self.ended_s)

    def _on_attempt_ended(self, attempt: int, how: LeasePhase, event: machine.Event) -> None:
        """Revoke the attempt's access, so that it starts no further read, and count how it ended."""
        number = self._state.call_of(attempt)
        call = None if number is None else self._calls.get(number)
        if call is not None and call.attached is not None:
            for transport in call.attached.transports:
                transport.revoke(call.attached.ticket.epoch)
        if how is LeasePhase.LAPSED:
            self._counters.lease_lapse()
        if how is LeasePhase.WITHDRAWN and not isinstance(event, machine.Reissue):
            reason = event.reason if isinstance(event, machine.Fail) else HandOffReason.TICKET_EXPIRED
            self._counters.handoff(side="exporter", transport="", outcome="failed", reason=reason)

    def _end(self) -> None:
        """Release the ticket. Open calls get one lease (`lease_s`) to settle and receive their answer."""
        for call in self._calls.values():
            asyncio.get_running_loop().call_later(self._linger_s, call.end)
        self._released(self)
