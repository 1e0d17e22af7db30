"""Who gives way to whom: slots and blocks that are taken from those that rank behind. Pure. Owned by the batch.

All of it happens before a step's waiting sequences are started, so that nothing that a plan brings in is thrown out by
the same plan.
"""

import heapq
import itertools

from decode_worker.scheduling.block_tables import BlockTables
from decode_worker.scheduling.headroom import Headroom
from decode_worker.scheduling.places import Places
from decode_worker.scheduling.ranking import Ranking
from decode_worker.scheduling.reservations import Claim, Reservations
from decode_worker.scheduling.sequences import Sequence
from engine.kv.block_pool import BlockPool


class Displacement:
    """`preemptions` count sequences that lost their blocks, `displaced` those that lost their slot alone."""

    def __init__(
        self,
        ranking: Ranking,
        places: Places,
        tables: BlockTables,
        pool: BlockPool,
        reservations: Reservations,
        headroom: Headroom,
    ) -> None:
        self.preemptions = 0
        self.displaced = 0
        self._ranking = ranking
        self._places = places
        self._tables = tables
        self._pool = pool
        self._reservations = reservations
        self._headroom = headroom

    def may_displace(self) -> bool:
        """Whether something waits, and somebody's place may be taken for it."""
        last = self._places.last_holder
        if last is None or not self._ranking.may_displace(last):
            return False
        return bool(len(self._places.ready) or len(self._places.waiting) or self._reservations.num_waiting)

    def make_way(self) -> int:
        """What waits takes the places of what runs and ranks behind it, where the policy lets it. Answers how many
        slots are for those that have no blocks yet."""
        last = self._places.last_holder
        if last is None or not self._ranking.may_displace(last):
            return 0
        self._make_way_for_claim(last)
        num_slots = num_blocks = num_promised = 0
        waiting, claim = set(self._places.waiting), self._reservations.first
        candidates = (tuple(self._places.ready), tuple(self._places.waiting))
        for sequence in heapq.merge(*candidates, key=lambda candidate: candidate.rank):
            last = self._places.last_holder
            if last is None or not self._places.may_run(sequence) or not self._ranking.displaces(sequence, last):
                break
            num_slots += len(sequence.choices)
            if not self._free_slots(num_slots, sequence):
                break
            if sequence in waiting:
                num_blocks += self._tables.num_taken(sequence)
                num_wanted = num_blocks + self._headroom.beside_start(sequence)
                is_behind_claim = claim is not None and claim.rank < sequence.rank
                if is_behind_claim or not self._free_blocks(num_wanted, sequence):
                    break
                num_promised += len(sequence.choices)
        return num_promised

    def leave_slot_that_is_no_use(self) -> None:
        """A running one that cannot grow, as nobody behind it has blocks, keeps its slot from nobody before it that has
        blocks: each would wait for the other."""
        last, first = self._places.last_holder, self._places.ready.first
        if last is None or first is None or last not in self._places.running or last.rank < first.rank:
            return
        if (
            self._places.may_run(first)
            and last.num_left == 1
            and self._tables.num_lacking(last) > self._pool.num_available
        ):
            self._places.leave_slot(last)

    def grow(self, sequence: Sequence) -> bool:
        """Makes room for its known tokens. False: there is none, and nobody behind it to take it from."""
        num_lacking = self._tables.num_lacking(sequence)
        while num_lacking and not self._tables.grow(sequence, num_lacking):
            idle, last = self._places.idle_holder, self._places.last_holder
            assert last is not None
            if idle is None and last.rank <= sequence.rank:
                return False
            self._preempt(idle or last)
        return True

    def _make_way_for_claim(self, last: Sequence) -> None:
        """The first hand-off is granted its blocks with this step's outcome."""
        claim = self._reservations.first
        if claim is not None and self._ranking.displaces(claim, last):
            self._free_blocks(self._reservations.num_taken(claim) + self._headroom.beside_grant(claim), claim)

    def _free_slots(self, num_slots: int, sequence: Sequence) -> bool:
        """As many, for this one. Who gives up its slot keeps its blocks."""
        while self._places.num_free_slots < num_slots:
            # One that shares its tail with another choice writes to it in the next step, or loses it.
            running = reversed(tuple(self._places.running))
            victim = next((s for s in running if len(s.choices) > 1 or not s.spare_ids), None)
            if victim is None or not self._ranking.displaces(sequence, victim):
                return False
            self.displaced += 1
            self._places.leave_slot(victim)
        return True

    def _free_blocks(self, num_blocks: int, wanting: Sequence | Claim) -> bool:
        """As many, by preempting what ranks behind; nothing is preempted where that would not be enough."""
        if self._pool.num_available >= num_blocks:
            return True
        holders = sorted(self._places.holders, key=lambda s: s.rank, reverse=True)
        victims = list(itertools.takewhile(lambda holder: self._ranking.displaces(wanting, holder), holders))
        block_ids = [block_id for victim in victims for block_id in victim.block_ids + victim.spare_ids]
        num_freed = sum(self._pool.num_users(block_id) == 1 for block_id in block_ids)
        if self._pool.num_available + num_freed < num_blocks:
            return False
        for victim in victims:
            if self._pool.num_available < num_blocks:
                self._preempt(victim)
        return self._pool.num_available >= num_blocks

    def _preempt(self, sequence: Sequence) -> None:
        """It waits in its turn, with its tokens, and with its KV in the swap space where that is the cheaper way."""
        self.preemptions += 1
        self._places.take_out(sequence)
        self._tables.empty(sequence)
        waits_since_s = sequence.waits_since_s
        self._places.wait_empty(sequence, self._ranking.now_s if waits_since_s is None else waits_since_s)
