"""Moves running sequences from one decode worker to another, with their KV. docs/migration.md describes the protocol.

A move is not a failure. The sequence is frozen, its KV is handed over, and it continues at the target as a new attempt.
If that fails, it is thawed and continues where it was. Only if neither worker has it any more does the pipeline restart
it, as after any failure. Operators decide what moves, and `Evacuation` does for workers that drain.

`Evacuation` moves the sequences that are not expected to end in time: those with the most tokens left first, a few at a
time, and again later where no other worker had room. From half of the worker's grace on, a sequence that has not
started there, or that is preempted and has no KV to move, is restarted at another worker. A sequence that no other
decode worker can hold stays until the worker leaves. Sequences that the worker still has at that time are restarted, as
after any loss of a worker (docs/maintenance.md).
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
from cluster.request_size import RequestSize, decode_shortage
from router.fleet.decode_events import MoveOutcome, MoveRequest
from router.fleet.fleet import Fleet, exporter_load
from router.fleet.peer import MAX_CONCURRENT_MOVES, Peer
from router.pipeline.decode_leg import DecodeLeg
from router.pipeline.failures import DECODE, AttemptFailed, leg
from router.pipeline.worker_choice import facts_of
from router.policies.candidates import WorkerLoad
from router.policies.placement import Importers
from router.policies.prediction.work_ahead import SequenceProgress, sequences_to_move
from router.request.admitted_request import AdmittedRequest
from router.running import branches
from tandem.internal.v1 import worker_pb2

_LOG = logging.getLogger("tandem.router.migration")
MOVE_TIMEOUT_S = 30.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.8  # before a worker that freezes no more is asked again
_EVACUATION_LOG = logging.getLogger("tandem.router.evacuation")
_CHECK_PERIOD_S = 0.2  # the progress of a draining worker causes no event
_SHORTEST_TIMEOUT_S = 1.0  # of one move
_RESTART_SHARE = 0.5  # of the grace period, after which sequences without KV are restarted elsewhere


@dataclass(frozen=True, slots=True)
class MigrationCount:
    """The number of sequences that a call moved, and that it did not move."""

    num_moved: int
    num_kept: int  # continued where they were, or were prefilled again


@dataclass(frozen=True, slots=True)
class _Carried:
    """The leg on which a sequence continues. `reason`: why it did not move."""

    leg: DecodeLeg
    outcome: MoveOutcome
    reason: str = ""


class Migrations:
    """The migrations of one router: accepts requests to move, and moves sequences for the attempts that own them."""

    def __init__(
        self,
        *,
        router: MemberId,
        fleet: Fleet,
        telemetry: Telemetry,
        timeout_s: float = MOVE_TIMEOUT_S,  # for what the source has sent to arrive, and for the target to begin
    ) -> None:
        self._router = router
        self._fleet = fleet
        self._importers = Importers()
        self._telemetry = telemetry
        self._timeout_s = timeout_s

    async def migrate(self, source: str, target: str, max_sequences: int) -> MigrationCount:
        """Move this router's running sequences at `source`, the oldest first, `max_sequences` at most (0: all). An
        empty `target` lets placement choose one for each. Raises NotFound, InvalidRequest."""
        leaving = self._decode(source)
        going_to = self._decode(target).member.id if target else None
        if going_to == leaving.member.id:
            raise InvalidRequest(f"{source} is source and target; name another target, or none")
        handles = leaving.stream.movable()[: max_sequences or None]
        outcomes = await asyncio.gather(*(self.move(leaving, handle, going_to) for handle in handles))
        num_moved = outcomes.count(MoveOutcome.MOVED)
        return MigrationCount(num_moved, len(outcomes) - num_moved - outcomes.count(MoveOutcome.ENDED))

    async def move(
        self, source: Peer, handle: int, target: MemberId | None = None, timeout_s: float | None = None
    ) -> MoveOutcome:
        """Move one sequence, at most MAX_CONCURRENT_MOVES at a time from one worker over all calls.

        The move continues when the caller is cancelled. `target` None: placement chooses."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        loop, pause_s = asyncio.get_running_loop(), _SHORTEST_PAUSE_S
        ask_until_s = loop.time() + timeout_s
        while (outcome := await self._move_once(source, handle, target, timeout_s)) is MoveOutcome.DEFERRED:
            if loop.time() + pause_s > ask_until_s:
                return MoveOutcome.KEPT
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return outcome

    async def _move_once(self, source: Peer, handle: int, target: MemberId | None, timeout_s: float) -> MoveOutcome:
        await source.moves.acquire()
        move = source.stream.ask_to_move(handle, target, timeout_s)
        if move is None:
            source.moves.release()
            return MoveOutcome.ENDED
        move.outcome.add_done_callback(lambda _: source.moves.release())
        return await asyncio.shield(move.outcome)

    async def carry(self, admitted: AdmittedRequest, source: DecodeLeg, move: MoveRequest) -> DecodeLeg:
        """Move one sequence and return the leg on which it continues, at the target or where it was. If that is another
        leg, `source` is closed. Raises DeadlineExceeded, and AttemptFailed when neither worker has the sequence any
        more."""
        try:
            carried = await self._carry(admitted, source, move)
        except AttemptFailed as failure:
            self._note(admitted, source, move, MoveOutcome.RESTARTED, failure.reason)
            raise
        self._note(admitted, source, move, carried.outcome, carried.reason)
        if carried.leg is not source:
            source.close()
        return carried.leg

    async def _carry(self, admitted: AdmittedRequest, source: DecodeLeg, move: MoveRequest) -> _Carried:
        try:
            target = self._target(admitted, source, move.target)
        except (NoWorkers, NoWorkerLargeEnough, Overloaded) as error:
            return _Carried(source, MoveOutcome.KEPT, error.reason)
        migration = _Migration(admitted, source, target, router=self._router, timeout_s=move.timeout_s)
        return await migration.run()

    def _target(self, admitted: AdmittedRequest, source: DecodeLeg, named: MemberId | None) -> Peer:
        """Choose a target that accepts work, can hold the sequence and has room. Raises NoWorkers, NoWorkerLargeEnough,
        Overloaded."""
        (choice,) = source.owners.values()
        facts = facts_of(admitted, admitted.size(choice.num_committed))
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
        chosen = self._importers.choose(exporter_load(source.decode), roomy, facts)
        if chosen is None:
            raise NoWorkers("no other decode worker can take the sequence now")
        return self._fleet.connected_peer(chosen)

    def _decode(self, name: str) -> Peer:
        peer = self._fleet.peer_by_name(name)
        has_sequences = peer is not None and peer.stream.num_sequences > 0  # perhaps from a former role
        if peer is None or not (peer.member.role.decodes or has_sequences):
            raise NotFound(f"no decode worker {name!r} is connected to this router; `status` lists them")
        return peer

    def _note(
        self, admitted: AdmittedRequest, source: DecodeLeg, move: MoveRequest, outcome: MoveOutcome, reason: str
    ) -> None:
        move.settle(outcome)
        self._telemetry.count("tandem_migrations_total", outcome=outcome, reason=reason)
        fields = {"request_id": admitted.request_id, "source": str(source.worker), "reason": reason}
        _LOG.info("the migration of a sequence ended: %s", outcome, extra=fields)


