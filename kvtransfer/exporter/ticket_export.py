"""One ticket at its exporter: runs its `export_machine`, performs the actions, keeps the one timer it needs."""

import asyncio
from collections.abc import Callable

from cluster.clock import Clock
from cluster.errors import HandOffReason
from cluster.messages import Ticket
from kvtransfer.counters import TransferCounters
from kvtransfer.deadline_timer import DeadlineTimer
from kvtransfer.exporter.attach_rules import AcceptedAttach
from kvtransfer.exporter.export_call import ExportCall
from kvtransfer.protocol import export_machine as machine
from kvtransfer.protocol.handoff import Attach, ExporterMessage, Failed, Outcome, Renew, Settle, Settled
from kvtransfer.protocol.leases import LeasePhase, LeasePolicy


class TicketExport:
    """Outlives its release for as long as calls refer to it: a late Settle still gets its answer."""

    def __init__(
        self,
        *,
        ticket: Ticket,
        policy: LeasePolicy,
        clock: Clock,
        counters: TransferCounters,
        released: "Callable[[TicketExport], None]",
    ) -> None:
        self.ticket = ticket
        self.ended_s = 0.0  # when its last step ended; said with Finished
        self._state = machine.export(ticket.exporter, ticket.ticket_id, ticket.attempt, policy)
        self._linger_s = policy.lease_s
        self._clock, self._counters = clock, counters
        self._released = released
        self._calls: dict[int, ExportCall] = {}
        self._timer = DeadlineTimer(clock, lambda: self.take(machine.Tick()))

    @property
    def was_attached(self) -> bool:
        """By whichever attempt, over or not."""
        return bool(self._state.calls)

    def attach(self, call: ExportCall, accepted: AcceptedAttach) -> None:
        """A call whose Attach passed every check. A signed attempt that is new here was reissued by the router."""
        epoch = accepted.ticket.epoch
        call.attached = accepted
        self._calls[call.number] = call
        if self._state.leases.find(epoch.attempt) is None and machine.can_reissue(self._state, epoch.attempt):
            self.take(machine.Reissue(epoch.attempt))
        self.take(machine.FromImporter(call.number, Attach(epoch)))

    def hear(self, call: ExportCall, message: Renew | Settle) -> None:
        if isinstance(message, Settle) and message.outcome is not Outcome.OK:
            call.count(message.outcome, message.reason)
        self.take(machine.FromImporter(call.number, message))

    def call_ended(self, call: ExportCall) -> None:
        """Without a settlement it counts as failed."""
        call.count("failed", HandOffReason.IMPORTER_LOST)
        self.take(machine.CallEnded(call.number))
        del self._calls[call.number]

    def take(self, event: machine.Event) -> None:
        """One event, and everything that follows from it."""
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
            return  # it ended meanwhile
        if isinstance(message, Failed):
            call.count("failed", message.reason)
        if isinstance(message, Settled):
            call.count("ok" if message.valid else "failed", None if message.valid else HandOffReason.LEASE_LAPSED)
        call.send(message, age_s=self._clock.now_s() - self.ended_s)

    def _on_attempt_ended(self, attempt: int, how: LeasePhase, event: machine.Event) -> None:
        """No further read of this attempt."""
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
        """Released. Calls that do not end by themselves get as long as a lease to settle, and their answer."""
        for call in self._calls.values():
            asyncio.get_running_loop().call_later(self._linger_s, call.end)
        self._released(self)
