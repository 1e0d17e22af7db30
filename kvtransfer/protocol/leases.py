"""Leases on one ticket's blocks: an exporter's promise, per attempt, that they stay pinned. Pure.

This module decides when a lease starts and ends, and when the ticket's blocks may be unpinned. It sends and frees
nothing. Its only clock is the argument `now_s`, the exporter's monotonic time.

    OFFERED ----attach----> ATTACHED ----first block sealed----> RUNNING ----settle, end----> SETTLED
       |                       |                                    |
       |                       +------------settle, end------------>|
       |                                                            +-------deadline-------> LAPSED
       +----attach deadline, withdraw, newer attempt----> WITHDRAWN

- A lease belongs to an attempt. It starts when there is something to pin: at the first sealed block or when the
importer
  attaches, whichever is later. A ticket without an importer has its own deadline, counted from its first block.
- Renewing moves the deadline, never beyond `max_lease_s` after the start. A lease whose deadline has passed is over,
even
  before it is reaped; nothing revives it.
- An attempt settles once; a repeated Settle gets the same answer, which is whether the lease held throughout.
- A ticket is vacant when its last importer failed or is gone, but not when a lease lapsed or the importer needs nothing
  more. Another importer may come for `lease_s`; that time is not renewed, and withdrawing the ticket ends it.
- Blocks are unpinned when no attempt is live any more and the ticket is not vacant. A new attempt is possible only
before
  that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from cluster.errors import HandOffReason
from kvtransfer.protocol.frozen import changed


class LeasePhase(StrEnum):
    OFFERED = "offered"  # the ticket is issued; no importer has attached with this attempt
    ATTACHED = "attached"  # nothing is sealed yet, so nothing is pinned
    RUNNING = "running"
    SETTLED = "settled"  # by its importer, or by the end of its call
    LAPSED = "lapsed"
    WITHDRAWN = "withdrawn"  # over before an importer attached


_LIVE = frozenset({LeasePhase.OFFERED, LeasePhase.ATTACHED, LeasePhase.RUNNING})
_MOVES = {
    LeasePhase.OFFERED: {LeasePhase.ATTACHED, LeasePhase.RUNNING, LeasePhase.SETTLED, LeasePhase.WITHDRAWN},
    LeasePhase.ATTACHED: {LeasePhase.RUNNING, LeasePhase.SETTLED},
    LeasePhase.RUNNING: {LeasePhase.RUNNING, LeasePhase.SETTLED, LeasePhase.LAPSED},
}


class IllegalMove(AssertionError):
    """A move that the table does not allow, which is a bug. The message has the history."""


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    lease_s: float  # without a renewal
    max_lease_s: float  # with any number of them
    attach_timeout_s: float  # for a ticket without an importer, from its first block


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of one attempt."""

    attempt: int
    phase: LeasePhase = LeasePhase.OFFERED
    deadline_s: float | None = None  # OFFERED with something sealed: for attaching; RUNNING: when it lapses
    latest_s: float | None = None  # RUNNING: no renewal goes beyond
    was_valid: bool = False  # SETTLED: the answer that the importer received

    @property
    def is_live(self) -> bool:
        return self.phase in _LIVE


@dataclass(frozen=True, slots=True)
class TicketLeases:
    """All attempts on one ticket, oldest first. Every operation returns a new value."""

    policy: LeasePolicy
    leases: tuple[Lease, ...]
    has_sealed: bool = False
    is_closed: bool = False  # no importer may attach any more; then the ticket is never vacant
    vacant_until_s: float | None = None  # None: not vacant

    def find(self, attempt: int) -> Lease | None:
        return next((lease for lease in self.leases if lease.attempt == attempt), None)

    @property
    def is_live(self) -> bool:
        """Return whether any attempt has, or may still get, a lease."""
        return any(lease.is_live for lease in self.leases)

    @property
    def is_pinned(self) -> bool:
        """Return whether an importer reads, or may still come to read."""
        return self.is_live or self.vacant_until_s is not None

    @property
    def next_deadline_s(self) -> float | None:
        deadlines = [lease.deadline_s for lease in self.leases if lease.is_live]
        return min((at_s for at_s in (*deadlines, self.vacant_until_s) if at_s is not None), default=None)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        attempts = [lease.attempt for lease in self.leases]
        assert attempts == sorted(set(attempts)), f"attempts out of order: {attempts}"
        assert self.vacant_until_s is None or not (self.is_live or self.is_closed), f"closed or live: {self}"
        for lease in self.leases:
            running = lease.phase is LeasePhase.RUNNING
            assert not running or self.has_sealed, f"a lease without blocks: {lease}"
            assert running == (lease.latest_s is not None), f"a running lease has a maximum, others have none: {lease}"
            if lease.latest_s is not None:
                assert lease.deadline_s is not None and lease.deadline_s <= lease.latest_s, f"past its maximum: {lease}"