def _has_room(load: WorkerLoad, num_tokens: int) -> bool:
    """Return whether the worker has room as far as is known. A frozen sequence must not wait in a queue."""
    capacity = load.capacity
    if capacity is None or load.free_blocks is None:
        return True
    return load.depth < capacity.max_num_seqs and load.free_blocks * capacity.block_size > num_tokens


class _Migration:
    """The move of one sequence, from its freezing until it continues."""

    def __init__(
        self, admitted: AdmittedRequest, source: DecodeLeg, target: Peer, *, router: MemberId, timeout_s: float
    ) -> None:
        self._admitted = admitted
        self._source = source
        self._target = target
        self._router = router
        self._timeout_s = timeout_s
        self._attempt = admitted.next_attempt()
        ((self._handle, self._choice),) = source.owners.items()

    async def run(self) -> _Carried:
        frozen = await self._freeze()
        if isinstance(frozen, _Carried):
            return frozen
        await self._source.until_delivered(frozen.num_output, self._timeout_s)
        if self._choice.ended:
            return _Carried(self._source, MoveOutcome.ENDED)
        self._admitted.moving()
        try:
            return _Carried(await self._begin_there(frozen.ticket), MoveOutcome.MOVED)
        except AttemptFailed as failure:
            return _Carried(await self._thaw(), MoveOutcome.KEPT, failure.reason)

    async def _freeze(self) -> worker_pb2.FreezeResponse | _Carried:
        """Freeze the sequence. Returns its present leg if it does not decode there, or if its worker freezes no more
        now. Raises AttemptFailed if it is not known whether it is frozen."""
        with leg(DECODE, self._source.worker):
            try:
                return await self._source.decode.freeze(
                    self._handle, router=self._router, importer=self._target.member.id, attempt=self._attempt
                )
            except NotFound:
                self._source.sequences.all_progress[self._handle].is_waiting = True
                return _Carried(self._source, MoveOutcome.KEPT, NotFound.reason)
            except TooManyFrozen:
                return _Carried(self._source, MoveOutcome.DEFERRED, TooManyFrozen.reason)

    async def _begin_there(self, ticket: bytes) -> DecodeLeg:
        """Start the sequence at the target. Raises AttemptFailed."""
        worker = self._target.member.id
        with ExitStack() as undo:
            there = undo.enter_context(
                DecodeLeg(self._admitted, self._target, [self._choice], exporter=self._source.worker)
            )
            (handle,) = there.sequences.handles
            covered = self._choice.committed[:-1]  # the last token is the first one of the hand-off
            job = self._admitted.decode_job({handle: self._choice}, covered, self._attempt, ticket)
            try:
                with leg(DECODE, worker):
                    async with asyncio.timeout(self._timeout_s):
                        await self._target.start(job)
                        await there.until_started()
            except TimeoutError:
                error: TandemError = WorkerLost(f"{worker} did not begin within {self._timeout_s:g} s")
                raise AttemptFailed(DECODE, worker, "timeout", error) from None
            except InvalidRequest as error:  # an error of the worker: the request was valid before
                raise AttemptFailed(DECODE, worker, error.reason, error) from error
            undo.pop_all()
        return there

    async def _thaw(self) -> DecodeLeg:
        """Continue the sequence where it was, under a new handle. Raises AttemptFailed if it is not there any more."""
        with ExitStack() as undo, leg(DECODE, self._source.worker):
            back = undo.enter_context(DecodeLeg(self._admitted, self._source.decode, [self._choice], exporter=None))
            (new_handle,) = back.sequences.handles
            back.sequences.all_progress[new_handle] = self._source.sequences.all_progress[self._handle]
            back.sequences.started.add(new_handle)  # it runs there, so an evacuation must not restart it
            await self._source.decode.thaw(self._handle, new_handle, router=self._router)
            undo.pop_all()
        self._admitted.decoding(self._source.worker)
        return back


