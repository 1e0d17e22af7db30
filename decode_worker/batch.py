"""Who runs, who waits, and who gives way to whom. Pure. Owned by the decode scheduler.

Owns the block pool, the reservations of hand-offs and the order among sequences; knows nothing of commands or events.
One order settles every contest for slots and blocks: the policy's (by default the older arrival goes first), with the
batch class behind everything else. What a running sequence needs comes before anything that is not running.

* A hand-off reserves all its blocks at once, above a watermark of blocks that running and preempted sequences may take;
  what is known of its prompt is shared, and only the rest counts.
* A waiting sequence reserves its known tokens' blocks at once, if the rest holds what those that have blocks are
  predicted to grow by. Choices of one prompt share blocks, and part at its end.
* A decoding sequence grows by one block when it crosses a boundary. When none is free the last in the order of those
  that hold blocks is preempted: its blocks are freed, and it waits to be brought back from the swap space or computed
  again from its known tokens. If the last is the one that wants to grow, it skips steps, keeping what it has, until
  another one ends or takes it.
* Where the policy lets a waiting sequence displace a running one, the last running one gives up its slot, and where
  memory is short its blocks, before the step is planned. Anything displaces the batch class.
* A frozen sequence keeps its blocks and gives up its slot; thawed, it is one that has blocks and waits for a slot.

Nothing waits in a circle: in every plan the first in the order gets every block except those of hand-offs under way, in
or out, and of quarantine, which end by themselves and wait for nothing here; what cannot fit into the whole pool was
refused at admission.
"""

import heapq
import itertools
from collections.abc import Iterator

from cluster.hashing import NewChain
from decode_worker.block_tables import BlockTables
from decode_worker.growth import Future, most_growth
from decode_worker.limits import DecodeLimits
from decode_worker.preemption_cost import PreemptionCost
from decode_worker.ranking import Ranking
from decode_worker.reservations import Claim, Grant, Reservations
from decode_worker.sequences import ByRank, Sequence
from decode_worker.swapping import SwapSpace
from engine.block_pool import BlockPool
from engine.policies import Policy, Rank
from engine.step import BlockCopy


