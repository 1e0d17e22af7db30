"""How hand-offs to this worker wait for exports of this worker, and the end of a cycle of such waits. Pure. Owned by
the scheduler.

An export keeps its blocks until its importer has read them. An importer without room may wait for its own worker's
exports, whose importers may wait in turn. The batch leaves so much room that no cycle can arise, except in a pool of
less than two sequences of the maximum length.

The wait of a hand-off has a *depth*. It is 0 if there will be room when everything but the exports has ended; 1 if
there will be when the exports are read whose importers have room; otherwise one more than the depth of the importers
whose reads make enough room. Importers report it to exporters, with the greatest *mark* of the requests for which they
wait. In a row of workers the depth is at most their number. In a cycle it grows with every report, and one worker gets
its own mark back: it refuses its hand-off. The blocks stay leased to the ticket, and the router chooses another worker.
If a mark has outlived its request, any worker of the cycle refuses at MAX_WAIT_DEPTH.
"""

from cluster.errors import HandOffFailed, HandOffReason
from cluster.messages import MAX_WAIT_DEPTH, NO_WAIT, ExportWait
from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.batch import Batch
from engine.scheduling.batching.reservations import BlockRequest, Reservations
from engine.scheduling.commands import Unreservable, WaitsForExports
from engine.scheduling.exports import TicketLeases

_CYCLE_DEPTH = MAX_WAIT_DEPTH // 2  # more workers than ever wait in a row; by then marks have gone round


class ExportWaits:
    """`num_watermark`: blocks that every grant leaves."""

    def __init__(
        self, pool: BlockPool, *, leases: TicketLeases, reservations: Reservations, batch: Batch, num_watermark: int
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._reservations = reservations
        self._batch = batch
        self._num_watermark = num_watermark
        self._reported: dict[int, ExportWait] = {}  # by hand-off

    def events(self) -> tuple[Unreservable | WaitsForExports, ...]:
        """Return the waits that have changed, or the refusal of the first hand-off. Call it when no waiting hand-off
        can get blocks now."""
        waiting = self._reservations.waiting_handoff_ids
        if not waiting:
            self._reported.clear()
            return ()
        first = self._reservations.first
        depth = 0 if first is None or not self._pool.num_leased else self._depth(first)
        if first is None or not depth:
            wait = NO_WAIT
        elif depth > MAX_WAIT_DEPTH or (depth > _CYCLE_DEPTH and self._leases.wait_mark == first.mark):
            return (self._break_cycle(first),)
        else:
            wait = ExportWait(depth, max(first.mark, self._leases.wait_mark))
        changed = [handoff_id for handoff_id in waiting if self._reported.get(handoff_id, NO_WAIT) != wait]
        self._reported = dict.fromkeys(waiting, wait)  # all later exports wait for the first one
        return tuple(WaitsForExports(handoff_id, wait) for handoff_id in changed)

    def _depth(self, first: BlockRequest) -> int:
        room = self._pool.num_blocks - self._num_watermark - self._reservations.num_early
        num_needed = max(self._reservations.num_newly_used(first), self._batch.num_needed_before(first))
        if num_needed <= room - self._pool.num_leased:
            return 0
        depths = sorted(self._leases.wait_depths)
        return next((1 + depth for depth in depths if num_needed <= room - self._leases.num_leased_beyond(depth)), 0)

    def _break_cycle(self, first: BlockRequest) -> Unreservable:
        """Refuse a hand-off. The others wait for new reports: they may not be in the cycle."""
        self._reservations.refuse(first.handoff_id)
        self._leases.forget_waits()
        problem = f"{first.num_blocks} blocks would be free only after exports whose importers wait for this worker"
        return Unreservable(first.handoff_id, HandOffFailed(HandOffReason.NOT_ENOUGH_BLOCKS, problem))
