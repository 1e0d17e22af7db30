"""The importer's side of one hand-off: one attempt, from Attach to blocks that may be decoded, or to none. Pure.

Owns which blocks were offered, read and verified, and what may happen to the local ones. Never touches blocks, sockets
or the pool; the driver does.

    ATTACHING --accepted--> RESERVING --reserved--> PULLING --all complete--> SETTLING --settled, valid--> ADMITTED
        |                       |                      |                         |
        +-----------------------+----- any failure ----+----- or cancel ---------+-----> DRAINING --quiet--> ENDED

What is offered before the reservation is remembered. Blocks are numbered by place: the prompt's full blocks in order,
then one tail per choice. A place is complete when it needs nothing more: it was read, and verified unless the
reservation exempted it (--kv-verify), or the pool had its content already, or it is the tail of a choice that ended
with its first token. One read is in flight at a time.

A read that fails while the exporter offers its blocks by another transport too is no failure yet: the channel is
destroyed, and when nothing can write any more, what is missing is read by the next one.

A failure shows at once: `GiveUp` tells the request, `Discard` gives the blocks back, except those that the read in
flight may still write to, which go to quarantine. DRAINING lasts until that read is proven quiet, by its completion or
by the destruction of the channel; then `Quiet`, and `Settle` if the exporter still waits for one: settling means that
nobody reads any more.

Events and actions are in `import_events`.
"""

from cluster.errors import HandOffReason
from kvtransfer.protocol.frozen import changed
from kvtransfer.protocol.handoff import (
    GUARDS,
    Accepted,
    Attach,
    ExporterMessage,
    Failed,
    Finished,
    Guards,
    Outcome,
    Refused,
    Renew,
    Sealed,
    Settle,
    Settled,
    illegal,
    remembered,
)
from kvtransfer.protocol.import_events import (
    Action,
    Admit,
    CallEnded,
    Cancel,
    ChannelDestroyed,
    Close,
    DestroyChannel,
    Discard,
    Event,
    FallBack,
    FallBackReason,
    FromExporter,
    GiveUp,
    OpenFailed,
    Quiet,
    ReadCompleted,
    ReadFailed,
    ReportUnhealthy,
    Reserve,
    Reserved,
    Send,
    StartRead,
    Tick,
    Unreservable,
)
from kvtransfer.protocol.import_state import ANSWERED, MOVES, NEVER_S, Reading
from kvtransfer.protocol.import_state import Import as Import
from kvtransfer.protocol.import_state import ImportPhase as ImportPhase
from kvtransfer.protocol.import_state import ImportPlan as ImportPlan

Step = tuple[Import, tuple[Action, ...]]


def begin(plan: ImportPlan, now_s: float) -> Step:
    """The first state of an attempt."""
    state = Import(
        plan,
        deadline_s=now_s + plan.timeout_s,
        wait_until_s=now_s + plan.attach_timeout_s,
        offered=(None,) * plan.num_blocks,
    )
    return state, (Send(Attach(plan.epoch)),)


def advance(state: Import, event: Event, now_s: float, guards: Guards = GUARDS) -> Step:
    """One event. Raises IllegalMove when the driver broke the order that the docstring tells."""
    state = _remember(state, event)
    match event:
        case FromExporter(message, is_followed):
            return _hear_in_turn(state, message, is_followed, now_s, guards)
        case Reserved():
            return _reserved(state, event, now_s, guards)
        case Unreservable():
            return _give_up(state, now_s, guards, HandOffReason.NOT_ENOUGH_BLOCKS)
        case ReadCompleted(read_id, digests):
            return _completed(state, read_id, digests, now_s, guards)
        case OpenFailed(read_id, detail):
            return _open_failed(state, read_id, detail, now_s, guards)
        case ReadFailed(read_id, detail):
            return _read_failed(state, read_id, detail, now_s, guards)
        case ChannelDestroyed():
            return _destroyed(state, now_s, guards)
        case Cancel():
            return _give_up(state, now_s, guards, HandOffReason.CANCELLED)
        case CallEnded():
            return _give_up(changed(state, is_connected=False), now_s, guards, HandOffReason.EXPORTER_LOST)
        case Tick():
            return _tick(state, now_s, guards)