def offer(policy: LeasePolicy, attempt: int) -> TicketLeases:
    """Return the leases of a new ticket with its first attempt."""
    return TicketLeases(policy, (Lease(attempt),))


@dataclass(frozen=True, slots=True)
class LeaseGuards:
    """The conditions that make leases safe, by name. Only tests pass other guards than the defaults, one at a time."""

    pinned_while_leased: Callable[[TicketLeases], bool]  # the ticket's blocks must stay
    reissued_while_pinned: Callable[[TicketLeases], bool]  # another attempt may be made
    attached_once: Callable[[Lease], bool]  # this attempt may attach
    lapses_at_deadline: Callable[[Lease, float], bool]  # time is up for it
    vacant_for_a_while: Callable[[TicketLeases, float], bool]  # no importer came for a vacant ticket in time
    renewed_while_running: Callable[[Lease, float], bool]  # a renewal may move its deadline
    renewed_up_to_maximum: Callable[[float, float], float]  # (asked for, maximum) -> the new deadline
    valid_at_settle: Callable[[Lease, float], bool]  # it held throughout


def is_over(lease: Lease, now_s: float) -> bool:
    return lease.deadline_s is not None and now_s >= lease.deadline_s


def is_deserted(leases: TicketLeases, now_s: float) -> bool:
    return leases.vacant_until_s is not None and now_s >= leases.vacant_until_s


def is_running(lease: Lease, now_s: float) -> bool:
    return lease.phase is LeasePhase.RUNNING and not is_over(lease, now_s)


LEASE_GUARDS = LeaseGuards(
    pinned_while_leased=lambda leases: leases.is_pinned,
    reissued_while_pinned=lambda leases: leases.is_pinned and not leases.is_closed,
    attached_once=lambda lease: lease.phase is LeasePhase.OFFERED,
    lapses_at_deadline=is_over,
    vacant_for_a_while=is_deserted,
    renewed_while_running=is_running,
    renewed_up_to_maximum=min,
    valid_at_settle=is_running,
)


def can_reissue(leases: TicketLeases, attempt: int, guards: LeaseGuards = LEASE_GUARDS) -> bool:
    """Return whether another attempt may be made. Attempts only count upwards; after the last lease's end there is
    none."""
    return guards.reissued_while_pinned(leases) and attempt > leases.leases[-1].attempt


def reissue(leases: TicketLeases, attempt: int, now_s: float, guards: LeaseGuards = LEASE_GUARDS) -> TicketLeases:
    """Add an attempt. Older attempts without an importer are withdrawn; attached ones continue.

    Raises IllegalMove."""
    if not can_reissue(leases, attempt, guards):
        raise IllegalMove(f"attempt {attempt} on {leases}")
    deadline_s = now_s + leases.policy.attach_timeout_s if leases.has_sealed else None
    withdrawn = _withdraw_offered(leases)
    newest = Lease(attempt, deadline_s=deadline_s)
    return changed(withdrawn, leases=(*withdrawn.leases, newest), vacant_until_s=None)


def seal(leases: TicketLeases, now_s: float) -> TicketLeases:
    """Record that the first block is sealed: attached leases start to run, offered ones get their deadline."""
    if leases.has_sealed:
        return leases
    policy = leases.policy
    sealed = changed(leases, has_sealed=True)
    for lease in leases.leases:
        if lease.phase is LeasePhase.ATTACHED:
            sealed = _with(sealed, _started(lease, policy, now_s))
        elif lease.phase is LeasePhase.OFFERED:
            sealed = _with(sealed, changed(lease, deadline_s=now_s + policy.attach_timeout_s))
    return sealed


def attach(
    leases: TicketLeases, attempt: int, now_s: float, guards: LeaseGuards = LEASE_GUARDS
) -> tuple[TicketLeases, HandOffReason | None]:
    """Attach an importer with this attempt. The result has the reason of a refusal, which changes nothing, or None."""
    lease = leases.find(attempt)
    if lease is None or lease.phase is LeasePhase.WITHDRAWN:
        return leases, HandOffReason.UNKNOWN_TICKET
    if not guards.attached_once(lease):
        return leases, HandOffReason.REPLAYED_TICKET
    if guards.lapses_at_deadline(lease, now_s):
        return leases, HandOffReason.LEASE_LAPSED
    if leases.has_sealed:
        return _with(leases, _started(lease, leases.policy, now_s)), None
    return _with(leases, _moved(lease, LeasePhase.ATTACHED)), None


