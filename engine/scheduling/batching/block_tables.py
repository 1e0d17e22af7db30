"""The block tables of sequences: allocation, growth, sharing, copy on write, and eviction with or without a swap. Pure.
Owned by the batch.

Only this module adds and removes sequences' references to blocks. The batch decides which sequence may have blocks.

The swap space owns the slots of host memory and the list of copies in the step that is being planned; blocks belong to
the pool. Slots that a step reads become free when the step ends, because a step copies out before it copies in. A block
that is copied out may be reserved again in the same plan, because the step copies it before it writes anything.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from cluster.protocol.hashing import NATIVE, NewChain
from cluster.request_size import blocks_for, sealed_blocks
from engine.kv.block_pool import BlockPool, BlockState
from engine.scheduling.batching.sequences import Sequence, Swapped
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.step import BlockCopy, BlockSwap

_NEWEST_SHARE = 0.2  # of the newest measurement in a rate


class PreemptionCost:
    """The cost of swapping and of recomputing. The copy rate is measured at start and in every step that copies, as a
    moving average. The worker's service times predict the cost of computing."""

    def __init__(self, copy_s_per_block: float | None = None, compute_s: Callable[[int], float] | None = None) -> None:
        """`compute_s` predicts the seconds to compute the first tokens of a sequence."""
        self.copy_s_per_block = copy_s_per_block  # one way; None until it is measured
        self.compute_s = compute_s

    def is_swap_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether copying `num_blocks` out and in is faster than computing `num_tokens`. Returns True while one
        of them is unknown, because the time of a copy is bounded by the size of memory."""
        if self.copy_s_per_block is None or self.compute_s is None:
            return True
        return 2 * num_blocks * self.copy_s_per_block < self.compute_s(num_tokens)

    def observe_copies(self, num_blocks: int, seconds: float) -> None:
        """Record the copies of one step, in both directions together."""
        if num_blocks and seconds > 0:
            newest, before = seconds / num_blocks, self.copy_s_per_block
            self.copy_s_per_block = newest if before is None else before + _NEWEST_SHARE * (newest - before)


_COUNTED = ("swapped_out", "swapped_in", "recomputed", "recompute_cheaper", "swap_full", "swap_lost")


class SwapSpace:
    """Slots of host memory, one block each."""

    def __init__(self, num_slots: int, cost: PreemptionCost) -> None:
        self.num_slots = num_slots
        self.cost = cost
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: pages that were touched are used again
        self._copying_out: list[Sequence] = []  # swapped out by the plan that is being made or computed
        self._swaps_out: list[BlockSwap] = []
        self._swaps_in: list[BlockSwap] = []
        self._read_slots: list[int] = []  # by the plan's swaps in, and unneeded slots of the same sequences
        self._num = dict.fromkeys(_COUNTED, 0)

    @property
    def figures(self) -> dict[str, int]:
        """Counts of preempted sequences that were swapped or recomputed, with the reasons for recomputing."""
        return {**self._num, "swap_slots_used": self.num_slots - len(self._free)}

    @property
    def swaps_out(self) -> tuple[BlockSwap, ...]:
        return tuple(self._swaps_out)

    @property
    def swaps_in(self) -> tuple[BlockSwap, ...]:
        return tuple(self._swaps_in)

    @property
    def is_idle(self) -> bool:
        """No slot is in use, and the plan swaps nothing out."""
        return len(self._free) == self.num_slots and not self._copying_out

    def is_copying_out(self, sequence: Sequence) -> bool:
        """Return whether the copy of this sequence is complete only after the step that is being planned."""
        return sequence in self._copying_out

    def swap_out(self, sequence: Sequence, first: int, block_ids: tuple[int, ...], num_tokens: int) -> None:
        """Swap out these blocks of a sequence that is being preempted, or leave `swapped` None if recomputing is
        cheaper. `block_ids`: its blocks from index `first` on, which hold the KV of `num_tokens` tokens."""
        if not self.num_slots or not self._is_worth(len(block_ids), num_tokens):
            self._num["recomputed"] += 1
            return
        slots = tuple(self._free.pop() for _ in block_ids)
        sequence.swapped = Swapped(first, slots)
        self._copying_out.append(sequence)
        self._swaps_out += map(BlockSwap, block_ids, slots)
        self._num["swapped_out"] += 1

    def swap_in(self, sequence: Sequence, num_found: int) -> None:
        """Swap a sequence into its new blocks, except the first `num_found`, which have their content already."""
        assert sequence.swapped is not None and num_found >= sequence.swapped.first
        first, slots = sequence.swapped.first, sequence.swapped.slots
        moves = zip(sequence.block_ids[first:], slots, strict=False)
        self._swaps_in += [BlockSwap(*move) for move in list(moves)[num_found - first :]]
        self._read_slots += slots
        sequence.swapped = None
        self._num["swapped_in"] += 1

    def abandon(self, sequence: Sequence) -> None:
        """Drop the copy of a sequence, which must be recomputed: its shared leading blocks are gone, or its step
        failed."""
        self._num["swap_lost"] += 1
        self._num["recomputed"] += 1
        self.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Free the slots of a sequence, which must not be in the copies of the plan."""
        if sequence.swapped is not None:
            self._free += sequence.swapped.slots
            sequence.swapped = None

    def end_step(self) -> list[Sequence]:
        """Free the slots that the step read. Return the sequences that it swapped out: if the step failed, their copies
        may be incomplete."""
        copying_out = self._copying_out
        self._free += self._read_slots
        self._copying_out, self._swaps_out, self._swaps_in, self._read_slots = [], [], [], []
        return copying_out

    def check(self, waiting: SequenceOf[Sequence]) -> None:
        """Raise AssertionError unless each slot is free or is used exactly once, by a waiting sequence or by the
        plan."""
        used = [slot for sequence in waiting if sequence.swapped is not None for slot in sequence.swapped.slots]
        slots = sorted([*self._free, *self._read_slots, *used])
        assert slots == list(range(self.num_slots)), f"of {self.num_slots} slots {slots} are accounted for"

    def _is_worth(self, num_blocks: int, num_tokens: int) -> bool:
        if num_blocks > len(self._free):
            self._num["swap_full"] += 1
            return False
        if not self.cost.is_swap_cheaper(num_blocks, num_tokens):
            self._num["recompute_cheaper"] += 1
            return False
        return True