def _hear_in_turn(state: Import, message: ExporterMessage, is_followed: bool, now_s: float, guards: Guards) -> Step:
    """Reads wait for the last message of a moment, whatever becomes of it: one read serves all that is offered."""
    was_held, state = state.is_held, changed(state, is_held=is_followed)
    actions: tuple[Action, ...] = ()
    if state.phase not in ANSWERED and guards.same_epoch(state.plan.epoch, message.epoch):
        state, actions = _hear(state, message, now_s, guards)
    if not was_held or is_followed:
        return state, actions
    state, released = _go_on(state, now_s, guards)
    return state, actions + released


def _hear(state: Import, message: ExporterMessage, now_s: float, guards: Guards) -> Step:
    match message:
        case Accepted():
            return _accepted(state, message, now_s, guards)
        case Refused(_, reason, detail):
            return _give_up(changed(state, is_connected=False), now_s, guards, reason, detail)
        case Sealed():
            return _offered(state, message, now_s, guards)
        case Finished():
            return _finished(state, message, now_s, guards)
        case Failed(_, reason, detail):
            return _give_up(state, now_s, guards, reason, detail)
        case Settled(_, valid):
            return _settled(state, valid, now_s, guards)


def _accepted(state: Import, message: Accepted, now_s: float, guards: Guards) -> Step:
    if state.phase is not ImportPhase.ATTACHING:
        return state, ()  # the same one, twice
    state = changed(
        _to(state, ImportPhase.RESERVING),
        wait_until_s=None,
        lease_s=message.lease_s,
        num_ways_left=message.num_alternatives,
        renew_at_s=now_s + message.lease_s / 3,
    )
    return _go_on(state, now_s, guards)


def _offered(state: Import, message: Sealed, now_s: float, guards: Guards) -> Step:
    places = range(message.first_index, message.first_index + len(message.blocks))
    if places.start < 0 or places.stop > state.plan.num_sealed:
        return _give_up(
            state, now_s, guards, HandOffReason.COUNT_MISMATCH, f"blocks {places} of {state.plan.num_sealed}"
        )
    offered = list(state.offered)
    for place, block in zip(places, message.blocks, strict=True):
        if offered[place] not in (None, block):
            return _give_up(state, now_s, guards, HandOffReason.PROTOCOL, f"block {place} was offered as another")
        offered[place] = block
    return _go_on(changed(state, offered=tuple(offered)), now_s, guards)


def _finished(state: Import, message: Finished, now_s: float, guards: Guards) -> Step:
    if state.finished is not None:
        if message == state.finished:
            return state, ()
        return _give_up(state, now_s, guards, HandOffReason.PROTOCOL, "finished twice, differently")
    plan = state.plan
    counts = (
        (plan.num_tokens, message.num_tokens),
        (plan.num_choices, len(message.first_tokens)),
        (plan.num_tail_valid, message.tail.num_valid if message.tail else 0),
    )
    for expected, found in counts:
        if not guards.same_count(expected, found):
            return _give_up(state, now_s, guards, HandOffReason.COUNT_MISMATCH, f"expected {expected}, got {found}")
    if not guards.same_prompt(plan.prompt_hash, message.prompt_hash):
        return _give_up(state, now_s, guards, HandOffReason.PROMPT_MISMATCH)
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


def _settled(state: Import, valid: bool, now_s: float, guards: Guards) -> Step:
    if state.phase is not ImportPhase.SETTLING:
        return _give_up(state, now_s, guards, HandOffReason.PROTOCOL, "settled unasked")
    if not guards.admitted_when_valid(valid):
        return _give_up(state, now_s, guards, HandOffReason.LEASE_LAPSED)
    return _admit(state)


def _admit(state: Import) -> Step:
    finished = state.finished
    if finished is None:
        raise illegal(state.history, "admitted unfinished")
    num_sealed = state.plan.num_sealed
    sealed, tails = state.local_block_ids[:num_sealed], state.local_block_ids[num_sealed:]
    num_read = state.plan.num_blocks - state.num_cached - state.num_needless
    admit = Admit(sealed, tails, finished.first_tokens, state.num_cached, num_read, _unverified_block_ids(state))
    return _to(state, ImportPhase.ADMITTED), (admit, Close())


