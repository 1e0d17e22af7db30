"""Who runs, who waits, and whose blocks are whose. Pure. Owned by the decode scheduler.

Owns the block pool, the reservations of hand-offs and the order among sequences; knows nothing of commands, events or
time. One rule settles every contest for slots and blocks: the older arrival goes first, and what a running sequence
needs comes before anything that is not running.

* A hand-off reserves all its blocks at once, above a watermark of blocks that running and preempted sequences may take;
  what is known of its prompt is shared, and only the rest counts.
* A waiting sequence reserves its known tokens' blocks at once. Choices of one prompt share them, and part at its end.
* A decoding sequence grows by one block when it crosses a boundary. When none is free the youngest sequence that holds
  blocks is preempted: its blocks are freed, and it waits, at its age, to be brought back from the swap space or
  computed again from its known tokens. If the youngest is the one that wants to grow, it skips steps, keeping what it
  has, until an older one ends or takes it.
* A frozen sequence keeps its blocks and gives up its slot; thawed, it is one that has blocks and waits for a slot.

Nothing waits in a circle: the oldest sequence gets every block except those of hand-offs under way, in or out, and of
quarantine, which end by themselves and wait for nothing here; what cannot fit into the whole pool was refused at
admission.
"""

from collections.abc import Iterator

from cluster.hashing import NATIVE, NewChain
from decode_worker.limits import DecodeLimits
from decode_worker.preemption_cost import PreemptionCost
from decode_worker.reservations import Claim, Grant, Reservations
from decode_worker.sequences import ByAge, Sequence
from decode_worker.swapping import SwapSpace
from engine.block_pool import BlockPool, BlockState
from engine.schedule import blocks_for, sealed_blocks
from engine.step import BlockCopy