def renew(leases: TicketLeases, attempt: int, now_s: float, guards: LeaseGuards = LEASE_GUARDS) -> TicketLeases:
    lease = leases.find(attempt)
    if lease is None or lease.latest_s is None or not guards.renewed_while_running(lease, now_s):
        return leases
    deadline_s = guards.renewed_up_to_maximum(now_s + leases.policy.lease_s, lease.latest_s)
    return _with(leases, changed(lease, deadline_s=deadline_s))


def settle(
    leases: TicketLeases, attempt: int, now_s: float, guards: LeaseGuards = LEASE_GUARDS
) -> tuple[TicketLeases, bool]:
    """End the attempt. Returns True if the lease held throughout, so that the blocks that were read are valid."""
    lease = leases.find(attempt)
    if lease is None:
        return leases, False
    if not lease.is_live:
        return leases, lease.was_valid
    valid = guards.valid_at_settle(lease, now_s)
    lapsed = lease.phase is LeasePhase.RUNNING and not valid
    ended = changed(_moved(lease, LeasePhase.LAPSED if lapsed else LeasePhase.SETTLED), was_valid=valid)
    return _with(leases, ended), valid


def end(leases: TicketLeases, attempt: int) -> TicketLeases:
    """End the attempt as not valid."""
    lease = leases.find(attempt)
    if lease is None or not lease.is_live:
        return leases
    return _with(leases, _moved(lease, LeasePhase.SETTLED))


def vacate(leases: TicketLeases, attempt: int, now_s: float, guards: LeaseGuards = LEASE_GUARDS) -> TicketLeases:
    """End the attempt of an importer that failed or is gone. Another importer may come for one lease (`lease_s`)."""
    settled, _ = settle(leases, attempt, now_s, guards)
    lease = settled.find(attempt)
    if settled is leases or lease is None:
        return leases
    settled = _with(settled, changed(lease, was_valid=False))
    if lease.phase is LeasePhase.LAPSED or settled.is_live or settled.is_closed:
        return settled
    return changed(settled, vacant_until_s=now_s + leases.policy.lease_s)


def withdraw(leases: TicketLeases) -> TicketLeases:
    """Close the ticket to new importers; attached ones continue."""
    return changed(_withdraw_offered(leases), is_closed=True, vacant_until_s=None)


def reap(
    leases: TicketLeases, now_s: float, guards: LeaseGuards = LEASE_GUARDS
) -> tuple[TicketLeases, tuple[int, ...]]:
    """End everything past its deadline. Returns also the attempts whose running lease lapsed."""
    lapsed = []
    for lease in leases.leases:
        if lease.is_live and guards.lapses_at_deadline(lease, now_s):
            if lease.phase is LeasePhase.OFFERED:
                leases = _with(leases, _moved(lease, LeasePhase.WITHDRAWN))
            else:
                leases = _with(leases, _moved(lease, LeasePhase.LAPSED))
                lapsed.append(lease.attempt)
    if guards.vacant_for_a_while(leases, now_s):
        leases = changed(leases, vacant_until_s=None)
    return leases, tuple(lapsed)


def _withdraw_offered(leases: TicketLeases) -> TicketLeases:
    for lease in leases.leases:
        if lease.phase is LeasePhase.OFFERED:
            leases = _with(leases, _moved(lease, LeasePhase.WITHDRAWN))
    return leases


def _started(lease: Lease, policy: LeasePolicy, now_s: float) -> Lease:
    running = _moved(lease, LeasePhase.RUNNING)
    return changed(running, deadline_s=now_s + policy.lease_s, latest_s=now_s + policy.max_lease_s)


def _moved(lease: Lease, phase: LeasePhase) -> Lease:
    if phase not in _MOVES.get(lease.phase, ()):
        raise IllegalMove(f"{lease} to {phase}")
    return changed(lease, phase=phase, deadline_s=None, latest_s=None)


def _with(leases: TicketLeases, new: Lease) -> TicketLeases:
    return changed(leases, leases=tuple(new if lease.attempt == new.attempt else lease for lease in leases.leases))