def _unverified_block_ids(state: Import) -> frozenset[int]:
    """Of what was read: taken as it came here, or by a worker before. What the cache had keeps what is known of it."""
    return frozenset(
        local
        for place, (block, local) in enumerate(zip(state.offered, state.local_block_ids, strict=True))
        if place >= state.num_cached and (place in state.unverified or (block is not None and block.is_unverified))
    )


def _reserved(state: Import, event: Reserved, now_s: float, guards: Guards) -> Step:
    if state.phase is ImportPhase.ENDED or state.phase is ImportPhase.DRAINING:
        return state, ()  # crossed with the Discard
    local = state.local_block_ids + event.block_ids
    if (
        state.phase in (ImportPhase.ATTACHING, ImportPhase.SETTLING, ImportPhase.ADMITTED)
        or len(local) != state.num_asked
        or event.num_cached > state.plan.num_sealed
    ):
        raise illegal(
            state.history, f"{len(event.block_ids)} blocks reserved in {state.phase}, {state.num_asked} asked for"
        )
    if state.phase is ImportPhase.RESERVING:
        cached = frozenset(range(guards.cached_left_alone(event.num_cached)))
        state = changed(
            _to(state, ImportPhase.PULLING),
            num_cached=event.num_cached,
            complete=state.complete | cached,
            unverified=event.unverified,
        )
    return _go_on(changed(state, local_block_ids=local), now_s, guards)


def _completed(state: Import, read_id: int, digests: tuple[bytes, ...], now_s: float, guards: Guards) -> Step:
    reading = state.reading
    if reading is None or reading.read_id != read_id or len(digests) != len(reading.places):
        if state.is_destroying:
            return state, ()  # crossed with the destruction
        raise illegal(state.history, f"read {read_id} completed, {reading} was in flight")
    if state.broken is not None and state.phase is not ImportPhase.DRAINING:
        return state, ()  # too late: the next way begins when the channel is gone
    state = changed(state, reading=None)
    if state.phase is ImportPhase.DRAINING:
        return _quiet(state, reading, guards)
    complete, wrong = set(state.complete), set[int]()
    for place, digest in zip(reading.places, digests, strict=True):
        block = state.offered[place]
        is_exempt = guards.exempt_as_drawn(place in state.unverified)
        good = is_exempt or (block is not None and guards.same_digest(block.digest, digest))
        (complete if good else wrong).add(place)
    state = changed(state, complete=frozenset(complete))
    if not all(guards.pulled_again_once(int(place in state.pulled_again)) for place in wrong):
        return _give_up(state, now_s, guards, HandOffReason.DIGEST_MISMATCH, f"blocks {sorted(wrong)}, pulled twice")
    return _go_on(changed(state, pulled_again=state.pulled_again | wrong), now_s, guards)


def _read_failed(state: Import, read_id: int, detail: str, now_s: float, guards: Guards) -> Step:
    """An error says nothing about what may still be written: the channel is destroyed at once."""
    reading = state.reading
    if reading is None or reading.read_id != read_id:
        if state.is_destroying:
            return state, ()
        raise illegal(state.history, f"read {read_id} failed, {reading} was in flight")
    if state.is_destroying:
        return state, ()
    if guards.proof_of_quiet(False):
        state = changed(state, reading=None)
        if state.phase is ImportPhase.DRAINING:
            return _quiet(state, reading, guards)
        return _give_up(state, now_s, guards, HandOffReason.READ_FAILED, detail)
    if state.phase is ImportPhase.PULLING and state.num_ways_left:
        return _break_off(state, reading, now_s, guards, FallBackReason.READ_FAILED)
    state, given_up = _give_up(state, now_s, guards, HandOffReason.READ_FAILED, detail)
    state, destroying = _destroy(state, now_s)
    return state, given_up + destroying


