"""The blocks that must remain available for growth, and preemption where they do not suffice. Pure. Owned by the
batch.

The watermark is at least the configured one, and more if the predicted outputs of sequences that rank before need more.
It is 0 for a sequence that was preempted, and for any sequence while none that may grow has blocks, so every sequence
starts.

Preemption takes slots and blocks from sequences that rank last. A step's preemptions happen before its waiting
sequences start, so a plan never preempts a sequence that it has just started.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cluster.request_size import blocks_for
from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.block_tables import BlockTables
from engine.scheduling.batching.queues import Ranking, SequenceQueues
from engine.scheduling.batching.reservations import BlockRequest, Reservations
from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import Rank

_RECENT_S = 60.0
_MAX_RECENT = 100_000


@dataclass(frozen=True, slots=True)
class PredictedGrowth:
    """The predicted growth of one sequence: its known tokens, how many more are predicted (at least one), and the
    blocks that it holds now and frees at its end."""

    num_tokens: int
    num_to_come: int
    num_blocks: int


def peak_growth(growths: Iterable[PredictedGrowth], block_size: int) -> int:
    """Return the peak number of blocks beyond those held now, if every sequence grows by a token a step until it ends.
    The KV of a sequence's last token is never needed."""
    ends = sorted(growths, key=lambda growth: growth.num_to_come)
    full = sum(growth.num_tokens // block_size for growth in ends)
    tails = Counter(growth.num_tokens % block_size for growth in ends)  # few lengths, however many sequences
    num_held = sum(growth.num_blocks for growth in ends)
    most = 0
    for growth in ends:
        # The peak is at the last step of one of the sequences.
        grown = sum(count * blocks_for(tail + growth.num_to_come - 1, block_size) for tail, count in tails.items())
        most = max(most, full + grown - num_held)
        full -= growth.num_tokens // block_size
        tails[growth.num_tokens % block_size] -= 1
    return most


class ExportRoom:
    """Holds back exports that would leave too few blocks for hand-offs from other workers: two workers that are full of
    exports to each other would wait for each other. `expects_imports`: hand-offs may come to this worker."""

    def __init__(
        self, queues: SequenceQueues, tables: BlockTables, pool: BlockPool, reservations: Reservations
    ) -> None:
        self.expects_imports = False
        self._queues = queues
        self._tables = tables
        self._pool = pool
        self._reservations = reservations
        reservations.num_exported = self._num_exported

    @property
    def first_waiting(self) -> Sequence | None:
        return next(self.waiting(), None)

    def waiting(self) -> Iterator[Sequence]:
        """Return the waiting sequences that are not held back. An export is held back with all later exports."""
        is_full = False
        for sequence in self._queues.waiting:
            if self.expects_imports and sequence.group.export is not None:
                is_full = is_full or self._lacks_room(sequence)
                if is_full:
                    continue
            yield sequence

    def _lacks_room(self, export: Sequence) -> bool:
        """Return whether an export would leave too few blocks. The only export never does, or it would never start."""
        num_exported = self._num_exported()
        return num_exported > 0 and num_exported + self._tables.num_needed(export) > self._reservations.num_spare

    def _num_exported(self) -> int:
        """Return the blocks of leases and of exports that will be leased. They are freed only when another worker has
        read them."""
        exports = [(sequence, sequence.group.export) for sequence in self._queues.holders]
        num_to_lease = sum(len(s.block_ids) - e.num_leased for s, e in exports if e is not None and e.has_importer)
        return self._pool.num_leased + num_to_lease


class Watermark:
    def __init__(
        self, limits: SchedulerLimits, queues: SequenceQueues, tables: BlockTables, export_room: ExportRoom
    ) -> None:
        self._limits = limits
        self._queues = queues
        self._tables = tables
        self._export_room = export_room

    def for_sequence(self, sequence: Sequence) -> int:
        """Return the number of blocks that must remain when this waiting sequence starts."""
        if sequence.has_run or self._queues.last_preemptible is None:
            return 0
        return max(self._limits.num_watermark_blocks, self._peak_growth(sequence.rank, self._growth_of(sequence)))

    def for_handoff(self, request: BlockRequest) -> int:
        """Return the number of blocks that must remain when this hand-off gets its blocks. They include the blocks with
        which waiting sequences that rank before it start."""
        before = list(itertools.takewhile(lambda sequence: sequence.rank < request.rank, self._export_room.waiting()))
        num_needed = self._limits.num_watermark_blocks
        if before or self._queues.last_preemptible is not None:
            growths = [growth for sequence in before for growth in self._growth_of(sequence)]
            # It is unknown when the imported sequences will join, so their whole predicted growth counts.
            num_needed = max(num_needed, self._peak_growth(request.rank, growths) + request.num_to_grow)
        return num_needed + sum(map(self._tables.num_needed, before))

    def _peak_growth(self, rank: Rank, newcomers: Iterable[PredictedGrowth]) -> int:
        """Return the peak growth of `newcomers` and of the sequences with blocks that rank before `rank`. A sequence
        without a prediction counts as not growing."""
        holders = [holder for holder in self._queues.holders if holder.rank < rank]
        growths = [growth for holder in holders for growth in _predicted_growth(holder, len(holder.block_ids))]
        return peak_growth([*growths, *newcomers], self._limits.block_size)

    def _growth_of(self, waiting: Sequence) -> list[PredictedGrowth]:
        return _predicted_growth(waiting, self._tables.num_needed(waiting))


def _predicted_growth(sequence: Sequence, num_blocks: int) -> list[PredictedGrowth]:
    num_to_come = sequence.predicted_tokens - sequence.num_output
    return [PredictedGrowth(len(sequence.token_ids), num_to_come, num_blocks)] if num_to_come > 0 else []


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
        export_room: ExportRoom,
    ) -> None:
        self.preemptions = 0
        self.displaced = 0
        self._recent_s: deque[float] = deque(maxlen=_MAX_RECENT)  # when sequences lost their blocks
        self._ranking = ranking
        self._queues = queues
        self._tables = tables
        self._pool = pool
        self._reservations = reservations
        self._watermark = watermark
        self._export_room = export_room

    def num_last_minute(self, now_s: float) -> int:
        """Return how many sequences lost their blocks within the last 60 s."""
        while self._recent_s and self._recent_s[0] < now_s - _RECENT_S:
            self._recent_s.popleft()
        return len(self._recent_s)

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
        ready, request = tuple(self._queues.ready), self._reservations.first
        candidates = (ready, self._export_room.waiting())
        for sequence in heapq.merge(*candidates, key=lambda candidate: candidate.rank):
            last = self._queues.last_holder
            if last is None or not self._ranking.displaces(sequence, last, now_s):
                break
            num_slots += sequence.num_slots
            if not self._free_slots(num_slots, sequence, now_s):
                break
            if sequence not in ready:
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
        """Make room for its known tokens. Returns False if there is none and no lower-ranking sequence has blocks."""
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
        """Make `num_blocks` available by preempting sequences that rank after `wanting`. Preempts no sequence if that
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
        self._recent_s.append(now_s)
        self._queues.remove(sequence)
        self._tables.evict(sequence)
        sequence.charged = 0.0
        self._queues.add_waiting(sequence, now_s)
