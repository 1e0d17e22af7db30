"""The importer's side of one hand-off: one attempt, from Attach to blocks that may be decoded, or to none. Pure.

It decides which blocks are read, verified and settled, and what may happen to the local ones. It never touches blocks,
sockets or the pool; the driver does.

    ATTACHING --accepted--> RESERVING --reserved--> PULLING --all complete--> SETTLING --settled, valid--> DELIVERED
        |                       |                      |                         |
        +-----------------------+----- any failure ----+----- or cancel ---------+-----> DRAINING --read ended--> ENDED

Blocks that are offered before the reservation are stored. Blocks are numbered by place: the prompt's full blocks in
order, then one tail per choice. A place is complete when it needs nothing more: it was read, and verified unless the
reservation exempted it (--kv-verify), or the pool had its content already, or it is the tail of a choice that ended
with its first token. One read is in flight at a time.

A failed read does not fail the hand-off if the exporter accepted another transport: the channel is destroyed, and when
nothing can write any more, the next transport reads the missing blocks.

How an attempt fails and drains is in `import_failure`; events and actions are in `import_state`.
"""

from cluster.errors import HandOffReason
from kvtransfer.protocol.frozen import changed
from kvtransfer.protocol.handoff import (
    GUARDS,
    Accepted,
    Attach,
    ExporterMessage,
    ExportFailed,
    Finished,
    Guards,
    Outcome,
    Refused,
    Renew,
    Sealed,
    Settle,
    Settled,
    illegal,
)
from kvtransfer.protocol.import_failure import Step, destroy_channel, fail, read_ended
from kvtransfer.protocol.import_state import (
    ANSWERED,
    Action,
    CallEnded,
    Cancel,
    ChannelDestroyed,
    Close,
    Deliver,
    DestroyChannel,
    Event,
    FallBack,
    FallBackReason,
    FromExporter,
    OpenFailed,
    ReadCompleted,
    ReadFailed,
    Reading,
    Reserve,
    Reserved,
    Send,
    StartRead,
    Tick,
    Unreservable,
)
from kvtransfer.protocol.import_state import HandOffPlan as HandOffPlan
from kvtransfer.protocol.import_state import ImporterPhase as ImporterPhase
from kvtransfer.protocol.import_state import ImporterState as ImporterState


def begin(plan: HandOffPlan, now_s: float) -> Step:
    """Return the first state of an attempt."""
    state = ImporterState(
        plan,
        deadline_s=now_s + plan.timeout_s,
        wait_until_s=now_s + plan.attach_timeout_s,
        offered=(None,) * plan.num_blocks,
    )
    return state, (Send(Attach(plan.epoch)),)


def advance(state: ImporterState, event: Event, now_s: float, guards: Guards = GUARDS) -> Step:
    """Apply one event. Raises IllegalMove if the driver broke the order given above."""
    state = state.after(event)
    match event:
        case FromExporter(message, is_followed):
            return _receive_in_turn(state, message, is_followed, now_s, guards)
        case Reserved():
            return _reserved(state, event, now_s, guards)
        case Unreservable():
            return fail(state, now_s, guards, HandOffReason.NOT_ENOUGH_BLOCKS)
        case ReadCompleted(read_id, digests):
            return _completed(state, read_id, digests, now_s, guards)
        case OpenFailed(read_id, detail):
            return _open_failed(state, read_id, detail, now_s, guards)
        case ReadFailed(read_id, detail):
            return _read_failed(state, read_id, detail, now_s, guards)
        case ChannelDestroyed():
            return _destroyed(state, now_s, guards)
        case Cancel():
            return fail(state, now_s, guards, HandOffReason.CANCELLED)
        case CallEnded():
            return fail(changed(state, is_connected=False), now_s, guards, HandOffReason.EXPORTER_LOST)
        case Tick():
            return _tick(state, now_s, guards)


def _receive_in_turn(
    state: ImporterState, message: ExporterMessage, is_followed: bool, now_s: float, guards: Guards
) -> Step:
    """Handle a message. A read starts only after the last message of a group, so that one read serves all of them."""
    was_held, state = state.is_held, changed(state, is_held=is_followed)
    actions: tuple[Action, ...] = ()
    if state.phase not in ANSWERED and guards.same_epoch(state.plan.epoch, message.epoch):
        state, actions = _receive(state, message, now_s, guards)
    if not was_held or is_followed:
        return state, actions
    state, released = _go_on(state, now_s, guards)
    return state, actions + released


