"""The failure, draining and end of an importer's attempt. Pure.

A failure is reported at once: `ReportFailure` informs the request, and `Discard` returns the blocks, except those that
the read in flight may still write to, which are quarantined. DRAINING lasts until that read completes or its channel is
destroyed. `ReleaseQuarantined` follows, and then `Settle` if the exporter still waits for one: Settle means that no
read is in flight.
"""

from cluster.errors import HandOffReason
from kvtransfer.protocol.frozen import changed
from kvtransfer.protocol.handoff import Guards, Outcome, Settle
from kvtransfer.protocol.import_state import (
    ANSWERED,
    NEVER_S,
    Action,
    Close,
    DestroyChannel,
    Discard,
    ImporterPhase,
    ImporterState,
    Reading,
    ReleaseQuarantined,
    ReportFailure,
    ReportUnhealthy,
    Send,
)

Step = tuple[ImporterState, tuple[Action, ...]]


def fail(state: ImporterState, now_s: float, guards: Guards, reason: HandOffReason, detail: str = "") -> Step:
    """Report the failure to the request. End at once unless a read is in flight."""
    if state.phase in ANSWERED:
        return state, ()
    actions: list[Action] = [ReportFailure(reason, detail)]
    reading = state.reading
    destinations = frozenset(state.local_block_ids[place] for place in reading.places) if reading else frozenset()
    if state.num_asked:
        actions.append(Discard(guards.quarantined_in_flight(destinations)))
    state = changed(
        state.to(ImporterPhase.DRAINING),
        deadline_s=now_s + state.plan.quarantine_s,
        wait_until_s=None,
        renew_at_s=None,
        reading=changed(reading, deadline_s=None) if reading else None,
        failure=reason,
    )
    state, farewell = _end(state, guards)
    return state, (*actions, *farewell)


def read_ended(state: ImporterState, reading: Reading, guards: Guards) -> Step:
    """Return the blocks of the ended read and end the attempt."""
    state, farewell = _end(state, guards)
    block_ids = frozenset(state.local_block_ids[place] for place in reading.places)
    return state, (ReleaseQuarantined(guards.quarantined_in_flight(block_ids)), *farewell)


def _end(state: ImporterState, guards: Guards) -> Step:
    """Settle and end, as far as the read in flight allows."""
    actions: list[Action] = []
    if state.is_connected and guards.settled_when_quiet(state.reading is not None):
        outcome = Outcome.UNNEEDED if state.failure is HandOffReason.CANCELLED else Outcome.FAILED
        actions.append(Send(Settle(state.plan.epoch, outcome, state.failure)))
        state = changed(state, is_connected=False)
    if state.reading is None:
        state = state.to(ImporterPhase.ENDED)
        actions.append(Close())
    return state, tuple(actions)


def destroy_channel(state: ImporterState, now_s: float) -> Step:
    """Destroy the channel to end a read, once. If that does not end either, only a restart frees the blocks."""
    if state.phase is not ImporterPhase.DRAINING:
        return state, ()
    if state.is_destroying:
        return changed(state, deadline_s=NEVER_S), (ReportUnhealthy(),)
    return changed(state, is_destroying=True, deadline_s=now_s + state.plan.quarantine_s), (DestroyChannel(),)
