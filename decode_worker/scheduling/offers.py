"""Blocks that other workers may read, of frozen sequences and of prefixes, by ticket. Pure. Owned by the decode
scheduler.

A ticket pins its blocks until it is released, whatever becomes of the sequence meanwhile. One block may be in several:
choices of one prompt are frozen one by one.
"""

from collections import Counter
from collections.abc import Iterable

from decode_worker.scheduling.commands import Tail
from decode_worker.scheduling.sequences import Sequence
from engine.kv.block_pool import BlockPool
from engine.scheduling.schedule import sealed_blocks, tail_length


class Offers:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._tickets: dict[bytes, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def ticket_ids(self) -> Iterable[bytes]:
        return self._tickets.keys()

    @property
    def leases(self) -> Counter[int]:
        """Of each block, how many."""
        return Counter(block_id for block_ids in self._tickets.values() for block_id in block_ids)

    def unverified(self, ticket_id: bytes) -> frozenset[int]:
        """Of the ticket's blocks, those that came from elsewhere and were not verified."""
        return self._pool.unverified_among(self._tickets.get(ticket_id, ()))

    def lease(self, ticket_id: bytes, sequence: Sequence) -> tuple[tuple[int, ...], Tail | None]:
        """The sealed blocks and the tail of what is computed of it."""
        assert ticket_id not in self._tickets, f"ticket {ticket_id.hex()} used twice"
        num_sealed = sealed_blocks(sequence.num_computed, self._block_size)
        num_valid = tail_length(sequence.num_computed, self._block_size)
        sealed_ids = sequence.block_ids[:num_sealed]
        tail = Tail(sequence.block_ids[num_sealed], num_valid) if num_valid else None
        self._tickets[ticket_id] = sealed_ids if tail is None else (*sealed_ids, tail.block_id)
        self._pool.lease(self._tickets[ticket_id])
        return sealed_ids, tail

    def lease_prefix(self, ticket_id: bytes, block_hashes: tuple[bytes, ...], min_blocks: int) -> tuple[int, ...]:
        """Cached blocks that begin like this; none when they are fewer."""
        assert ticket_id not in self._tickets, f"ticket {ticket_id.hex()} used twice"
        block_ids = self._pool.find(block_hashes)
        if len(block_ids) < min_blocks:
            return ()
        self._tickets[ticket_id] = block_ids
        self._pool.lease_found(block_ids)
        return block_ids

    def release(self, ticket_id: bytes) -> None:
        """Nobody reads them any more. Unknown: nothing was leased to it."""
        self._pool.end_lease(self._tickets.pop(ticket_id, ()))
