"""Running sequences that move from one decode worker to another, KV and all. docs/migration.md tells the protocol.

A move is not a failure. The sequence is frozen where it is, its KV is handed over, and it goes on at the target as a
new attempt; where that fails it is thawed and goes on where it was. Only when neither worker has it any more does the
story start it again, as after any failure. Nothing here decides that a sequence should move: operators do, and
router/drain/evacuation.py for workers that leave.
"""

import asyncio
import logging
import random
from contextlib import ExitStack
from dataclasses import dataclass

from cluster.errors import (
    InvalidRequest,
    NotFound,
    NoWorkerLargeEnough,
    NoWorkers,
    Overloaded,
    TandemError,
    TooManyFrozen,
    WorkerLost,
)
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from router.fleet.decode_events import Move, MoveOutcome
from router.fleet.decode_peer import DecodePeer
from router.fleet.fleet import Fleet
from router.pipeline.decode_leg import DecodeLeg
from router.pipeline.failures import DECODE, AttemptFailed, leg
from router.pipeline.pairing import facts_of
from router.policies.placement import Policy, WorkerLoad
from router.request.live_request import LiveRequest
from tandem.v1 import worker_pb2

_LOG = logging.getLogger("tandem.router.migration")
PATIENCE_S = 30.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.8  # before a worker that has frozen as many as it may is asked again


@dataclass(frozen=True, slots=True)
class MigrationCount:
    num_moved: int
    num_kept: int  # went on where they were, or were prefilled again


@dataclass(frozen=True, slots=True)
class _Carried:
    """Where a sequence goes on. `reason`: why not at the target."""

    leg: DecodeLeg
    outcome: MoveOutcome
    reason: str = ""


class Migrations:
    """One router's: takes in what operators ask for, and carries it out for the attempts that have the sequences."""

    def __init__(
        self,
        *,
        router: MemberId,
        fleet: Fleet,
        policy: Policy,
        telemetry: Telemetry,
        patience_s: float = PATIENCE_S,  # for what the source has sent to arrive, and for the target to begin
    ) -> None:
        self._router = router
        self._fleet = fleet
        self._policy = policy
        self._telemetry = telemetry
        self._patience_s = patience_s

    async def migrate(self, source: str, target: str, max_sequences: int) -> MigrationCount:
        """This router's running sequences at `source`, the oldest first. `target` empty: placement chooses for each;
        `max_sequences` 0: all. Raises NotFound, InvalidRequest."""
        leaving = self._decode(source)
        going_to = self._decode(target).member.id if target else None
        if going_to == leaving.member.id:
            raise InvalidRequest(f"{source} is source and target; name another target, or none")
        handles = leaving.stream.movable()[: max_sequences or None]
        outcomes = await asyncio.gather(*(self.move(leaving, handle, going_to) for handle in handles))
        num_moved = outcomes.count(MoveOutcome.MOVED)
        return MigrationCount(num_moved, len(outcomes) - num_moved - outcomes.count(MoveOutcome.ENDED))

    async def move(
        self, source: DecodePeer, handle: int, target: MemberId | None = None, patience_s: float | None = None
    ) -> MoveOutcome:
        """One sequence, as soon as fewer than MOVES_AT_ONCE others are on their way from its worker, by whichever call.
        It moves on when the caller no longer waits. `target` None: placement chooses."""
        patience_s = self._patience_s if patience_s is None else patience_s
        loop, pause_s = asyncio.get_running_loop(), _SHORTEST_PAUSE_S
        ask_until_s = loop.time() + patience_s
        while (outcome := await self._move_once(source, handle, target, patience_s)) is MoveOutcome.DEFERRED:
            if loop.time() + pause_s > ask_until_s:
                return MoveOutcome.KEPT
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return outcome

    async def _move_once(
        self, source: DecodePeer, handle: int, target: MemberId | None, patience_s: float
    ) -> MoveOutcome:
        await source.moves.acquire()
        move = source.stream.ask_to_move(handle, target, patience_s)
        if move is None:
            source.moves.release()
            return MoveOutcome.ENDED
        move.outcome.add_done_callback(lambda _: source.moves.release())
        return await asyncio.shield(move.outcome)

    async def carry(self, live: LiveRequest, source: DecodeLeg, move: Move) -> DecodeLeg:
        """The leg on which a single sequence goes on, at the target or where it was; if that is another leg, `source`
        is closed. Raises AttemptFailed when neither worker has the sequence any more, DeadlineExceeded."""
        try:
            carried = await self._carry(live, source, move)
        except AttemptFailed as failure:
            self._note(live, source, move, MoveOutcome.RESTARTED, failure.reason)
            raise
        self._note(live, source, move, carried.outcome, carried.reason)
        if carried.leg is not source:
            source.close()
        return carried.leg

    async def _carry(self, live: LiveRequest, source: DecodeLeg, move: Move) -> _Carried:
        try:
            target = self._target(live, source, move.target)
        except (NoWorkers, NoWorkerLargeEnough, Overloaded) as error:
            return _Carried(source, MoveOutcome.KEPT, error.reason)
        migration = _Migration(live, source, target, router=self._router, patience_s=move.patience_s)
        return await migration.run()

    def _target(self, live: LiveRequest, source: DecodeLeg, named: MemberId | None) -> DecodePeer:
        """Placement's choice among those that may get work, are large enough and have room. Raises NoWorkers,
        NoWorkerLargeEnough, Overloaded."""
        (choice,) = source.owners.values()
        facts = facts_of(live, live.size(choice.num_committed))
        targets = [load for load in self._fleet.decode_loads() if load.member != source.worker]
        if named is not None:
            targets = [load for load in targets if load.member == named]
        large = list(filter(facts.fits_handoff, targets))
        if targets and not large:
            raise NoWorkerLargeEnough("no other decode worker can hold the sequence to its end")
        num_tokens = facts.num_prompt_tokens
        roomy = [load for load in large if _has_room(load, num_tokens)]
        if large and not roomy:
            raise Overloaded(f"no other decode worker has room for {num_tokens} tokens now")
        exporter = WorkerLoad(member=source.worker, pairing=source.decode.pairing, assigned=0)
        placement = self._policy.choose([exporter], roomy, facts)
        if placement is None or placement.prefill is None:
            raise NoWorkers("no other decode worker can take the sequence now")
        return self._fleet.decode(placement.decode)

    def _decode(self, name: str) -> DecodePeer:
        peer = self._fleet.peer_by_name(name)
        if not isinstance(peer, DecodePeer):
            raise NotFound(f"no decode worker {name!r} is connected to this router; `status` lists them")
        return peer

    def _note(self, live: LiveRequest, source: DecodeLeg, move: Move, outcome: MoveOutcome, reason: str) -> None:
        move.settle(outcome)
        self._telemetry.count("tandem_migrations_total", outcome=outcome, reason=reason)
        fields = {"request_id": live.request_id, "source": str(source.worker), "reason": reason}
        _LOG.info("move of a sequence: %s", outcome, extra=fields)