class Evacuation:
    """The evacuations of one router. `run` is its only task."""

    def __init__(self, *, fleet: Fleet, migrations: Migrations) -> None:
        self._fleet = fleet
        self._migrations = migrations
        self._evacuating: dict[Peer, None] = {}

    async def run(self) -> None:
        """Evacuate every worker that drains, until cancelled."""
        async with branches() as evacuations:
            while True:
                for peer in self._fleet.draining():
                    if peer not in self._evacuating:
                        self._evacuating[peer] = None
                        evacuations.create_task(self._evacuate(peer), name=f"evacuate {peer.member.id}")
                await self._fleet.changed()

    async def _evacuate(self, peer: Peer) -> None:
        began = {"worker": str(peer.member.id), "sequences": peer.stream.num_sequences}
        _EVACUATION_LOG.info("a worker drains; its work moves to others", extra=began)
        try:
            await _WorkerEvacuation(peer, self._fleet, self._migrations).run()
        finally:
            del self._evacuating[peer]


class _WorkerEvacuation:
    """The evacuation of one worker, from the start of its drain until it is lost."""

    def __init__(self, peer: Peer, fleet: Fleet, migrations: Migrations) -> None:
        self._peer = peer
        self._fleet = fleet
        self._migrations = migrations
        self._began_s = asyncio.get_running_loop().time()
        self._moving: dict[int, asyncio.Task[None]] = {}
        self._restarted: set[int] = set()

    async def run(self) -> None:
        async with branches() as moves:
            while self._peer in self._fleet.draining():
                if self._fleet.is_ready:  # another worker accepts work
                    self._move_work(moves)
                changed = asyncio.ensure_future(self._fleet.changed())
                try:
                    waits = (changed, *self._moving.values())
                    await asyncio.wait(waits, timeout=_CHECK_PERIOD_S, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()

    def _has_room_elsewhere(self, size: RequestSize | None) -> bool:
        """Return whether a worker that accepts new work can hold the sequence. If none can, the sequence stays."""
        capacities = [load.capacity for load in self._fleet.decode_loads()]
        return any(size is None or capacity is None or not decode_shortage(capacity, size) for capacity in capacities)

    def _move_work(self, moves: asyncio.TaskGroup) -> None:
        now_s, drain_deadline_s = asyncio.get_running_loop().time(), self._peer.drain_deadline_s
        assert drain_deadline_s is not None
        stream = self._peer.stream
        # A move whose outcome is known may still be about to end here. It must not be started a second time.
        running = stream.running_progress().items()
        all_progress = {handle: progress for handle, progress in running if handle not in self._moving}
        for handle in sequences_to_move(all_progress, now_s, drain_deadline_s)[
            : MAX_CONCURRENT_MOVES - len(self._moving)
        ]:
            move = self._move(handle, all_progress[handle], drain_deadline_s - now_s)
            self._moving[handle] = moves.create_task(move, name=f"move {handle}")
        if now_s >= self._began_s + _RESTART_SHARE * (drain_deadline_s - self._began_s):
            for handle in (*stream.unstarted(), *stream.preempted()):
                if handle not in self._restarted and self._has_room_elsewhere(stream.size(handle)):
                    self._restarted.add(handle)
                    stream.fail_sequence(handle)

    async def _move(self, handle: int, progress: SequenceProgress, left_s: float) -> None:
        timeout_s = min(MOVE_TIMEOUT_S, max(_SHORTEST_TIMEOUT_S, left_s / 2))
        try:
            if await self._migrations.move(self._peer, handle, timeout_s=timeout_s) is MoveOutcome.KEPT:
                progress.record_failed_move(asyncio.get_running_loop().time())
        finally:
            del self._moving[handle]