def _receive(state: ImporterState, message: ExporterMessage, now_s: float, guards: Guards) -> Step:
    match message:
        case Accepted():
            return _accepted(state, message, now_s, guards)
        case Refused(_, reason, detail):
            return fail(changed(state, is_connected=False), now_s, guards, reason, detail)
        case Sealed():
            return _offered(state, message, now_s, guards)
        case Finished():
            return _finished(state, message, now_s, guards)
        case ExportFailed(_, reason, detail):
            return fail(state, now_s, guards, reason, detail)
        case Settled(_, valid):
            return _settled(state, valid, now_s, guards)


def _accepted(state: ImporterState, message: Accepted, now_s: float, guards: Guards) -> Step:
    if state.phase is not ImporterPhase.ATTACHING:
        return state, ()  # a duplicate
    state = changed(
        state.to(ImporterPhase.RESERVING),
        wait_until_s=None,
        lease_s=message.lease_s,
        num_transports_left=message.num_alternatives,
        renew_at_s=now_s + message.lease_s / 3,
    )
    return _go_on(state, now_s, guards)


def _offered(state: ImporterState, message: Sealed, now_s: float, guards: Guards) -> Step:
    places = range(message.first_index, message.first_index + len(message.blocks))
    if places.start < 0 or places.stop > state.plan.num_sealed:
        return fail(state, now_s, guards, HandOffReason.COUNT_MISMATCH, f"blocks {places} of {state.plan.num_sealed}")
    offered = list(state.offered)
    for place, block in zip(places, message.blocks, strict=True):
        if offered[place] not in (None, block):
            return fail(state, now_s, guards, HandOffReason.PROTOCOL, f"block {place} was offered with two contents")
        offered[place] = block
    return _go_on(changed(state, offered=tuple(offered)), now_s, guards)


def _finished(state: ImporterState, message: Finished, now_s: float, guards: Guards) -> Step:
    if state.finished is not None:
        if message == state.finished:
            return state, ()
        return fail(state, now_s, guards, HandOffReason.PROTOCOL, "the exporter finished twice with different contents")
    plan = state.plan
    counts = (
        (plan.num_tokens, message.num_tokens),
        (plan.num_choices, len(message.first_tokens)),
        (plan.num_tail_valid, message.tail.num_valid if message.tail else 0),
    )
    for expected, found in counts:
        if not guards.same_count(expected, found):
            return fail(state, now_s, guards, HandOffReason.COUNT_MISMATCH, f"expected {expected}, got {found}")
    if not guards.same_prompt(plan.prompt_hash, message.prompt_hash):
        return fail(state, now_s, guards, HandOffReason.PROMPT_MISMATCH)
    tails = (message.tail.block if message.tail else None,) * (plan.num_blocks - plan.num_sealed)
    needless = {
        place
        for place, first in enumerate(message.first_tokens, plan.num_sealed)
        if tails and not guards.tail_needed(first.ended)
    }
    state = changed(
        state,
        finished=message,
        offered=state.offered[: plan.num_sealed] + tails,
        complete=state.complete | needless,
        num_needless=len(needless),
    )
    return _go_on(state, now_s, guards)


def _settled(state: ImporterState, valid: bool, now_s: float, guards: Guards) -> Step:
    if state.phase is not ImporterPhase.SETTLING:
        return fail(state, now_s, guards, HandOffReason.PROTOCOL, "the exporter sent Settled before it received Settle")
    if not guards.delivered_when_valid(valid):
        return fail(state, now_s, guards, HandOffReason.LEASE_LAPSED)
    return _deliver(state)


def _deliver(state: ImporterState) -> Step:
    finished = state.finished
    if finished is None:
        raise illegal(state.history, "delivered before it was finished")
    num_sealed = state.plan.num_sealed
    sealed, tails = state.local_block_ids[:num_sealed], state.local_block_ids[num_sealed:]
    num_read = state.plan.num_blocks - state.num_cached - state.num_needless
    deliver = Deliver(sealed, tails, finished.first_tokens, state.num_cached, num_read, state.unverified_block_ids)
    return state.to(ImporterPhase.DELIVERED), (deliver, Close())


