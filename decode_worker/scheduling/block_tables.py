"""Which blocks a sequence has: how it gets them, grows, shares and loses them. Pure. Owned by the batch.

Every sequence's references to the pool are taken and given back here. Who may have blocks is the batch's business.
"""

from collections.abc import Iterator

from cluster.protocol.hashing import NATIVE, NewChain
from decode_worker.scheduling.limits import DecodeLimits
from decode_worker.scheduling.sequences import Sequence
from decode_worker.scheduling.swapping import SwapSpace
from engine.kv.block_pool import BlockPool, BlockState
from engine.scheduling.schedule import blocks_for, sealed_blocks
from engine.scheduling.step import BlockCopy


class BlockTables:
    """`tokens_cached`: those whose KV was here before the sequence that uses it."""

    def __init__(self, limits: DecodeLimits, new_chain: NewChain, pool: BlockPool, swaps: SwapSpace) -> None:
        self._limits = limits
        self._block_size = limits.block_size
        self._new_chain = new_chain
        self._pool = pool
        self._swaps = swaps
        self.tokens_cached = 0

    def num_needed(self, sequence: Sequence) -> int:
        """For its known tokens."""
        return self._limits.num_needed(len(sequence.token_ids), len(sequence.choices))

    def num_taken(self, sequence: Sequence) -> int:
        """Of the available blocks, by a waiting sequence that comes back or starts now."""
        found = self._find(sequence)
        num_idle = self._pool.num_available - self._pool.num_available_beside(found)
        return self.num_needed(sequence) - len(found) + num_idle

    def may_fill(self, sequence: Sequence) -> bool:
        """What was swapped out may be brought back: its copy is there, and so is what it shares with others. If that
        will not come, it is computed again."""
        if sequence.swapped is None:
            return True
        if self._swaps.is_leaving(sequence):
            return False
        if len(self._find(sequence)) >= sequence.swapped.first:
            return True
        if not self._swaps.inward:  # else it may be what an older one is bringing back
            self._swaps.lose(sequence)
            self._forget(sequence)
        return False

    def fill(self, sequence: Sequence) -> None:
        """Blocks for the known tokens of a waiting sequence; what was found or swapped out is computed."""
        cached = self._find(sequence)
        block_ids = self._pool.reserve_beside(cached, self.num_needed(sequence) - len(cached))
        assert block_ids is not None
        num_shared = blocks_for(len(sequence.token_ids), self._block_size)
        sequence.block_ids, sequence.spare_ids = block_ids[:num_shared], block_ids[num_shared:]
        num_found = len(cached) * self._block_size
        if sequence.swapped is not None:
            self._pool.mark_unverified(self._brought_back_unverified(sequence, len(cached)))
            self._swaps.bring_in(sequence, len(cached))
            sequence.num_computed, sequence.num_kept = max(sequence.num_computed, num_found), len(cached)
        else:
            sequence.num_computed = sequence.num_cached = num_found
            self.tokens_cached += num_found

    def empty(self, sequence: Sequence) -> None:
        """Of a sequence that is preempted: its KV goes to the swap space, where that is the cheaper way, or is lost."""
        num_staying = self._num_staying(sequence)
        block_ids = sequence.block_ids[num_staying : blocks_for(sequence.num_computed, self._block_size)]
        unverified = self._pool.unverified_among(block_ids)
        self.release(sequence)
        num_tokens = sequence.num_computed - num_staying * self._block_size
        self._swaps.take_out(sequence, num_staying, block_ids, num_tokens)
        if sequence.swapped is not None:
            places = (num_staying + n for n, block_id in enumerate(block_ids) if block_id in unverified)
            sequence.swapped.unverified.update(places)
        if sequence.swapped is None:
            self._forget(sequence)

    def release(self, sequence: Sequence) -> None:
        """All its references, and its slots in the swap space."""
        assert not sequence.num_flights, f"sequence {sequence.number} loses its blocks in mid-step"
        self._swaps.discard(sequence)
        self._pool.release(sequence.block_ids + sequence.spare_ids)
        sequence.block_ids = sequence.spare_ids = ()

    def release_spare(self, sequence: Sequence) -> None:
        """Of a choice that ended before the choices parted."""
        self._pool.release(sequence.spare_ids[:1])
        sequence.spare_ids = sequence.spare_ids[1:]

    def num_lacking(self, sequence: Sequence) -> int:
        """Blocks that a decoding sequence has to get before it computes its newest token."""
        num_missing = blocks_for(len(sequence.token_ids), self._block_size) - len(sequence.block_ids)
        return num_missing if num_missing > 0 else int(self.is_tail_leased(sequence))

    def is_tail_leased(self, sequence: Sequence) -> bool:
        """It was frozen, and is still read elsewhere: what is written next goes to a copy."""
        return not sequence.spare_ids and self._pool.state(sequence.block_ids[-1]) is BlockState.LEASED

    def grow(self, sequence: Sequence, num_blocks: int) -> bool:
        """Gives it what it lacks. False: the pool has not so many."""
        block_ids = self._pool.reserve(num_blocks)
        if block_ids is None:
            return False
        if len(sequence.block_ids) == blocks_for(len(sequence.token_ids), self._block_size):
            sequence.spare_ids = block_ids
        else:
            sequence.block_ids += block_ids
        return True

    def num_free_places(self, sequence: Sequence, num_spare_blocks: int) -> int:
        """For tokens behind its known ones, in its last block and so many more."""
        return (len(sequence.block_ids) + num_spare_blocks) * self._block_size - len(sequence.token_ids)

    def grow_for_guesses(self, sequence: Sequence, num_guesses: int) -> int:
        """Places behind its known tokens. Answers how many blocks that took."""
        num_missing = blocks_for(len(sequence.token_ids) + num_guesses, self._block_size) - len(sequence.block_ids)
        if num_missing > 0:
            block_ids = self._pool.reserve(num_missing)
            assert block_ids is not None, f"{num_missing} blocks for guesses were not spare"
            sequence.block_ids += block_ids
        return max(0, num_missing)

    def trim(self, sequence: Sequence) -> None:
        """Gives back what wrong guesses took."""
        num_used = blocks_for(sequence.num_computed, self._block_size)
        self._pool.release(sequence.block_ids[num_used:])
        sequence.block_ids = sequence.block_ids[:num_used]

    def own_tail(self, sequence: Sequence) -> tuple[BlockCopy, ...]:
        """Before a sequence writes to a tail that other choices share or other workers read, it gets its own copy.

        The old one may be reused at once: a step copies before it computes anything."""
        if len(sequence.choices) > 1 or not sequence.spare_ids:
            return ()
        source, (target,) = sequence.block_ids[-1], sequence.spare_ids
        sequence.block_ids, sequence.spare_ids = (*sequence.block_ids[:-1], target), ()
        if self._pool.unverified_among((source,)):
            self._pool.mark_unverified((target,))
        self._pool.release((source,))
        return (BlockCopy(source, target),)

    def part(self, sequence: Sequence, numbers: Iterator[int]) -> list[Sequence]:
        """New sequences for all choices but the first, on the same blocks, each with a spare for its own tail."""
        choices, spare_ids = sequence.choices, sequence.spare_ids
        sequence.choices, sequence.spare_ids = choices[:1], ()
        others = []
        for place, choice in enumerate(choices[1:]):
            self._pool.share(sequence.block_ids)
            others.append(sequence.parted(next(numbers), choice, spare_ids[place : place + 1]))
        return others

    def keep_sealed(self, sequence: Sequence) -> None:
        """What it has filled since the last time can be found by others with the same beginning."""
        num_sealed = sealed_blocks(sequence.num_computed, self._block_size)
        if num_sealed == sequence.num_kept:
            return
        chain, first, sequence.num_kept = sequence.chain, sequence.num_kept, num_sealed
        chain.extend(sequence.token_ids)
        self._pool.keep(sequence.block_ids[first:num_sealed], chain.hashes[first:num_sealed], chain.parent_of(first))

    def end_step(self, *, has_failed: bool) -> None:
        """Before anything else is done with the outcome of a plan."""
        for sequence in self._swaps.end_step():
            if has_failed:  # nobody knows whether it was copied
                self._swaps.lose(sequence)
                self._forget(sequence)

    def _find(self, sequence: Sequence) -> tuple[int, ...]:
        """Blocks that hold the beginning of a waiting one's tokens. At least the last token is computed, in a block of
        its own: its logits are wanted."""
        sequence.chain.extend(sequence.token_ids)
        num_wanted = sealed_blocks(len(sequence.token_ids) - 1, self._block_size)
        return self._pool.find(sequence.chain.hashes[:num_wanted])

    def _forget(self, sequence: Sequence) -> None:
        """Nothing of a waiting sequence is computed any more."""
        sequence.num_computed = sequence.num_kept = 0
        sequence.chain = self._new_chain(sequence.group.job.cache_salt, NATIVE)  # whatever it was imported as

    def _brought_back_unverified(self, sequence: Sequence, num_found: int) -> list[int]:
        """Of its new blocks, those that get content which was not verified before it was swapped out."""
        assert sequence.swapped is not None
        return [sequence.block_ids[place] for place in sequence.swapped.unverified if place >= num_found]

    def _num_staying(self, sequence: Sequence) -> int:
        """Its leading blocks that others use too, and that it will find again if it comes back before those end."""
        found = self._pool.find(sequence.chain.hashes[: sequence.num_kept])
        pairs = zip(found, sequence.block_ids, strict=False)
        stays = (self._pool.num_users(other) > (other == own) for other, own in pairs)
        return next((place for place, stay in enumerate(stays) if not stay), len(found))
