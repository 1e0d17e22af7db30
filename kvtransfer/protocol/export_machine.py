"""The exporter's side of hand-offs, for one ticket with all its attempts. Pure.

It decides what is offered to which importer and when the ticket's blocks are free again: `Release` is given exactly
once. It never touches blocks, digests or calls. The driver does, and checks an Attach (signature, expiry, addressee,
layout, transports) before it passes it on.

A call is one HandOff stream. The driver numbers its calls and never reuses a number; actions name their call. An
attempt belongs to the first call that attaches with it.

Events                                             what it means
    SealBlocks(first_index, blocks)                the prefill wrote these; index counts in the ticket's order
    Finish(first_tokens, num_tokens, hash, tail)   the prefill is done; comes after its last SealBlocks Fail(reason,
    detail)                           the prefill will not finish, or is not needed: tell attached importers
    Reissue(attempt)                               the router wants one more attempt; ask `can_reissue` first. It may
                                                   be another importer's: a call that ends without Settle, or settles
                                                   as failed, leaves the ticket vacant for `lease_s`
    FromImporter(call, message)                    Attach, Renew or Settle
    CallEnded(call)                                the stream has ended
    Tick()                                         give one at `next_deadline_s`, and on every turn of the loop
Actions                                            what the driver does
    Send(call, message)                            Refused and Settled are the last ones on their call
    Release()                                      blocks are free: no lease is left and none will come
    AttemptEnded(attempt, how, was_valid)          no further read of this epoch; `how`: settled, lapsed or withdrawn

The driver drops a state when `is_over`; a later importer is refused with UNKNOWN_TICKET.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.errors import HandOffReason
from cluster.messages import Epoch, MemberId
from kvtransfer.protocol import leases as lease_rules
from kvtransfer.protocol.frozen import changed
from kvtransfer.protocol.handoff import (
    GUARDS,
    Accepted,
    Attach,
    ExporterMessage,
    ExportFailed,
    Finished,
    FirstToken,
    Guards,
    ImporterMessage,
    Outcome,
    Refused,
    RemoteBlock,
    Renew,
    Sealed,
    Settle,
    Settled,
    Tail,
    illegal,
    remembered,
)
from kvtransfer.protocol.leases import LeasePhase, LeasePolicy, TicketLeases


class ExporterPhase(StrEnum):
    COMPUTING = "computing"  # queued, or some chunks done
    FINISHED = "finished"
    FAILED = "failed"
    RELEASED = "released"  # no lease is left; the prefill itself may still be computing


_MOVES = {
    ExporterPhase.COMPUTING: {ExporterPhase.FINISHED, ExporterPhase.FAILED, ExporterPhase.RELEASED},
    ExporterPhase.FINISHED: {ExporterPhase.RELEASED},
    ExporterPhase.FAILED: {ExporterPhase.RELEASED},
    ExporterPhase.RELEASED: set[ExporterPhase](),
}


@dataclass(frozen=True, slots=True)
class SealBlocks:
    first_index: int
    blocks: tuple[RemoteBlock, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    first_tokens: tuple[FirstToken, ...]  # one per choice
    num_tokens: int
    prompt_hash: bytes
    tail: Tail | None


@dataclass(frozen=True, slots=True)
class Fail:
    reason: HandOffReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Reissue:
    attempt: int


@dataclass(frozen=True, slots=True)
class FromImporter:
    call: int
    message: ImporterMessage


@dataclass(frozen=True, slots=True)
class CallEnded:
    call: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = SealBlocks | Finish | Fail | Reissue | FromImporter | CallEnded | Tick


@dataclass(frozen=True, slots=True)
class Send:
    call: int
    message: ExporterMessage


@dataclass(frozen=True, slots=True)
class Release:
    pass


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    attempt: int
    how: LeasePhase
    was_valid: bool


Action = Send | Release | AttemptEnded


@dataclass(frozen=True, slots=True)
class ExporterState:
    """The state of one ticket. `leases` has an entry per attempt, `calls` one per attempt that has attached."""

    exporter: MemberId
    ticket_id: bytes
    leases: TicketLeases
    phase: ExporterPhase = ExporterPhase.COMPUTING
    blocks: tuple[RemoteBlock, ...] = ()
    finish: Finish | None = None
    failure: Fail | None = None
    calls: tuple[tuple[int, int], ...] = ()  # (attempt, call)
    history: tuple[str, ...] = field(default=(), compare=False)

    @property
    def next_deadline_s(self) -> float | None:
        return self.leases.next_deadline_s

    @property
    def is_over(self) -> bool:
        return self.phase is ExporterPhase.RELEASED

    def call_of(self, attempt: int) -> int | None:
        return next((call for known, call in self.calls if known == attempt), None)

    def epoch(self, attempt: int) -> Epoch:
        return Epoch(self.exporter, self.ticket_id, attempt)


Step = tuple[ExporterState, tuple[Action, ...]]


def export(exporter: MemberId, ticket_id: bytes, attempt: int, policy: LeasePolicy) -> ExporterState:
    """Return the state of a ticket that was just issued."""
    return ExporterState(exporter, ticket_id, lease_rules.offer(policy, attempt))


def can_reissue(state: ExporterState, attempt: int, guards: Guards = GUARDS) -> bool:
    return state.phase is not ExporterPhase.FAILED and lease_rules.can_reissue(state.leases, attempt, guards.leases)


def advance(state: ExporterState, event: Event, now_s: float, guards: Guards = GUARDS) -> Step:
    """Apply one event. Raises IllegalMove if the driver or the step thread broke the order given above."""
    actions: tuple[Action, ...] = ()
    before = state.leases
    match event:
        case SealBlocks():
            state, actions = _seal(state, event, now_s)
        case Finish():
            state, actions = _finish(state, event, now_s)
        case Fail():
            state, actions = _fail(state, event)
        case Reissue(attempt):
            if not can_reissue(state, attempt, guards):
                raise illegal(state.history, f"reissue {attempt} in {state.phase}")
            state = changed(state, leases=lease_rules.reissue(state.leases, attempt, now_s, guards.leases))
        case FromImporter(call, message):
            state, actions = _receive(state, call, message, now_s, guards)
        case CallEnded(call):
            for attempt, known in state.calls:
                if known == call:
                    state = changed(state, leases=lease_rules.vacate(state.leases, attempt, now_s, guards.leases))
        case Tick():
            state, actions = _reap(state, now_s, guards)
    actions += _ended(before, state.leases)
    return _release_if_unpinned(_remember(state, event), actions, guards)


def _seal(state: ExporterState, event: SealBlocks, now_s: float) -> Step:
    # The step thread had not received the failure yet.
    if state.phase in (ExporterPhase.RELEASED, ExporterPhase.FAILED):
        return state, ()
    if state.phase is not ExporterPhase.COMPUTING or event.first_index != len(state.blocks) or not event.blocks:
        raise illegal(state.history, f"{event} with {len(state.blocks)} blocks in {state.phase}")
    state = changed(state, blocks=state.blocks + event.blocks, leases=lease_rules.seal(state.leases, now_s))
    return state, _tell_attached(state, lambda epoch: Sealed(epoch, event.first_index, event.blocks))


def _finish(state: ExporterState, event: Finish, now_s: float) -> Step:
    if state.phase in (ExporterPhase.RELEASED, ExporterPhase.FAILED):
        return state, ()
    state = changed(_to(state, ExporterPhase.FINISHED), finish=event, leases=lease_rules.seal(state.leases, now_s))
    return state, _tell_attached(state, lambda epoch: _finished(event, epoch))


def _fail(state: ExporterState, event: Fail) -> Step:
    """Close the ticket to new importers, and tell attached ones if the prefill will not finish.

    What an attached importer reads stays pinned until it settles or its lease ends. Without a sealed block nothing is
    pinned."""
    state = changed(state, leases=lease_rules.withdraw(state.leases))
    if state.phase is not ExporterPhase.COMPUTING:
        return state, ()
    state = changed(_to(state, ExporterPhase.FAILED), failure=event)
    actions = _tell_attached(state, lambda epoch: ExportFailed(epoch, event.reason, event.detail))
    if not state.leases.has_sealed:
        for lease in state.leases.leases:
            state = changed(state, leases=lease_rules.end(state.leases, lease.attempt))
    return state, actions


def _receive(state: ExporterState, call: int, message: ImporterMessage, now_s: float, guards: Guards) -> Step:
    attempt = message.epoch.attempt
    if not guards.same_epoch(state.epoch(attempt), message.epoch):
        return state, ()
    owner = state.call_of(attempt)
    if owner is not None and owner != call:
        return state, (Send(call, Refused(message.epoch, HandOffReason.REPLAYED_TICKET)),)
    match message:
        case Attach():
            return _attach(state, call, attempt, now_s, guards)
        case Renew():
            return changed(state, leases=lease_rules.renew(state.leases, attempt, now_s, guards.leases)), ()
        case Settle(epoch, Outcome.FAILED):
            leases = lease_rules.vacate(state.leases, attempt, now_s, guards.leases)
            return changed(state, leases=leases), (Send(call, Settled(epoch, valid=False)),)
        case Settle(epoch):
            leases, valid = lease_rules.settle(state.leases, attempt, now_s, guards.leases)
            # Only a complete hand-off can be valid: OK before Finished breaks the protocol.
            return changed(state, leases=leases), (Send(call, Settled(epoch, valid and state.finish is not None)),)


def _attach(state: ExporterState, call: int, attempt: int, now_s: float, guards: Guards) -> Step:
    lease = state.leases.find(attempt)
    if state.call_of(attempt) == call and lease is not None and not guards.leases.attached_once(lease):
        return state, ()  # the same Attach, twice
    epoch = state.epoch(attempt)
    leases, refusal = lease_rules.attach(state.leases, attempt, now_s, guards.leases)
    if refusal is not None:
        reason, detail = (state.failure.reason, state.failure.detail) if state.failure else (refusal, "")
        return state, (Send(call, Refused(epoch, reason, detail)),)
    calls = (*((known, other) for known, other in state.calls if known != attempt), (attempt, call))
    state = changed(state, leases=leases, calls=calls)
    messages: list[ExporterMessage] = [Accepted(epoch, leases.policy.lease_s, leases.policy.max_lease_s)]
    if state.blocks:
        messages.append(Sealed(epoch, 0, state.blocks))
    if state.finish is not None:
        messages.append(_finished(state.finish, epoch))
    return state, tuple(Send(call, message) for message in messages)


def _reap(state: ExporterState, now_s: float, guards: Guards) -> Step:
    leases, lapsed = lease_rules.reap(state.leases, now_s, guards.leases)
    state = changed(state, leases=leases)
    actions: list[Action] = []
    for attempt in lapsed:
        call = state.call_of(attempt)
        if call is not None:
            actions.append(Send(call, ExportFailed(state.epoch(attempt), HandOffReason.LEASE_LAPSED)))
    return state, tuple(actions)


def _ended(before: TicketLeases, after: TicketLeases) -> tuple[Action, ...]:
    were_live = {lease.attempt for lease in before.leases if lease.is_live}
    return tuple(
        AttemptEnded(lease.attempt, lease.phase, lease.was_valid)
        for lease in after.leases
        if lease.attempt in were_live and not lease.is_live
    )


def _release_if_unpinned(state: ExporterState, actions: tuple[Action, ...], guards: Guards) -> Step:
    if state.phase is ExporterPhase.RELEASED or guards.leases.pinned_while_leased(state.leases):
        return state, actions
    return _to(state, ExporterPhase.RELEASED), (*actions, Release())


def _tell_attached(state: ExporterState, message: Callable[[Epoch], ExporterMessage]) -> tuple[Action, ...]:
    actions = []
    for attempt, call in state.calls:
        lease = state.leases.find(attempt)
        if lease is not None and lease.phase in (LeasePhase.ATTACHED, LeasePhase.RUNNING):
            actions.append(Send(call, message(state.epoch(attempt))))
    return tuple(actions)


def _finished(finish: Finish, epoch: Epoch) -> Finished:
    return Finished(epoch, finish.first_tokens, finish.num_tokens, finish.prompt_hash, finish.tail)


def _to(state: ExporterState, phase: ExporterPhase) -> ExporterState:
    if phase not in _MOVES[state.phase]:
        raise illegal(state.history, f"{state.phase} to {phase}")
    return changed(state, phase=phase)


def _remember(state: ExporterState, event: Event) -> ExporterState:
    if isinstance(event, Tick):
        return state
    name = type(event.message).__name__ if isinstance(event, FromImporter) else type(event).__name__
    return changed(state, history=remembered(state.history, f"{name}:{state.phase}"))