def _reserved(state: ImporterState, event: Reserved, now_s: float, guards: Guards) -> Step:
    if state.phase is ImporterPhase.ENDED or state.phase is ImporterPhase.DRAINING:
        return state, ()  # crossed with the Discard
    local = state.local_block_ids + event.block_ids
    if (
        state.phase in (ImporterPhase.ATTACHING, ImporterPhase.SETTLING, ImporterPhase.DELIVERED)
        or len(local) != state.num_asked
        or event.num_cached > state.plan.num_sealed
    ):
        raise illegal(
            state.history, f"{len(event.block_ids)} blocks reserved in {state.phase}, {state.num_asked} asked for"
        )
    if state.phase is ImporterPhase.RESERVING:
        cached = frozenset(range(guards.cached_left_alone(event.num_cached)))
        state = changed(
            state.to(ImporterPhase.PULLING),
            num_cached=event.num_cached,
            complete=state.complete | cached,
            unverified=event.unverified,
        )
    return _go_on(changed(state, local_block_ids=local), now_s, guards)


def _completed(state: ImporterState, read_id: int, digests: tuple[bytes, ...], now_s: float, guards: Guards) -> Step:
    reading = state.reading
    if reading is None or reading.read_id != read_id or len(digests) != len(reading.places):
        if state.is_destroying:
            return state, ()  # crossed with the destruction
        raise illegal(state.history, f"read {read_id} completed, {reading} was in flight")
    if state.broken is not None and state.phase is not ImporterPhase.DRAINING:
        return state, ()  # too late: the next transport begins when the channel is destroyed
    state = changed(state, reading=None)
    if state.phase is ImporterPhase.DRAINING:
        return read_ended(state, reading, guards)
    is_exempt = {drawn: guards.exempt_as_drawn(drawn) for drawn in (False, True)}
    wrong = set[int]()
    for place, digest in zip(reading.places, digests, strict=True):
        block = state.offered[place]
        if is_exempt[place in state.unverified]:
            continue
        if block is None or not guards.same_digest(block.digest, digest):
            wrong.add(place)
    state = changed(state, complete=state.complete.union(reading.places).difference(wrong))
    if not all(guards.pulled_again_once(int(place in state.pulled_again)) for place in wrong):
        return fail(state, now_s, guards, HandOffReason.DIGEST_MISMATCH, f"blocks {sorted(wrong)}, pulled twice")
    return _go_on(changed(state, pulled_again=state.pulled_again | wrong), now_s, guards)


def _read_failed(state: ImporterState, read_id: int, detail: str, now_s: float, guards: Guards) -> Step:
    """Handle a failed read. It may still write, so the channel is destroyed at once."""
    reading = state.reading
    if reading is None or reading.read_id != read_id:
        if state.is_destroying:
            return state, ()
        raise illegal(state.history, f"read {read_id} failed, {reading} was in flight")
    if state.is_destroying:
        return state, ()
    if guards.proof_of_quiet(False):
        state = changed(state, reading=None)
        if state.phase is ImporterPhase.DRAINING:
            return read_ended(state, reading, guards)
        return fail(state, now_s, guards, HandOffReason.READ_FAILED, detail)
    if state.phase is ImporterPhase.PULLING and state.num_transports_left:
        return _break_off(state, reading, now_s, guards, FallBackReason.READ_FAILED)
    state, given_up = fail(state, now_s, guards, HandOffReason.READ_FAILED, detail)
    state, destroying = destroy_channel(state, now_s)
    return state, given_up + destroying


def _open_failed(state: ImporterState, read_id: int, detail: str, now_s: float, guards: Guards) -> Step:
    """Handle a channel that could not be opened. Nothing was written."""
    reading = state.reading
    if reading is None or reading.read_id != read_id:
        raise illegal(state.history, f"read {read_id} could not open a channel, {reading} was in flight")
    if state.phase is ImporterPhase.DRAINING:
        return read_ended(changed(state, reading=None), reading, guards)
    if state.is_destroying:
        return state, ()
    state = changed(state, reading=None)
    if state.num_transports_left:
        return _fall_back(state, now_s, guards, FallBackReason.OPEN_FAILED)
    return fail(state, now_s, guards, HandOffReason.READ_FAILED, detail)


def _break_off(state: ImporterState, reading: Reading, now_s: float, guards: Guards, reason: FallBackReason) -> Step:
    """Destroy the channel of a failed read. The next transport reads the missing blocks when the channel is
    destroyed."""
    if guards.quiet_before_fallback(False):
        return _fall_back(changed(state, reading=None), now_s, guards, reason)
    dying = changed(reading, deadline_s=now_s + state.plan.quarantine_s)
    return changed(state, reading=dying, is_destroying=True, broken=reason), (DestroyChannel(),)


def _fall_back(state: ImporterState, now_s: float, guards: Guards, reason: FallBackReason) -> Step:
    state = changed(state, is_destroying=False, broken=None, num_transports_left=state.num_transports_left - 1)
    state, actions = _go_on(state, now_s, guards)
    return state, (FallBack(reason), *actions)