def _open_failed(state: Import, read_id: int, detail: str, now_s: float, guards: Guards) -> Step:
    """Nothing was written: its destination is as quiet as before."""
    reading = state.reading
    if reading is None or reading.read_id != read_id:
        raise illegal(state.history, f"read {read_id} found no way, {reading} was in flight")
    if state.phase is ImportPhase.DRAINING:
        return _quiet(changed(state, reading=None), reading, guards)
    if state.is_destroying:
        return state, ()
    state = changed(state, reading=None)
    if state.num_ways_left:
        return _fall_back(state, now_s, guards, FallBackReason.OPEN_FAILED)
    return _give_up(state, now_s, guards, HandOffReason.READ_FAILED, detail)


def _break_off(state: Import, reading: Reading, now_s: float, guards: Guards, reason: FallBackReason) -> Step:
    """The read is dead; what is missing is read by the next way, as soon as this one cannot write any more."""
    if guards.quiet_before_fallback(False):
        return _fall_back(changed(state, reading=None), now_s, guards, reason)
    dying = changed(reading, deadline_s=now_s + state.plan.quarantine_s)
    return changed(state, reading=dying, is_destroying=True, broken=reason), (DestroyChannel(),)


def _fall_back(state: Import, now_s: float, guards: Guards, reason: FallBackReason) -> Step:
    state = changed(state, is_destroying=False, broken=None, num_ways_left=state.num_ways_left - 1)
    state, actions = _go_on(state, now_s, guards)
    return state, (FallBack(reason), *actions)


def _destroyed(state: Import, now_s: float, guards: Guards) -> Step:
    if not state.is_destroying:
        raise illegal(state.history, "channel destroyed unasked")
    if state.broken is not None and state.phase is ImportPhase.PULLING:
        return _fall_back(changed(state, reading=None), now_s, guards, state.broken)
    if state.phase is not ImportPhase.DRAINING or state.reading is None:
        return state, ()
    return _quiet(changed(state, reading=None), state.reading, guards)


def _tick(state: Import, now_s: float, guards: Guards) -> Step:
    def is_past(deadline_s: float | None) -> bool:
        return deadline_s is not None and guards.waits_have_deadlines(deadline_s, now_s)

    if state.is_over:
        return state, ()
    if state.phase is ImportPhase.DRAINING:
        return _destroy(state, now_s) if is_past(state.deadline_s) else (state, ())
    if is_past(state.wait_until_s):
        # No answer to Settle counts as invalid.
        return _give_up(state, now_s, guards, HandOffReason.EXPORTER_LOST, f"no answer while {state.phase}")
    reading = state.reading
    if is_past(state.deadline_s) or (reading is not None and is_past(reading.deadline_s)):
        if reading is not None and state.num_ways_left and not state.is_destroying and not is_past(state.deadline_s):
            return _break_off(state, reading, now_s, guards, FallBackReason.READ_TIMEOUT)
        return _give_up(state, now_s, guards, HandOffReason.READ_TIMEOUT, f"while {state.phase}")
    if is_past(state.renew_at_s):
        return changed(state, renew_at_s=now_s + state.lease_s / 3), (Send(Renew(state.plan.epoch)),)
    return state, ()


def _go_on(state: Import, now_s: float, guards: Guards) -> Step:
    """Everything that what is known now allows: reserve, read, settle."""
    if state.phase not in (ImportPhase.RESERVING, ImportPhase.PULLING):
        return state, ()
    plan = state.plan
    num_offered = sum(block is not None for block in state.offered)
    num_wanted = guards.whole_reservation(plan.num_blocks, num_offered)
    if num_wanted > state.num_asked and state.num_asked == len(state.local_block_ids):
        num_lacking = num_wanted - state.num_asked
        state, actions = _go_on(changed(state, num_asked=num_wanted), now_s, guards)
        return state, (Reserve(num_lacking), *actions)
    if state.phase is not ImportPhase.PULLING or state.reading is not None or state.is_held:
        return state, ()
    if state.finished is not None and guards.all_complete(len(state.complete), plan.num_blocks):
        return _settle_ok(state, now_s)
    return _read(state, now_s, guards)


