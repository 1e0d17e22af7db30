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

from collections.abc import Iterator

from cluster.protocol.hashing import NewChain
from decode_worker.scheduling.block_tables import BlockTables
from decode_worker.scheduling.displacement import Displacement
from decode_worker.scheduling.headroom import Headroom
from decode_worker.scheduling.limits import DecodeLimits
from decode_worker.scheduling.places import Places
from decode_worker.scheduling.preemption_cost import PreemptionCost
from decode_worker.scheduling.ranking import Ranking
from decode_worker.scheduling.reservations import Grant, Reservations
from decode_worker.scheduling.sequences import Sequence
from decode_worker.scheduling.swapping import SwapSpace
from engine.kv.block_pool import BlockPool
from engine.scheduling.policies import Policy


class Batch:
    """Made of the pool and who has which of its blocks, the places of the sequences, and the rules between them."""

    def __init__(self, limits: DecodeLimits, new_chain: NewChain, cost: PreemptionCost, policy: Policy) -> None:
        self._limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.prefix_eviction)
        self.swaps = SwapSpace(limits.num_swap_slots, cost)
        self.tables = BlockTables(limits, new_chain, self.pool, self.swaps)
        self.reservations = Reservations(self.pool)
        self.ranking = Ranking(policy)
        self._places = Places(self.ranking, limits.max_num_seqs)
        self._headroom = Headroom(limits, self._places, self.tables)
        self._displacement = Displacement(
            self.ranking, self._places, self.tables, self.pool, self.reservations, self._headroom
        )
        self._leaving: set[Sequence] = set()  # ended, while a step under way writes to their blocks

    @property
    def num_waiting(self) -> int:
        return self._places.waiting.num_choices + self._places.ready.num_choices

    @property
    def num_spare_blocks(self) -> int:
        """That nobody waits for, above the watermark."""
        if len(self._places.waiting) or self.reservations.num_waiting:
            return 0
        return max(0, self.pool.num_available - self._limits.num_watermark_blocks)

    @property
    def figures(self) -> dict[str, int]:
        return {
            "running": self._places.running.num_choices,
            "waiting": self.num_waiting,
            "frozen": len(self._places.frozen),
            "handoffs_waiting": self.reservations.num_waiting,
            "preemptions": self._displacement.preemptions,
            "displaced": self._displacement.displaced,
            "tokens_cached": self.tables.tokens_cached,
            "blocks_evicted": self.pool.num_evicted,
            **self.swaps.figures,
        }

    def add_ready(self, sequence: Sequence) -> None:
        """It holds a reference to each of its blocks."""
        self._places.wait_ready(sequence, sequence.group.admitted_s)

    def add_waiting(self, sequence: Sequence) -> None:
        self._places.wait_empty(sequence, sequence.group.admitted_s)

    def grant_reservations(self) -> list[Grant]:
        """Of those whose turn it is. Never while a step is planned: what it swaps out is not copied yet."""
        if not self.reservations.num_waiting:
            return []
        self.reservations.sort(self.ranking.claim_rank)
        granted = self.reservations.grant(self._headroom.beside_grant)
        self.tables.tokens_cached += sum(grant.num_cached for grant in granted) * self._limits.block_size
        return granted

    def begin_step(self) -> None:
        """Orders everything by this moment's ranks and gives slots to those whose turn it is."""
        self._places.is_open = not (self.ranking.policy.is_static and len(self._places.running))
        self._places.sort()
        self.reservations.sort(self.ranking.claim_rank)
        num_promised = self._displacement.make_way()
        if len(self._places.ready):
            self._join_ready(num_promised)

    def decoding(self) -> list[Sequence]:
        """The running sequences with one token to compute, each with the block that its KV goes to."""
        # In order: a preempted one always ranks behind all that were looked at before.
        running = (s for s in tuple(self._places.running) if s.num_left == 1 and s.block_ids)
        return [s for s in running if self._displacement.grow(s)]

    def resume_swapped(self) -> Iterator[Sequence]:
        """Waiting sequences whose turn it is and that decode again at once: they need nothing of a prompt's budget."""
        while (sequence := self._places.waiting.first) is not None:
            if sequence.swapped is None or sequence.num_left > 1 or self.start_waiting() is not sequence:
                return
            yield sequence

    def prompts(self) -> Iterator[Sequence]:
        """Sequences with more than one token to compute, or that start, in order. Those that wait are started when it
        is their turn; those of a static batch together."""
        formed = set(self._form()) if self.ranking.policy.is_static else set()
        for sequence in tuple(s for s in self._places.running if s.num_left > 1 or s in formed):
            while (head := self._places.waiting.first) is not None and head.rank < sequence.rank:
                if self.start_waiting() is None:
                    break
                yield head
            yield sequence
        while (started := self.start_waiting()) is not None:
            yield started

    def start_waiting(self) -> Sequence | None:
        """The first waiting sequence, running now, with its blocks, of which those that were found or swapped out are
        computed; None while it has to wait."""
        sequence = self._places.waiting.first
        if (
            sequence is None
            or len(sequence.choices) > self._places.num_free_slots
            or not self._places.may_run(sequence)
        ):
            return None
        if not self._may_take_blocks(sequence) or not self.tables.may_fill(sequence):
            return None
        self.tables.fill(sequence)
        self._places.run(sequence)
        return sequence

    def part(self, sequence: Sequence, numbers: Iterator[int]) -> list[Sequence]:
        """One running sequence per choice, on the same blocks. Each but the first has a spare for its own tail."""
        others = self.tables.part(sequence, numbers)
        for other in others:
            self._places.run_apart(other)
        return [sequence, *others]

    def decodes(self, sequence: Sequence) -> bool:
        """Its start was told, its last token is one of its own, and nobody else writes to its blocks: it can be
        frozen."""
        is_between_tokens = sequence.num_left == 1 and sequence.num_output > 0
        is_settled = not sequence.spare_ids and not sequence.num_flights
        return sequence in self._places.running and sequence.has_run and is_between_tokens and is_settled

    def freeze(self, sequence: Sequence) -> None:
        """Between two steps: it is in none until `thaw`."""
        assert self.decodes(sequence)
        self._places.freeze(sequence)

    def is_frozen(self, sequence: Sequence) -> bool:
        return sequence in self._places.frozen

    def thaw(self, sequence: Sequence) -> None:
        self._places.thaw(sequence)

    def has_room_to_go_on(self) -> bool:
        """Whether a plan can be made that takes nobody's block or slot, and copies and swaps nothing."""
        if not self.swaps.is_idle:
            return False
        num_lacking = 0
        for sequence in self._places.holders:
            if (sequence.spare_ids and len(sequence.choices) == 1) or self.tables.is_tail_leased(sequence):
                return False
            num_lacking += self.tables.num_lacking(sequence)
        return num_lacking <= self.pool.num_available and not self._displacement.may_displace()

    def drop(self, sequence: Sequence) -> None:
        """Takes it out, and its references with it: at once, or by `let_go` when no step writes to its blocks."""
        self._places.take_out(sequence)
        sequence.is_over = True
        if sequence.num_flights:
            self._leaving.add(sequence)
        else:
            self.tables.release(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Of one that is over, once no step under way has it."""
        if not sequence.num_flights:
            self._leaving.remove(sequence)
            self.tables.release(sequence)

    def drop_choice(self, sequence: Sequence, handle: int) -> None:
        """Of several; the others go on."""
        assert len(sequence.choices) > 1
        self._places.drop_choice(sequence, handle)
        self.tables.release_spare(sequence)

    def check(self, live: set[int]) -> None:
        """Raises AssertionError when pool and users disagree. `live`: numbers of the sequences that must be here."""
        self.pool.check()
        references = [0] * self.pool.num_blocks
        for sequence in (*self._places.holders, *self._places.frozen, *self._leaving):
            for block_id in sequence.block_ids + sequence.spare_ids:
                references[block_id] += 1
        for block_id in self.reservations.granted_block_ids:
            references[block_id] += 1
        self.pool.check_references(references)
        self.swaps.check(list(self._places.waiting))
        self._places.check(live)

    def _join_ready(self, num_promised: int) -> None:
        """What holds blocks takes the free slots, except those that waiting sequences before it can use now."""
        self._displacement.leave_slot_that_is_no_use()
        head = self._places.waiting.first
        if head is not None and not (self._places.may_run(head) and self._may_take_blocks(head)):
            head = None
        for sequence in tuple(self._places.ready):
            num_slots = self._places.num_free_slots
            if head is not None and head.rank < sequence.rank:
                num_slots -= max(len(head.choices), num_promised)
            if num_slots < len(sequence.choices):
                break
            if self._places.may_run(sequence):
                self._places.run(sequence)

    def _form(self) -> Iterator[Sequence]:
        """A static batch, of whatever may start now."""
        while (head := self._places.waiting.first) is not None and head.swapped is None:
            if self.start_waiting() is not head:
                return
            yield head

    def _may_take_blocks(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could have its blocks now: there are enough, and no hand-off before it wants
        them."""
        claim = self.reservations.first
        if claim is not None and claim.rank < sequence.rank:
            return False
        num_left = self.pool.num_available - self.tables.num_taken(sequence)
        return num_left >= self._headroom.beside_start(sequence)