def _destroyed(state: ImporterState, now_s: float, guards: Guards) -> Step:
    if not state.is_destroying:
        raise illegal(state.history, "channel destroyed unasked")
    if state.broken is not None and state.phase is ImporterPhase.PULLING:
        return _fall_back(changed(state, reading=None), now_s, guards, state.broken)
    if state.phase is not ImporterPhase.DRAINING or state.reading is None:
        return state, ()
    return read_ended(changed(state, reading=None), state.reading, guards)


def _tick(state: ImporterState, now_s: float, guards: Guards) -> Step:
    def is_past(deadline_s: float | None) -> bool:
        return deadline_s is not None and guards.waits_have_deadlines(deadline_s, now_s)

    if state.is_over:
        return state, ()
    if state.phase is ImporterPhase.DRAINING:
        return destroy_channel(state, now_s) if is_past(state.deadline_s) else (state, ())
    if is_past(state.wait_until_s):
        # No answer to Settle counts as invalid.
        return fail(state, now_s, guards, HandOffReason.EXPORTER_LOST, f"it did not answer while {state.phase}")
    reading = state.reading
    if is_past(state.deadline_s) or (reading is not None and is_past(reading.deadline_s)):
        if (
            reading is not None
            and state.num_transports_left
            and not state.is_destroying
            and not is_past(state.deadline_s)
        ):
            return _break_off(state, reading, now_s, guards, FallBackReason.READ_TIMEOUT)
        return fail(state, now_s, guards, HandOffReason.READ_TIMEOUT, f"the read timed out while {state.phase}")
    if is_past(state.renew_at_s):
        return changed(state, renew_at_s=now_s + state.lease_s / 3), (Send(Renew(state.plan.epoch)),)
    return state, ()


def _go_on(state: ImporterState, now_s: float, guards: Guards) -> Step:
    """Do everything that the state allows now: reserve, read, settle."""
    if state.phase not in (ImporterPhase.RESERVING, ImporterPhase.PULLING):
        return state, ()
    plan = state.plan
    num_wanted = state.num_asked
    if num_wanted < plan.num_blocks:
        num_offered = sum(block is not None for block in state.offered)
        num_wanted = guards.whole_reservation(plan.num_blocks, num_offered)
    if num_wanted > state.num_asked and state.num_asked == len(state.local_block_ids):
        num_lacking = num_wanted - state.num_asked
        state, actions = _go_on(changed(state, num_asked=num_wanted), now_s, guards)
        return state, (Reserve(num_lacking), *actions)
    if state.phase is not ImporterPhase.PULLING or state.reading is not None or state.is_held:
        return state, ()
    if state.finished is not None and guards.all_complete(len(state.complete), plan.num_blocks):
        return _settle_ok(state, now_s)
    return _read(state, now_s, guards)


def _read(state: ImporterState, now_s: float, guards: Guards) -> Step:
    """Start a read of all missing blocks, unless one of them may not be read."""
    places = state.missing_places
    if not places:
        return state, ()
    blocks = [block for place in places if (block := state.offered[place]) is not None]
    named = list(zip(places, blocks, strict=True))
    unverifiable = [place for place, block in named if not (block.digest or place in state.unverified)]
    if unverifiable:
        detail = f"the exporter gives no digests of blocks {unverifiable}"
        return fail(state, now_s, guards, HandOffReason.UNVERIFIABLE, detail)
    verifies_all = state.plan.verifies_all
    is_accepted = {unproven: guards.provenance_accepted(unproven, verifies_all) for unproven in (False, True)}
    unproven = [place for place, block in named if not is_accepted[block.is_unverified]]
    if unproven:
        detail = f"the exporter did not verify blocks {unproven}, or blocks from which it computed them"
        return fail(state, now_s, guards, HandOffReason.UNVERIFIED_PROVENANCE, detail)
    reading = Reading(state.num_reads, places, now_s + state.plan.read_timeout_s)
    start = StartRead(
        reading.read_id,
        tuple(block.block_id for block in blocks),
        tuple(state.local_block_ids[place] for place in places),
        frozenset(state.local_block_ids[place] for place in state.unverified.intersection(places)),
    )
    return changed(state, reading=reading, num_reads=state.num_reads + 1), (start,)


def _settle_ok(state: ImporterState, now_s: float) -> Step:
    settling = changed(
        state.to(ImporterPhase.SETTLING), wait_until_s=now_s + state.lease_s, renew_at_s=None, is_connected=False
    )
    return settling, (Send(Settle(state.plan.epoch, Outcome.OK)),)