def _read(state: Import, now_s: float, guards: Guards) -> Step:
    missing = tuple(
        (place, block, local)
        for place, (block, local) in enumerate(zip(state.offered, state.local_block_ids, strict=False))
        if block is not None and place not in state.complete
    )
    if not missing:
        return state, ()
    places, blocks, locals_ = zip(*missing, strict=True)
    unverifiable = [
        place for place, block in zip(places, blocks, strict=True) if not (block.digest or place in state.unverified)
    ]
    if unverifiable:
        return _give_up(
            state, now_s, guards, HandOffReason.UNVERIFIABLE, f"the exporter gives no digests of blocks {unverifiable}"
        )
    unproven = [
        place
        for place, block in zip(places, blocks, strict=True)
        if not guards.provenance_accepted(block.is_unverified, state.plan.verifies_all)
    ]
    if unproven:
        detail = f"the exporter had blocks {unproven} from another worker and did not verify them"
        return _give_up(state, now_s, guards, HandOffReason.UNVERIFIED_PROVENANCE, detail)
    reading = Reading(state.num_reads, places, now_s + state.plan.read_timeout_s)
    unverified = frozenset(local for place, _, local in missing if place in state.unverified)
    start = StartRead(reading.read_id, tuple(block.block_id for block in blocks), locals_, unverified)
    return changed(state, reading=reading, num_reads=state.num_reads + 1), (start,)


def _settle_ok(state: Import, now_s: float) -> Step:
    settling = changed(
        _to(state, ImportPhase.SETTLING), wait_until_s=now_s + state.lease_s, renew_at_s=None, is_connected=False
    )
    return settling, (Send(Settle(state.plan.epoch, Outcome.OK)),)


def _give_up(state: Import, now_s: float, guards: Guards, reason: HandOffReason, detail: str = "") -> Step:
    """The request has its answer. Ends at once unless a read is in flight."""
    if state.phase in ANSWERED:
        return state, ()
    actions: list[Action] = [GiveUp(reason, detail)]
    reading = state.reading
    destinations = frozenset(state.local_block_ids[place] for place in reading.places) if reading else frozenset()
    if state.num_asked:
        actions.append(Discard(guards.quarantined_in_flight(destinations)))
    state = changed(
        _to(state, ImportPhase.DRAINING),
        deadline_s=now_s + state.plan.quarantine_s,
        wait_until_s=None,
        renew_at_s=None,
        reading=changed(reading, deadline_s=None) if reading else None,
        failure=reason,
    )
    state, farewell = _end(state, guards)
    return state, (*actions, *farewell)


def _quiet(state: Import, reading: Reading, guards: Guards) -> Step:
    state, farewell = _end(state, guards)
    block_ids = frozenset(state.local_block_ids[place] for place in reading.places)
    return state, (Quiet(guards.quarantined_in_flight(block_ids)), *farewell)


def _end(state: Import, guards: Guards) -> Step:
    """Settles and ends, as far as what is in flight allows."""
    actions: list[Action] = []
    if state.is_connected and guards.settled_when_quiet(state.reading is not None):
        outcome = Outcome.UNNEEDED if state.failure is HandOffReason.CANCELLED else Outcome.FAILED
        actions.append(Send(Settle(state.plan.epoch, outcome, state.failure)))
        state = changed(state, is_connected=False)
    if state.reading is None:
        state = _to(state, ImportPhase.ENDED)
        actions.append(Close())
    return state, tuple(actions)


def _destroy(state: Import, now_s: float) -> Step:
    """Proof by force; asked for once. When that does not end either, only a restart frees the blocks."""
    if state.phase is not ImportPhase.DRAINING:
        return state, ()
    if state.is_destroying:
        return changed(state, deadline_s=NEVER_S), (ReportUnhealthy(),)
    return changed(state, is_destroying=True, deadline_s=now_s + state.plan.quarantine_s), (DestroyChannel(),)


def _to(state: Import, phase: ImportPhase) -> Import:
    if phase not in MOVES[state.phase]:
        raise illegal(state.history, f"{state.phase} to {phase}")
    return changed(state, phase=phase)


def _remember(state: Import, event: Event) -> Import:
    if isinstance(event, Tick):
        return state
    name = type(event.message).__name__ if isinstance(event, FromExporter) else type(event).__name__
    return changed(state, history=remembered(state.history, f"{name}:{state.phase}"))