class Batch:
    """A sequence is in exactly one of four places from `add_...` until `drop`."""

    def __init__(self, limits: DecodeLimits, new_chain: NewChain, cost: PreemptionCost, policy: Policy) -> None:
        self._limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.prefix_eviction)
        self.swaps = SwapSpace(limits.num_swap_slots, cost)
        self.tables = BlockTables(limits, new_chain, self.pool, self.swaps)
        self.reservations = Reservations(self.pool)
        self.ranking = Ranking(policy)
        self.preemptions = 0
        self.displaced = 0  # from their slots
        self._is_open = True  # whether those that never ran may run
        self._running = ByRank()  # have blocks and a slot
        self._ready = ByRank()  # have blocks, wait for a slot
        self._waiting = ByRank()  # have nothing here
        self._frozen = ByRank()  # have blocks, and may go on elsewhere

    @property
    def num_running(self) -> int:
        return self._running.num_choices

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_choices + self._ready.num_choices

    @property
    def num_spare_blocks(self) -> int:
        """That nobody waits for, above the watermark."""
        if len(self._waiting) or self.reservations.num_waiting:
            return 0
        return max(0, self.pool.num_available - self._limits.num_watermark_blocks)

    @property
    def num_frozen(self) -> int:
        return len(self._frozen)

    def add_ready(self, sequence: Sequence) -> None:
        """It holds a reference to each of its blocks."""
        sequence.wait(sequence.group.admitted_s)
        self._put(self._ready, sequence)

    def add_waiting(self, sequence: Sequence) -> None:
        sequence.wait(sequence.group.admitted_s)
        self._put(self._waiting, sequence)

    def grant_reservations(self) -> list[Grant]:
        """Of those whose turn it is. Never while a step is planned: what it swaps out is not copied yet."""
        if not self.reservations.num_waiting:
            return []
        self.reservations.sort(self.ranking.claim_rank)
        granted = self.reservations.grant(self._blocks_to_leave)
        self.tables.tokens_cached += sum(grant.num_cached for grant in granted) * self._limits.block_size
        return granted

    def begin_step(self) -> None:
        """Orders everything by this moment's ranks and gives slots to those whose turn it is."""
        self._is_open = not (self.ranking.policy.is_static and len(self._running))
        self.ranking.sort((self._running, self._ready, self._waiting))
        self.reservations.sort(self.ranking.claim_rank)
        self._make_way_for_claim()
        self._join_ready(num_promised=self._make_way())

    def decoding(self) -> list[Sequence]:
        """The running sequences with one token to compute, each with the block that its KV goes to."""
        # In order: a preempted one always ranks behind all that were looked at before.
        return [s for s in tuple(self._running) if s.num_left == 1 and s.block_ids and self._grow(s)]

    def resume_swapped(self) -> Iterator[Sequence]:
        """Waiting sequences whose turn it is and that decode again at once: they need nothing of a prompt's budget."""
        while (sequence := self._waiting.first) is not None:
            if sequence.swapped is None or sequence.num_left > 1 or self.start_waiting() is not sequence:
                return
            yield sequence

    def prompts(self) -> Iterator[Sequence]:
        """Sequences with more than one token to compute, or that start, in order. Those that wait are started when it
        is their turn; those of a static batch together."""
        formed: set[Sequence] = set()
        if self.ranking.policy.is_static:
            while (head := self._waiting.first) is not None and head.swapped is None and self.start_waiting() is head:
                formed.add(head)
        running = [sequence for sequence in self._running if sequence.num_left > 1 or sequence in formed]
        for sequence in running:
            while (head := self._waiting.first) is not None and head.rank < sequence.rank:
                if self.start_waiting() is None:
                    break
                yield head
            yield sequence
        while (started := self.start_waiting()) is not None:
            yield started

    def start_waiting(self) -> Sequence | None:
        """The first waiting sequence, running now, with its blocks, of which those that were found or swapped out are
        computed; None while it has to wait."""
        sequence = self._waiting.first
        if sequence is None or len(sequence.choices) > self._num_free_slots or not self._may_run(sequence):
            return None
        if not self._may_take_blocks(sequence) or not self.tables.may_fill(sequence):
            return None
        self.tables.fill(sequence)
        self._waiting.remove(sequence)
        self._run(sequence)
        return sequence

    def part(self, sequence: Sequence, numbers: Iterator[int]) -> list[Sequence]:
        """One running sequence per choice, on the same blocks. Each but the first has a spare for its own tail."""
        others = self.tables.part(sequence, numbers)
        for other in others:
            self._put(self._running, other)
        return [sequence, *others]

    def own_tail(self, sequence: Sequence) -> tuple[BlockCopy, ...]:
        return self.tables.own_tail(sequence)

    def decodes(self, sequence: Sequence) -> bool:
        """Its start was told, its last token is one of its own, and nobody else writes to its blocks: it can be
        frozen."""
        is_between_tokens = sequence.num_left == 1 and sequence.num_output > 0
        return sequence in self._running and sequence.has_run and is_between_tokens and not sequence.spare_ids

    def freeze(self, sequence: Sequence) -> None:
        """Between two steps: it is in none until `thaw`."""
        assert self.decodes(sequence)
        self._running.remove(sequence)
        self._put(self._frozen, sequence)

    def is_frozen(self, sequence: Sequence) -> bool:
        return sequence in self._frozen

    def thaw(self, sequence: Sequence) -> None:
        self._frozen.remove(sequence)
        sequence.wait(self.ranking.now_s)
        self._put(self._ready, sequence)

    def drop(self, sequence: Sequence) -> None:
        """Takes it out, and its references with it."""
        self._place(sequence).remove(sequence)
        self.tables.release(sequence)

    def drop_choice(self, sequence: Sequence, handle: int) -> None:
        """Of several; the others go on."""
        assert len(sequence.choices) > 1
        place = self._place(sequence)
        place.remove(sequence)  # its rank may change
        sequence.choices = tuple(choice for choice in sequence.choices if choice[1].handle != handle)
        self.tables.release_spare(sequence)
        self._put(place, sequence)

    def check(self, live: set[int]) -> None:
        """Raises AssertionError when pool and users disagree. `live`: numbers of the sequences that must be here."""
        self.pool.check()
        references = [0] * self.pool.num_blocks
        for sequence in (*self._running, *self._ready, *self._frozen):
            for block_id in sequence.block_ids + sequence.spare_ids:
                references[block_id] += 1
        for block_id in self.reservations.granted_block_ids:
            references[block_id] += 1
        self.pool.check_references(references)
        assert not any(sequence.block_ids or sequence.spare_ids for sequence in self._waiting), "one waits with blocks"
        self.swaps.check(list(self._waiting))
        everywhere = (*self._running, *self._ready, *self._waiting, *self._frozen)
        present = [sequence.number for sequence in everywhere]
        assert sorted(present) == sorted(live), f"sequences {present} are here, {live} are live"
        assert self.num_running <= self._limits.max_num_seqs, f"{self.num_running} running"
        for place, waits in ((self._running, False), (self._ready, True), (self._waiting, True)):
            ranks = [sequence.rank for sequence in place]
            assert ranks == sorted(set(ranks)), f"ranks out of order, or not all different: {ranks}"
            assert all((sequence.waits_since_s is not None) == waits for sequence in place), "a wait is miscounted"

    # Turns

    def _make_way_for_claim(self) -> None:
        """The first hand-off is granted its blocks with this step's outcome."""
        claim, last = self.reservations.first, self._last_holder
        if claim is not None and last is not None and self.ranking.displaces(claim, last):
            self._free_blocks(self.reservations.num_taken(claim) + self._blocks_to_leave(claim), claim)

    def _make_way(self) -> int:
        """What waits takes the places of what runs and ranks behind it, where the policy lets it. Answers how many
        slots are for those that have no blocks yet."""
        num_slots = num_blocks = num_promised = 0
        if (last := self._last_holder) is None or not self.ranking.may_displace(last):
            return 0
        waiting, claim = set(self._waiting), self.reservations.first
        for sequence in heapq.merge(tuple(self._ready), tuple(self._waiting), key=lambda s: s.rank):
            last = self._last_holder
            if last is None or not self._may_run(sequence) or not self.ranking.displaces(sequence, last):
                break
            num_slots += len(sequence.choices)
            if not self._free_slots(num_slots, sequence):
                break
            if sequence in waiting:
                num_blocks += self.tables.num_taken(sequence)
                is_behind_claim = claim is not None and claim.rank < sequence.rank
                if is_behind_claim or not self._free_blocks(num_blocks + self._num_to_leave(sequence), sequence):
                    break
                num_promised += len(sequence.choices)
        return num_promised

    def _free_slots(self, num_slots: int, sequence: Sequence) -> bool:
        """As many, for this one. Who gives up its slot keeps its blocks."""
        while self._num_free_slots < num_slots:
            # One that shares its tail with another choice writes to it in the next step, or loses it.
            movable = (s for s in reversed(tuple(self._running)) if len(s.choices) > 1 or not s.spare_ids)
            victim = next(movable, None)
            if victim is None or not self.ranking.displaces(sequence, victim):
                return False
            self.displaced += 1
            self._running.remove(victim)
            victim.wait(self.ranking.now_s)
            self._put(self._ready, victim)
        return True

    def _free_blocks(self, num_blocks: int, wanting: Sequence | Claim) -> bool:
        """As many, by preempting what ranks behind; nothing is preempted where that would not be enough."""
        if self.pool.num_available >= num_blocks:
            return True
        holders = sorted((*self._running, *self._ready), key=lambda s: s.rank, reverse=True)
        victims = list(itertools.takewhile(lambda holder: self.ranking.displaces(wanting, holder), holders))
        num_freed = sum(
            self.pool.num_users(block_id) == 1 for victim in victims for block_id in victim.block_ids + victim.spare_ids
        )
        if self.pool.num_available + num_freed < num_blocks:
            return False
        for victim in victims:
            if self.pool.num_available < num_blocks:
                self._preempt(victim)
        return self.pool.num_available >= num_blocks

    def _join_ready(self, num_promised: int) -> None:
        """What holds blocks takes the free slots, except those that waiting sequences before it can use now."""
        if not len(self._ready):
            return
        self._leave_slot_that_is_no_use()
        head = self._waiting.first
        if head is not None and not (self._may_run(head) and self._may_take_blocks(head)):
            head = None
        for sequence in tuple(self._ready):
            num_slots = self._num_free_slots
            if head is not None and head.rank < sequence.rank:
                num_slots -= max(len(head.choices), num_promised)
            if num_slots < len(sequence.choices):
                break
            if self._may_run(sequence):
                self._ready.remove(sequence)
                self._run(sequence)

    def _leave_slot_that_is_no_use(self) -> None:
        """A running one that cannot grow, as nobody behind it has blocks, keeps its slot from nobody before it: that
        one has the blocks, and each would wait for the other."""
        last, first = self._last_holder, self._ready.first
        if last is None or first is None or last not in self._running or last.rank < first.rank:
            return
        if last.num_left == 1 and self.tables.num_lacking(last) > self.pool.num_available and self._may_run(first):
            self._running.remove(last)
            last.wait(self.ranking.now_s)
            self._put(self._ready, last)

    def _may_run(self, sequence: Sequence) -> bool:
        return self._is_open or sequence.has_run

    def _run(self, sequence: Sequence) -> None:
        sequence.run(self.ranking.now_s)
        self._put(self._running, sequence)

    # Blocks

    def _grow(self, sequence: Sequence) -> bool:
        """Makes room for its known tokens. False: there is none, and nobody behind it to take it from."""
        num_lacking = self.tables.num_lacking(sequence)
        while num_lacking and not self.tables.grow(sequence, num_lacking):
            idle, last = self._idle_holder, self._last_holder
            assert last is not None
            if idle is None and last.rank <= sequence.rank:
                return False
            self._preempt(idle or last)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """It waits in its turn, with its tokens, and with its KV in the swap space where that is the cheaper way."""
        self.preemptions += 1
        self._place(sequence).remove(sequence)
        self.tables.empty(sequence)
        if sequence.waits_since_s is None:
            sequence.wait(self.ranking.now_s)
        self._put(self._waiting, sequence)

    def _may_take_blocks(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could have its blocks now: there are enough, and no hand-off before it wants
        them."""
        claim = self.reservations.first
        if claim is not None and claim.rank < sequence.rank:
            return False
        return self.pool.num_available - self.tables.num_taken(sequence) >= self._num_to_leave(sequence)

    def _num_to_leave(self, sequence: Sequence) -> int:
        """Blocks that stay available when a waiting sequence starts: the watermark, which is kept for those that ran
        before, and from nobody where nothing runs, or what it and those before it are predicted to grow by."""
        if sequence.has_run or not (len(self._running) or len(self._ready)):
            return 0
        own = self._future(sequence, self.tables.num_needed(sequence))
        return max(self._limits.num_watermark_blocks, self._predicted_growth(sequence.rank, own))

    def _blocks_to_leave(self, claim: Claim) -> int:
        before = (sequence for sequence in self._waiting if sequence.rank < claim.rank)
        growth = self._predicted_growth(claim.rank, claim.futures)
        return max(self._limits.num_watermark_blocks, growth) + sum(map(self.tables.num_needed, before))

    def _predicted_growth(self, rank: Rank, newcomers: list[Future]) -> int:
        """Of those that hold blocks and go before, and of who wants to start. What is not predicted does not grow."""
        holders = [s for s in (*self._running, *self._ready) if s.rank < rank]
        futures = [future for s in holders for future in self._future(s, len(s.block_ids))]
        return most_growth([*futures, *newcomers], self._limits.block_size)

    def _future(self, sequence: Sequence, num_blocks: int) -> list[Future]:
        num_to_come = sequence.predicted_tokens - sequence.num_output
        return [Future(len(sequence.token_ids), num_to_come, num_blocks)] if num_to_come > 0 else []

    # Places

    @property
    def _idle_holder(self) -> Sequence | None:
        """One with blocks that may not run before those that run have ended: they must not wait for it."""
        return next((s for s in reversed(tuple(self._ready)) if not self._may_run(s)), None)

    @property
    def _last_holder(self) -> Sequence | None:
        """Of those whose blocks may be taken, the last in the order."""
        return max((s for s in (self._running.last, self._ready.last) if s), key=lambda s: s.rank, default=None)

    @property
    def _num_free_slots(self) -> int:
        return self._limits.max_num_seqs - self._running.num_choices

    def _put(self, place: ByRank, sequence: Sequence) -> None:
        sequence.rank = self.ranking.rank(sequence)
        place.add(sequence)

    def _place(self, sequence: Sequence) -> ByRank:
        places = (self._running, self._ready, self._waiting, self._frozen)
        return next(place for place in places if sequence in place)