class Batch:
    """A sequence is in exactly one of four places from `add_...` until `drop`."""

    def __init__(self, limits: DecodeLimits, new_chain: NewChain, cost: PreemptionCost) -> None:
        self._limits = limits
        self._new_chain = new_chain
        self.pool = BlockPool(limits.num_blocks)
        self.swaps = SwapSpace(limits.num_swap_slots, cost)
        self.reservations = Reservations(self.pool)
        self.preemptions = 0
        self.tokens_cached = 0
        self._running = ByAge()  # have blocks and a slot
        self._imported = ByAge()  # have blocks, wait for a slot
        self._waiting = ByAge()  # have nothing here
        self._frozen = ByAge()  # have blocks, and may go on elsewhere

    @property
    def num_running(self) -> int:
        return self._running.num_choices

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_choices + self._imported.num_choices

    @property
    def num_frozen(self) -> int:
        return len(self._frozen)

    def add_imported(self, sequence: Sequence) -> None:
        """It holds a reference to each of its blocks."""
        self._imported.add(sequence)

    def add_waiting(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)

    def grant_reservations(self) -> list[Grant]:
        """Of those whose turn it is."""
        granted = self.reservations.grant(self._blocks_to_leave) if self.reservations.num_waiting else []
        self.tokens_cached += sum(grant.num_cached for grant in granted) * self._limits.block_size
        return granted

    def join_imported(self) -> None:
        """What holds blocks takes the free slots, except those that an older waiting sequence can use now."""
        if not len(self._imported):
            return
        head = self._waiting.oldest
        if head is not None and not self._may_take_blocks(head):
            head = None
        for sequence in tuple(self._imported):
            num_slots = self._num_free_slots
            if head is not None and head.rank < sequence.rank:
                num_slots -= len(head.choices)
            if num_slots < 1:
                break
            self._imported.remove(sequence)
            self._running.add(sequence)

    def decoding(self) -> list[Sequence]:
        """The running sequences with one token to compute, each with the block that its KV goes to."""
        # Oldest first: a preempted one is always younger than all that were looked at before.
        return [s for s in tuple(self._running) if s.num_left == 1 and s.block_ids and self._grow(s)]

    def prefilling(self) -> Iterator[Sequence]:
        """The running sequences with more than that, oldest first."""
        return (sequence for sequence in self._running if sequence.num_left > 1)

    def resume_swapped(self) -> Iterator[Sequence]:
        """Waiting sequences whose turn it is and that decode again at once: they need nothing of a prompt's budget."""
        while (sequence := self._waiting.oldest) is not None:
            if sequence.swapped is None or sequence.num_left > 1 or self.start_waiting() is not sequence:
                return
            yield sequence

    def start_waiting(self) -> Sequence | None:
        """The oldest waiting sequence, running now, with its blocks, of which those that were found or swapped out are
        computed; None while it has to wait."""
        sequence = self._waiting.oldest
        if sequence is None or len(sequence.choices) > self._num_free_slots or not self._may_take_blocks(sequence):
            return None
        cached = self._find(sequence)
        if sequence.swapped is not None and not self._may_come_back(sequence, len(cached)):
            return None
        num_shared = blocks_for(len(sequence.token_ids), self._limits.block_size)
        block_ids = self.pool.reserve_beside(cached, self._num_needed(sequence) - len(cached))
        assert block_ids is not None
        sequence.block_ids, sequence.spare_ids = block_ids[:num_shared], block_ids[num_shared:]
        num_found = len(cached) * self._limits.block_size
        if sequence.swapped is not None:
            self.swaps.bring_in(sequence, len(cached))
            sequence.num_computed, sequence.num_kept = max(sequence.num_computed, num_found), len(cached)
        else:
            sequence.num_computed = sequence.num_cached = num_found
            self.tokens_cached += num_found
        self._waiting.remove(sequence)
        self._running.add(sequence)
        return sequence

    def keep_sealed(self, sequence: Sequence) -> None:
        """What it has filled since the last time can be found by others with the same beginning."""
        num_sealed = sealed_blocks(sequence.num_computed, self._limits.block_size)
        if num_sealed == sequence.num_kept:
            return
        chain, first, sequence.num_kept = sequence.chain, sequence.num_kept, num_sealed
        chain.extend(sequence.token_ids)
        self.pool.keep(sequence.block_ids[first:num_sealed], chain.hashes[first:num_sealed], chain.parent_of(first))

    def part(self, sequence: Sequence, numbers: Iterator[int]) -> list[Sequence]:
        """One running sequence per choice, on the same blocks. Each but the first has a spare for its own tail."""
        choices, spare_ids = sequence.choices, sequence.spare_ids
        sequence.choices, sequence.spare_ids = choices[:1], ()
        parted = [sequence]
        for place, choice in enumerate(choices[1:]):
            self.pool.share(sequence.block_ids)
            other = Sequence(
                number=next(numbers),
                group=sequence.group,
                choices=(choice,),
                token_ids=list(sequence.token_ids),
                chain=sequence.chain.copy(),
                num_computed=sequence.num_computed,
                num_kept=sequence.num_kept,
                block_ids=sequence.block_ids,
                spare_ids=spare_ids[place : place + 1],
                has_run=True,
            )
            self._running.add(other)
            parted.append(other)
        return parted

    def own_tail(self, sequence: Sequence) -> tuple[BlockCopy, ...]:
        """Before a sequence writes to a tail that other choices share or other workers read, it gets its own copy.

        The old one may be reused at once: a step copies before it computes anything."""
        if len(sequence.choices) > 1 or not sequence.spare_ids:
            return ()
        source, (target,) = sequence.block_ids[-1], sequence.spare_ids
        sequence.block_ids, sequence.spare_ids = (*sequence.block_ids[:-1], target), ()
        self.pool.release((source,))
        return (BlockCopy(source, target),)

    def decodes(self, sequence: Sequence) -> bool:
        """Its start was told, its last token is one of its own, and nobody else writes to its blocks: it can be
        frozen."""
        is_between_tokens = sequence.num_left == 1 and sequence.num_output > 0
        return sequence in self._running and sequence.has_run and is_between_tokens and not sequence.spare_ids

    def freeze(self, sequence: Sequence) -> None:
        """Between two steps: it is in none until `thaw`."""
        assert self.decodes(sequence)
        self._running.remove(sequence)
        self._frozen.add(sequence)

    def is_frozen(self, sequence: Sequence) -> bool:
        return sequence in self._frozen

    def thaw(self, sequence: Sequence) -> None:
        self._frozen.remove(sequence)
        self._imported.add(sequence)

    def end_step(self, *, has_failed: bool) -> None:
        """Before anything else is done with the outcome of a plan."""
        for sequence in self.swaps.end_step():
            if has_failed:  # nobody knows whether it was copied
                self.swaps.lose(sequence)
                self._forget(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Takes it out, and its references with it."""
        self._place(sequence).remove(sequence)
        self.swaps.discard(sequence)
        self.pool.release(sequence.block_ids + sequence.spare_ids)
        sequence.block_ids = sequence.spare_ids = ()

    def drop_choice(self, sequence: Sequence, handle: int) -> None:
        """Of several; the others go on."""
        assert len(sequence.choices) > 1
        place = self._place(sequence)
        place.remove(sequence)  # its rank may change
        sequence.choices = tuple(choice for choice in sequence.choices if choice[1].handle != handle)
        self.pool.release(sequence.spare_ids[:1])
        sequence.spare_ids = sequence.spare_ids[1:]
        place.add(sequence)

    def check(self, live: set[int]) -> None:
        """Raises AssertionError when pool and users disagree. `live`: numbers of the sequences that must be here."""
        self.pool.check()
        references = [0] * self.pool.num_blocks
        for sequence in (*self._running, *self._imported, *self._frozen):
            for block_id in sequence.block_ids + sequence.spare_ids:
                references[block_id] += 1
        for block_id in self.reservations.granted_block_ids:
            references[block_id] += 1
        self.pool.check_references(references)
        assert not any(sequence.block_ids or sequence.spare_ids for sequence in self._waiting), "one waits with blocks"
        self.swaps.check(list(self._waiting))
        everywhere = (*self._running, *self._imported, *self._waiting, *self._frozen)
        present = [sequence.number for sequence in everywhere]
        assert sorted(present) == sorted(live), f"sequences {present} are here, {live} are live"
        assert self.num_running <= self._limits.max_num_seqs, f"{self.num_running} running"

    def _grow(self, sequence: Sequence) -> bool:
        """Makes room for its known tokens. False: there is none, and nobody younger to take it from."""
        num_missing = blocks_for(len(sequence.token_ids), self._limits.block_size) - len(sequence.block_ids)
        takes_tail = num_missing <= 0 and self._is_tail_leased(sequence)
        num_missing = 1 if takes_tail else num_missing
        if num_missing <= 0:
            return True
        while (block_ids := self.pool.reserve(num_missing)) is None:
            victim = max((s for s in (self._running.youngest, self._imported.youngest) if s), key=lambda s: s.rank)
            if victim.rank <= sequence.rank:
                return False
            self._preempt(victim)
        if takes_tail:
            sequence.spare_ids = block_ids
        else:
            sequence.block_ids += block_ids
        return True

    def _is_tail_leased(self, sequence: Sequence) -> bool:
        """It was frozen, and is still read elsewhere: what is written next goes to a copy."""
        return not sequence.spare_ids and self.pool.state(sequence.block_ids[-1]) is BlockState.LEASED

    def _preempt(self, sequence: Sequence) -> None:
        """It waits at its age, with its tokens, and with its KV in the swap space where that is the cheaper way."""
        self.preemptions += 1
        num_staying = self._num_staying(sequence)
        block_ids = sequence.block_ids[num_staying : blocks_for(sequence.num_computed, self._limits.block_size)]
        self.drop(sequence)
        num_tokens = sequence.num_computed - num_staying * self._limits.block_size
        self.swaps.take_out(sequence, num_staying, block_ids, num_tokens)
        if sequence.swapped is None:
            self._forget(sequence)
        self._waiting.add(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Nothing of a waiting sequence is computed any more."""
        sequence.num_computed = sequence.num_kept = 0
        sequence.chain = self._new_chain(sequence.group.job.cache_salt, NATIVE)  # whatever it was imported as

    def _num_staying(self, sequence: Sequence) -> int:
        """Its leading blocks that others use too, and that it will find again if it comes back before those end."""
        found = self.pool.find(sequence.chain.hashes[: sequence.num_kept])
        pairs = zip(found, sequence.block_ids, strict=False)
        stays = (self.pool.num_users(other) > (other == own) for other, own in pairs)
        return next((place for place, stay in enumerate(stays) if not stay), len(found))

    def _may_come_back(self, sequence: Sequence, num_found: int) -> bool:
        """A swapped one: its copy is there, and so is what it shares. If that will not come, it is computed again."""
        assert sequence.swapped is not None
        if self.swaps.is_leaving(sequence):
            return False
        if num_found >= sequence.swapped.first:
            return True
        if not self.swaps.inward:  # else it may be what an older one is bringing back
            self.swaps.lose(sequence)
            self._forget(sequence)
        return False

    def _may_take_blocks(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could have its blocks now: there are enough, and no older hand-off wants them."""
        claim = self.reservations.oldest
        if claim is not None and claim.number < sequence.group.number:
            return False
        # The watermark is kept for sequences that ran before, and from nobody where nothing runs.
        spares = not sequence.has_run and (len(self._running) or len(self._imported))
        cached = self._find(sequence)
        num_left = self.pool.num_available_beside(cached) - (self._num_needed(sequence) - len(cached))
        return num_left >= (self._limits.num_watermark_blocks if spares else 0)

    def _find(self, sequence: Sequence) -> tuple[int, ...]:
        """Blocks that hold the beginning of a waiting one's tokens. At least the last token is computed, in a block of
        its own: its logits are wanted."""
        sequence.chain.extend(sequence.token_ids)
        num_wanted = sealed_blocks(len(sequence.token_ids) - 1, self._limits.block_size)
        return self.pool.find(sequence.chain.hashes[:num_wanted])

    def _blocks_to_leave(self, claim: Claim) -> int:
        older = (sequence for sequence in self._waiting if sequence.group.number < claim.number)
        return self._limits.num_watermark_blocks + sum(map(self._num_needed, older))

    def _num_needed(self, sequence: Sequence) -> int:
        return self._limits.num_needed(len(sequence.token_ids), len(sequence.choices))

    @property
    def _num_free_slots(self) -> int:
        return self._limits.max_num_seqs - self._running.num_choices

    def _place(self, sequence: Sequence) -> ByAge:
        places = (self._running, self._imported, self._waiting, self._frozen)
        return next(place for place in places if sequence in place)
