"""Decode workers that leave, and this router's sequences there: those that will not end in time go on at other workers.

They are moved, KV and all, as when an operator asks (router/pipeline/migration.py): those with most left first, a few
at once, again and again where there was no room. One that by the middle of the worker's grace has not begun there, or
is preempted and has no KV that could move, is started elsewhere. A sequence that no other decode worker can hold to its
end stays as long as the worker does. What the worker still has when it goes is restarted as after any loss.
docs/drain.md.
"""

import asyncio
import logging

from cluster.request_size import RequestSize, decode_shortage
from router.fleet.decode_events import MoveOutcome
from router.fleet.decode_peer import MOVES_AT_ONCE, DecodePeer
from router.fleet.fleet import Fleet
from router.pipeline.migration import PATIENCE_S, Migrations
from router.policies.course import Course, to_move
from router.running import branches

_LOG = logging.getLogger("tandem.router.evacuation")
_LOOK_S = 0.2  # what goes on there shows in no event of its own
_SHORTEST_PATIENCE_S = 1.0
_START_SHARE = 0.5  # of the grace


class Evacuation:
    """One router's. `run` is its one task."""

    def __init__(self, *, fleet: Fleet, migrations: Migrations) -> None:
        self._fleet = fleet
        self._migrations = migrations
        self._attended: dict[DecodePeer, None] = {}

    async def run(self) -> None:
        """Attends to every worker that leaves, until cancelled."""
        async with branches() as departures:
            while True:
                for peer in self._fleet.leaving():
                    if peer not in self._attended:
                        self._attended[peer] = None
                        departures.create_task(self._attend(peer), name=f"evacuate {peer.member.id}")
                await self._fleet.changed()

    async def _attend(self, peer: DecodePeer) -> None:
        began = {"worker": str(peer.member.id), "sequences": peer.stream.num_sequences}
        _LOG.info("a decode worker leaves", extra=began)
        try:
            await _Departure(peer, self._fleet, self._migrations).run()
        finally:
            del self._attended[peer]


class _Departure:
    """One worker's, from its word to its end."""

    def __init__(self, peer: DecodePeer, fleet: Fleet, migrations: Migrations) -> None:
        self._peer = peer
        self._fleet = fleet
        self._migrations = migrations
        self._began_s = asyncio.get_running_loop().time()
        self._moving: dict[int, asyncio.Task[None]] = {}
        self._given_up: set[int] = set()

    async def run(self) -> None:
        async with branches() as moves:
            while self._peer in self._fleet.leaving():
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
        return bool(self._fleet.decode_loads())

    def _has_room_elsewhere(self, size: RequestSize | None) -> bool:
        """Whether a worker that takes new work can hold it; else it stays for as long as this one does."""
        capacities = [load.capacity for load in self._fleet.decode_loads()]
        return any(size is None or capacity is None or not decode_shortage(capacity, size) for capacity in capacities)

    def _send_on(self, moves: asyncio.TaskGroup) -> None:
        now_s, leaves_at_s = asyncio.get_running_loop().time(), self._peer.leaves_at_s
        assert leaves_at_s is not None
        stream = self._peer.stream
        courses = stream.courses()
        for handle in to_move(courses, now_s, leaves_at_s)[: MOVES_AT_ONCE - len(self._moving)]:
            move = self._move(handle, courses[handle], leaves_at_s - now_s)
            self._moving[handle] = moves.create_task(move, name=f"move {handle}")
        if now_s >= self._began_s + _START_SHARE * (leaves_at_s - self._began_s):
            for handle in (*stream.unstarted(), *stream.preempted()):
                if handle not in self._given_up and self._has_room_elsewhere(stream.size(handle)):
                    self._given_up.add(handle)
                    stream.give_up(handle)

    async def _move(self, handle: int, course: Course, left_s: float) -> None:
        patience_s = min(PATIENCE_S, max(_SHORTEST_PATIENCE_S, left_s / 2))
        try:
            if await self._migrations.move(self._peer, handle, patience_s=patience_s) is MoveOutcome.KEPT:
                course.stayed(asyncio.get_running_loop().time())
        finally:
            del self._moving[handle]