class BlockTables:
    """Allocates, grows, shares and frees the blocks of sequences. `tokens_cached` counts tokens whose KV was found in
    the prefix cache."""

    def __init__(self, limits: SchedulerLimits, new_chain: NewChain, pool: BlockPool, swaps: SwapSpace) -> None:
        self._limits = limits
        self._block_size = limits.block_size
        self._new_chain = new_chain
        self._pool = pool
        self._swaps = swaps
        self.tokens_cached = 0

    def num_needed(self, sequence: Sequence) -> int:
        """Return the number of blocks for all known tokens of a sequence, with a tail per choice."""
        return self._limits.num_needed(len(sequence.token_ids), sequence.num_slots)

    def num_newly_used(self, sequence: Sequence) -> int:
        """Return by how much `num_available` falls if this waiting sequence starts now."""
        found = self._find(sequence)
        num_idle = self._pool.num_available - self._pool.num_available_beside(found)
        return self.num_needed(sequence) - len(found) + num_idle

    def can_allocate(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence can start: it was not swapped out, or its copy is complete and its shared
        leading blocks are still cached. If they are not and cannot be restored by a swap-in of this plan, the copy is
        dropped and the sequence will be recomputed."""
        if sequence.swapped is None:
            return True
        if self._swaps.is_copying_out(sequence):
            return False
        if len(self._find(sequence)) >= sequence.swapped.first:
            return True
        if not self._swaps.swaps_in:  # else a sequence that starts in the same plan may restore them
            self._swaps.abandon(sequence)
            self._reset_computed(sequence)
        return False

    def allocate(self, sequence: Sequence) -> None:
        """Allocate blocks for the known tokens of a waiting sequence. Cached and swapped KV counts as computed."""
        cached = self._find(sequence)
        block_ids = self._pool.reserve_beside(cached, self.num_needed(sequence) - len(cached))
        assert block_ids is not None
        num_shared = blocks_for(len(sequence.token_ids), self._block_size)
        sequence.block_ids, sequence.spare_ids = block_ids[:num_shared], block_ids[num_shared:]
        num_found = len(cached) * self._block_size
        if sequence.swapped is not None:
            self._pool.mark_unverified(self._brought_back_unverified(sequence, len(cached)))
            self._swaps.swap_in(sequence, len(cached))
            sequence.num_computed, sequence.num_kept = max(sequence.num_computed, num_found), len(cached)
        else:
            sequence.num_computed = sequence.num_cached = num_found
            self.tokens_cached += num_found
        self._mark_computed(sequence, block_ids[blocks_for(sequence.num_computed, self._block_size) :])
        sequence.advance(0)  # cached tokens are done before its wait ends

    def evict(self, sequence: Sequence) -> None:
        """Free the blocks of a preempted sequence. Its KV is swapped out if that is cheaper than computing it again."""
        num_shared = self._num_shared(sequence)
        block_ids = sequence.block_ids[num_shared : blocks_for(sequence.num_computed, self._block_size)]
        unverified = self._pool.unverified_among(block_ids)
        self.free(sequence)
        num_tokens = sequence.num_computed - num_shared * self._block_size
        self._swaps.swap_out(sequence, num_shared, block_ids, num_tokens)
        if sequence.swapped is not None:
            places = (num_shared + n for n, block_id in enumerate(block_ids) if block_id in unverified)
            sequence.swapped.unverified.update(places)
        if sequence.swapped is None:
            self._reset_computed(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence and its slots in the swap space."""
        assert not sequence.num_steps_in_flight, f"sequence {sequence.number} is freed while a step in flight uses it"
        self._swaps.discard(sequence)
        self._pool.drop_references(sequence.block_ids + sequence.spare_ids)
        sequence.block_ids = sequence.spare_ids = ()

    def free_spare(self, sequence: Sequence) -> None:
        """Free the spare block of a choice that ended before the choices were split."""
        self._pool.drop_references(sequence.spare_ids[:1])
        sequence.spare_ids = sequence.spare_ids[1:]

    def num_lacking(self, sequence: Sequence) -> int:
        """Return how many blocks a decoding sequence needs before it can compute its newest token."""
        num_missing = blocks_for(len(sequence.token_ids), self._block_size) - len(sequence.block_ids)
        return num_missing if num_missing > 0 else int(self.is_tail_leased(sequence))

    def is_tail_leased(self, sequence: Sequence) -> bool:
        """Return whether an exporter still reads the last block, so that the next token must be written to a copy."""
        return not sequence.spare_ids and self._pool.state(sequence.block_ids[-1]) is BlockState.LEASED

    def grow(self, sequence: Sequence, num_blocks: int) -> bool:
        """Give a decoding sequence `num_blocks` more blocks. Returns False if the pool has fewer."""
        block_ids = self._pool.reserve(num_blocks)
        if block_ids is None:
            return False
        self._mark_computed(sequence, block_ids)
        if len(sequence.block_ids) == blocks_for(len(sequence.token_ids), self._block_size):
            sequence.spare_ids = block_ids
        else:
            sequence.block_ids += block_ids
        return True

    def _mark_computed(self, sequence: Sequence, block_ids: SequenceOf[int]) -> None:
        """Mark blocks that this worker will compute from the sequence's blocks, if one of those was not verified: KV
        that was computed from wrong KV is wrong, and its digest does not show it."""
        if self._pool.unverified_among(sequence.block_ids):
            self._pool.mark_unverified(block_ids)

    def num_free_places(self, sequence: Sequence, num_spare_blocks: int) -> int:
        """Return how many tokens fit after the known ones, in the last block and `num_spare_blocks` more."""
        return (len(sequence.block_ids) + num_spare_blocks) * self._block_size - len(sequence.token_ids)

    def grow_for_draft_tokens(self, sequence: Sequence, num_draft_tokens: int) -> int:
        """Reserve blocks for draft tokens after the known tokens. Return how many."""
        num_missing = blocks_for(len(sequence.token_ids) + num_draft_tokens, self._block_size) - len(sequence.block_ids)
        if num_missing > 0:
            block_ids = self._pool.reserve(num_missing)
            assert block_ids is not None, f"{num_missing} blocks for draft tokens were not spare"
            self._mark_computed(sequence, block_ids)
            sequence.block_ids += block_ids
        return max(0, num_missing)

    def trim(self, sequence: Sequence) -> None:
        """Return the blocks that only rejected draft tokens used."""
        num_used = blocks_for(sequence.num_computed, self._block_size)
        self._pool.drop_references(sequence.block_ids[num_used:])
        sequence.block_ids = sequence.block_ids[:num_used]

    def copy_shared_tail(self, sequence: Sequence) -> tuple[BlockCopy, ...]:
        """Give a sequence its own copy of a last block that other choices share or an exporter reads (copy on write).

        The old block may be reused at once, because a step copies before it computes anything."""
        if len(sequence.choices) > 1 or not sequence.spare_ids:
            return ()
        source, (target,) = sequence.block_ids[-1], sequence.spare_ids
        sequence.block_ids, sequence.spare_ids = (*sequence.block_ids[:-1], target), ()
        if self._pool.unverified_among((source,)):
            self._pool.mark_unverified((target,))
        self._pool.drop_references((source,))
        return (BlockCopy(source, target),)

    def split_choices(self, sequence: Sequence, new_number: Callable[[], int]) -> list[Sequence]:
        """Split off a new sequence for each choice but the first, on the same blocks, with a spare block for its
        tail. Return the new ones."""
        choices, spare_ids = sequence.choices, sequence.spare_ids
        sequence.choices, sequence.num_slots, sequence.spare_ids = choices[:1], 1, ()
        others = []
        for place, choice in enumerate(choices[1:]):
            self._pool.add_references(sequence.block_ids)
            others.append(sequence.split_off(new_number(), choice, spare_ids[place : place + 1]))
        return others

    def cache_sealed(self, sequence: Sequence) -> None:
        """Add the blocks that were sealed since the last call to the prefix cache."""
        num_sealed = sealed_blocks(sequence.num_computed, self._block_size)
        if num_sealed == sequence.num_kept:
            return
        chain, first, sequence.num_kept = sequence.chain, sequence.num_kept, num_sealed
        chain.extend(sequence.token_ids)
        self._pool.keep(sequence.block_ids[first:num_sealed], chain.hashes[first:num_sealed], chain.parent_of(first))

    def end_step(self, *, has_failed: bool) -> None:
        """End the swaps of a step. Must be called before its outcome is applied."""
        for sequence in self._swaps.end_step():
            if has_failed:  # the copy may be incomplete
                self._swaps.abandon(sequence)
                self._reset_computed(sequence)

    def _find(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the cached blocks of the longest known prefix of a waiting sequence. The last token is always
        computed, in a block that is not shared, because its logits are needed."""
        sequence.chain.extend(sequence.token_ids)
        if sequence.is_scored:
            return ()
        num_wanted = sealed_blocks(len(sequence.token_ids) - 1, self._block_size)
        return self._pool.find(sequence.chain.hashes[:num_wanted])

    def _reset_computed(self, sequence: Sequence) -> None:
        """Mark that no KV of a waiting sequence exists any more."""
        sequence.num_computed = sequence.num_kept = 0
        sequence.chain = self._new_chain(
            sequence.group.job.cache_salt, NATIVE
        )  # KV recomputed here is exact, even if the import was quantised

    def _brought_back_unverified(self, sequence: Sequence, num_found: int) -> list[int]:
        """Return those of the new blocks whose swapped content was never verified."""
        assert sequence.swapped is not None
        return [sequence.block_ids[place] for place in sequence.swapped.unverified if place >= num_found]

    def _num_shared(self, sequence: Sequence) -> int:
        """Return how many leading blocks other sequences use as well. They need no swap: the prefix cache will find
        them while one of those sequences lives."""
        found = self._pool.find(sequence.chain.hashes[: sequence.num_kept])
        pairs = zip(found, sequence.block_ids, strict=False)
        stays = (self._pool.num_users(other) > (other == own) for other, own in pairs)
        return next((place for place, stay in enumerate(stays) if not stay), len(found))
