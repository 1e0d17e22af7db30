"""Preemption: slots and blocks are taken from sequences that rank last. Pure. Owned by the batch.

A step's preemptions happen before its waiting sequences start, so a plan never preempts what it has just started.
"""

import heapq
import itertools

from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.block_tables import BlockTables
from engine.scheduling.batching.reservations import BlockRequest, Reservations
from engine.scheduling.batching.sequence_queues import Ranking, SequenceQueues
from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.batching.watermark import Watermark


class Preemption:
    """`preemptions` counts sequences that lost their blocks, `displaced` those that lost their slots only."""

    def __init__(
        self,
        ranking: Ranking,
        queues: SequenceQueues,
        tables: BlockTables,
        pool: BlockPool,
        reservations: Reservations,
        watermark: Watermark,
    ) -> None:
        self.preemptions = 0
        self.displaced = 0
        self._ranking = ranking
        self._queues = queues
        self._tables = tables
        self._pool = pool
        self._reservations = reservations
        self._watermark = watermark

    def may_preempt(self) -> bool:
        """Return whether a sequence or a hand-off waits and the last sequence may be preempted for it."""
        last = self._queues.last_holder
        if last is None or not self._ranking.may_preempt(last):
            return False
        return bool(len(self._queues.ready) or len(self._queues.waiting) or self._reservations.num_waiting)

    def preempt_for_waiting(self, now_s: float) -> int:
        """Preempt sequences for waiting work that ranks before them, if the policy or the batch class allows it. Return
        how many of the freed slots are for sequences that have no blocks yet."""
        last = self._queues.last_holder
        if last is None or not self._ranking.may_preempt(last):
            return 0
        self._preempt_for_handoff(last, now_s)
        num_slots = num_blocks = num_promised = 0
        waiting, request = set(self._queues.waiting), self._reservations.first
        candidates = (tuple(self._queues.ready), tuple(self._queues.waiting))
        for sequence in heapq.merge(*candidates, key=lambda candidate: candidate.rank):
            last = self._queues.last_holder
            if last is None or not self._ranking.displaces(sequence, last, now_s):
                break
            num_slots += sequence.num_slots
            if not self._free_slots(num_slots, sequence, now_s):
                break
            if sequence in waiting:
                num_blocks += self._tables.num_newly_used(sequence)
                num_wanted = num_blocks + self._watermark.for_sequence(sequence)
                is_behind_handoff = request is not None and request.rank < sequence.rank
                if is_behind_handoff or not self._free_blocks(num_wanted, sequence, now_s):
                    break
                num_promised += sequence.num_slots
        return num_promised

    def free_stalled_slot(self, now_s: float) -> None:
        """Take the slot of a running sequence that is stalled, if an export or a sequence that ranks before it waits
        for a slot: each would wait for the other."""
        last, first = self._queues.last_preemptible, self._queues.ready.first
        if last is None or first is None or last not in self._queues.running or not self.is_stalled(last):
            return
        if first.rank < last.rank or any(sequence.group.export is not None for sequence in self._queues.ready):
            self._queues.move_to_ready(last, now_s)

    def is_stalled(self, sequence: Sequence) -> bool:
        """Return whether it cannot grow, and no sequence that may be preempted ranks after it."""
        is_last = sequence is self._queues.last_preemptible
        return is_last and sequence.num_left == 1 and self._tables.num_lacking(sequence) > self._pool.num_available

    def grow(self, sequence: Sequence, now_s: float) -> bool:
        """Make room for its known tokens. Returns False if there is none and no sequence behind it has blocks."""
        num_lacking = self._tables.num_lacking(sequence)
        while num_lacking and not self._tables.grow(sequence, num_lacking):
            last = self._queues.last_preemptible
            assert last is not None
            if last.rank <= sequence.rank:
                return False
            self._preempt(last, now_s)
        return True

    def _preempt_for_handoff(self, last: Sequence, now_s: float) -> None:
        """Free blocks for the first hand-off, which gets them when this step has ended."""
        request = self._reservations.first
        if request is not None and self._ranking.displaces(request, last, now_s):
            num_wanted = self._reservations.num_newly_used(request) + self._watermark.for_handoff(request)
            self._free_blocks(num_wanted, request, now_s)

    def _free_slots(self, num_slots: int, sequence: Sequence, now_s: float) -> bool:
        """Free `num_slots` slots for this sequence. The sequences that lose them keep their blocks."""
        while self._queues.num_free_slots < num_slots:
            # A sequence with a spare block must copy its shared tail in the next step, so it cannot be stopped here.
            running = reversed(tuple(self._queues.running))
            victim = next((s for s in running if len(s.choices) > 1 or not s.spare_ids), None)
            if victim is None or not self._ranking.displaces(sequence, victim, now_s):
                return False
            self.displaced += 1
            self._queues.move_to_ready(victim, now_s)
        return True

    def _free_blocks(self, num_blocks: int, wanting: Sequence | BlockRequest, now_s: float) -> bool:
        """Make `num_blocks` available by preempting sequences that rank behind `wanting`. Preempts no sequence if that
        would not be enough; then returns False."""
        if self._pool.num_available >= num_blocks:
            return True
        decoded_here = (holder for holder in self._queues.holders if holder.group.export is None)
        holders = sorted(decoded_here, key=lambda s: s.rank, reverse=True)
        victims = list(itertools.takewhile(lambda holder: self._ranking.displaces(wanting, holder, now_s), holders))
        block_ids = [block_id for victim in victims for block_id in victim.block_ids + victim.spare_ids]
        num_freed = sum(self._pool.num_users(block_id) == 1 for block_id in block_ids)
        if self._pool.num_available + num_freed < num_blocks:
            return False
        for victim in victims:
            if self._pool.num_available < num_blocks:
                self._preempt(victim, now_s)
        return self._pool.num_available >= num_blocks

    def _preempt(self, sequence: Sequence, now_s: float) -> None:
        """Move a sequence to the waiting queue and free its blocks. It keeps its tokens."""
        self.preemptions += 1
        self._queues.remove(sequence)
        self._tables.evict(sequence)
        self._queues.add_waiting(sequence, now_s)