def _has_room(load: WorkerLoad, num_tokens: int) -> bool:
    """As far as is known: a client waits as long as its frozen sequence queues."""
    capacity = load.capacity
    is_known = load.running or load.waiting or load.free_blocks
    if capacity is None or not is_known:
        return True
    return load.depth < capacity.max_num_seqs and load.free_blocks * capacity.block_size > num_tokens


class _Migration:
    """One sequence's move, from freezing to the leg on which it goes on."""

    def __init__(
        self, live: LiveRequest, source: DecodeLeg, target: DecodePeer, *, router: MemberId, patience_s: float
    ) -> None:
        self._live = live
        self._source = source
        self._target = target
        self._router = router
        self._patience_s = patience_s
        self._attempt = live.next_attempt()
        ((self._handle, self._choice),) = source.owners.items()

    async def run(self) -> _Carried:
        frozen = await self._freeze()
        if isinstance(frozen, _Carried):
            return frozen
        await self._source.until_delivered(frozen.num_output, self._patience_s)
        if self._choice.ended:
            return _Carried(self._source, MoveOutcome.ENDED)
        self._live.moving()
        try:
            return _Carried(await self._begin_there(frozen.ticket), MoveOutcome.MOVED)
        except AttemptFailed as failure:
            return _Carried(await self._thaw(), MoveOutcome.KEPT, failure.reason)

    async def _freeze(self) -> worker_pb2.FreezeResponse | _Carried:
        """Carried on as it is: it does not decode there, as it waits or has ended; or its worker freezes no more at the
        moment. Raises AttemptFailed: whether it is frozen is not known."""
        with leg(DECODE, self._source.worker):
            try:
                return await self._source.decode.freeze(
                    self._handle, router=self._router, importer=self._target.member.id, attempt=self._attempt
                )
            except NotFound:
                self._source.sequences.courses[self._handle].is_waiting = True
                return _Carried(self._source, MoveOutcome.KEPT, NotFound.reason)
            except TooManyFrozen:
                return _Carried(self._source, MoveOutcome.DEFERRED, TooManyFrozen.reason)

    async def _begin_there(self, ticket: bytes) -> DecodeLeg:
        """Raises AttemptFailed: the target does not have it."""
        worker = self._target.member.id
        with ExitStack() as undo:
            there = undo.enter_context(
                DecodeLeg(self._live, self._target, [self._choice], exporter=self._source.worker)
            )
            (handle,) = there.sequences.handles
            job = self._live.moved_job(handle, self._choice, self._attempt, self._router, ticket)
            try:
                with leg(DECODE, worker):
                    async with asyncio.timeout(self._patience_s):
                        await self._target.start(job)
                        await there.until_started()
            except TimeoutError:
                error: TandemError = WorkerLost(f"{worker} did not begin within {self._patience_s:g} s")
                raise AttemptFailed(DECODE, worker, "timeout", error) from None
            except InvalidRequest as error:  # the worker's mistake: the request was valid before
                raise AttemptFailed(DECODE, worker, error.reason, error) from error
            undo.pop_all()
        return there

    async def _thaw(self) -> DecodeLeg:
        """It goes on where it was, under a new handle. Raises AttemptFailed: it is not there any more either."""
        with ExitStack() as undo, leg(DECODE, self._source.worker):
            back = undo.enter_context(DecodeLeg(self._live, self._source.decode, [self._choice], exporter=None))
            (new_handle,) = back.sequences.handles
            back.sequences.courses[new_handle] = self._source.sequences.courses[self._handle]
            back.sequences.started.add(new_handle)  # it is there, and was: nobody need start it elsewhere
            await self._source.decode.thaw(self._handle, new_handle, router=self._router)
            undo.pop_all()
        self._live.decoding(self._source.worker)
        return back
