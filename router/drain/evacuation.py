"""Moves this router's sequences away from decode workers that drain, if they are not expected to end in time.

A sequence is moved with its KV, as when an operator asks for it (router/pipeline/migration.py): the sequences with the
most tokens left first, a few at a time, and again later where no other worker had room. From half of the worker's grace
on, a sequence that has not started there, or that is preempted and has no KV to move, is restarted at another worker. A
sequence that no other decode worker can hold stays until the worker leaves. Sequences that the worker still has at that
time are restarted, as after any loss of a worker (docs/maintenance.md).
"""

import asyncio
import logging

from cluster.request_size import RequestSize, decode_shortage
from router.fleet.decode_events import MoveOutcome
from router.fleet.fleet import Fleet
from router.fleet.peer import MAX_CONCURRENT_MOVES, Peer
from router.pipeline.migration import MOVE_TIMEOUT_S, Migrations
from router.policies.work_ahead import SequenceProgress, sequences_to_move
from router.running import branches

_LOG = logging.getLogger("tandem.router.evacuation")
_LOOK_S = 0.2  # progress there causes no event
_SHORTEST_TIMEOUT_S = 1.0
_START_SHARE = 0.5  # of the grace


class Evacuation:
    """The evacuations of one router. `run` is its only task."""

    def __init__(self, *, fleet: Fleet, migrations: Migrations) -> None:
        self._fleet = fleet
        self._migrations = migrations
        self._evacuating: dict[Peer, None] = {}

    async def run(self) -> None:
        """Evacuate every worker that drains, until cancelled."""
        async with branches() as departures:
            while True:
                for peer in self._fleet.draining():
                    if peer not in self._evacuating:
                        self._evacuating[peer] = None
                        departures.create_task(self._attend(peer), name=f"evacuate {peer.member.id}")
                await self._fleet.changed()

    async def _attend(self, peer: Peer) -> None:
        began = {"worker": str(peer.member.id), "sequences": peer.stream.num_sequences}
        _LOG.info("a worker drains; its work moves to others", extra=began)
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
                if self._has_refuge:
                    self._send_on(moves)
                news = asyncio.ensure_future(self._fleet.changed())
                try:
                    waits = (news, *self._moving.values())
                    await asyncio.wait(waits, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()

    @property
    def _has_refuge(self) -> bool:
        return self._fleet.is_ready

    def _has_room_elsewhere(self, size: RequestSize | None) -> bool:
        """Return whether a worker that accepts new work can hold the sequence. If none can, the sequence stays."""
        capacities = [load.capacity for load in self._fleet.decode_loads()]
        return any(size is None or capacity is None or not decode_shortage(capacity, size) for capacity in capacities)

    def _send_on(self, moves: asyncio.TaskGroup) -> None:
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
        if now_s >= self._began_s + _START_SHARE * (drain_deadline_s - self._began_s):
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
