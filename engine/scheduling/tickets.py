"""The leases of tickets on blocks of exports, of frozen sequences and of cached prefixes. Pure. Owned by the scheduler.

A ticket pins its blocks until it is released, even if its sequence ends. One block may belong to several tickets,
because the choices of one prompt share blocks and are frozen one by one.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from cluster.errors import DuplicateRequest, NotFound
from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.batch import Batch
from engine.scheduling.batching.live_sequences import LiveSequences
from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.commands import Event, Freeze, FreezeRefused, Frozen, Tail, Thaw, Thawed, ThawRefused
from engine.scheduling.schedule import sealed_blocks, tail_length


class TicketLeases:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._tickets: dict[bytes, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket_id: bytes) -> bool:
        return ticket_id in self._tickets

    @property
    def ticket_ids(self) -> Iterable[bytes]:
        return self._tickets.keys()

    @property
    def leases(self) -> Counter[int]:
        """The number of leases per block."""
        return Counter(block_id for block_ids in self._tickets.values() for block_id in block_ids)

    def unverified(self, ticket_id: bytes) -> frozenset[int]:
        """Return the blocks of the ticket that came from another worker and were not verified."""
        return self._pool.unverified_among(self._tickets.get(ticket_id, ()))

    def lease(self, ticket_id: bytes, sequence: Sequence) -> tuple[tuple[int, ...], Tail | None]:
        """Lease the blocks with computed KV of a sequence. Return the sealed blocks and the tail."""
        assert ticket_id not in self._tickets, f"ticket {ticket_id.hex()} used twice"
        num_sealed = sealed_blocks(sequence.num_computed, self._block_size)
        num_valid = tail_length(sequence.num_computed, self._block_size)
        sealed_ids = sequence.block_ids[:num_sealed]
        tail = Tail(sequence.block_ids[num_sealed], num_valid) if num_valid else None
        self._tickets[ticket_id] = sealed_ids if tail is None else (*sealed_ids, tail.block_id)
        self._pool.lease(self._tickets[ticket_id])
        return sealed_ids, tail

    def extend(self, ticket_id: bytes, block_ids: tuple[int, ...]) -> None:
        """Lease more blocks to the ticket of an export, in the order of its prompt."""
        self._pool.lease(block_ids)
        self._tickets[ticket_id] = self._tickets.get(ticket_id, ()) + block_ids

    def lease_prefix(self, ticket_id: bytes, block_hashes: SequenceOf[bytes], min_blocks: int) -> tuple[int, ...]:
        """Lease the cached blocks of the longest known prefix of this chain. Return them, or () if they are fewer than
        `min_blocks`."""
        assert ticket_id not in self._tickets, f"ticket {ticket_id.hex()} used twice"
        block_ids = self._pool.find(block_hashes)
        if len(block_ids) < min_blocks:
            return ()
        self._tickets[ticket_id] = block_ids
        self._pool.lease_found(block_ids)
        return block_ids

    def lease_for_copy(self, ticket_id: bytes, block_hashes: SequenceOf[bytes], first: int) -> tuple[int, ...]:
        """Lease the cached blocks of this chain from index `first` on while they are copied. Return them."""
        assert ticket_id not in self._tickets, f"ticket {ticket_id.hex()} used twice"
        block_ids = self._tickets[ticket_id] = self._pool.find(block_hashes)[first:]
        self._pool.lease_copied(block_ids)
        return block_ids

    def release(self, ticket_id: bytes) -> None:
        """End the leases of a ticket. Does nothing for a ticket that leased nothing."""
        self._pool.end_lease(self._tickets.pop(ticket_id, ()))


class SequenceFreezer:
    def __init__(self, batch: Batch, live: LiveSequences, leases: TicketLeases) -> None:
        self._batch = batch
        self._live = live
        self._leases = leases

    def freeze(self, command: Freeze, now_s: float) -> Event:
        sequence = self._live.get(command.router, command.handle)
        if sequence is None or not self._batch.can_freeze(sequence):
            return FreezeRefused(command.ticket_id, NotFound(f"sequence {command.handle} does not decode here"))
        self._batch.freeze(sequence, now_s)
        sealed_ids, tail = self._leases.lease(command.ticket_id, sequence)
        return Frozen(
            ticket_id=command.ticket_id,
            request_id=sequence.group.job.request_id,
            token_ids=tuple(sequence.token_ids[: sequence.num_computed]),
            last_token_id=sequence.token_ids[-1],
            num_output=sequence.num_output,
            sealed_block_ids=sealed_ids,
            tail=tail,
            unverified=self._leases.unverified(command.ticket_id),
        )

    def thaw(self, command: Thaw, now_s: float) -> Event:
        router, new_handle = command.router, command.new_handle
        sequence = self._live.get(router, command.handle)
        if sequence is None or not self._batch.is_frozen(sequence):
            return ThawRefused(router, new_handle, NotFound(f"sequence {command.handle} is not frozen here"))
        if (router, new_handle) in self._live:
            return ThawRefused(router, new_handle, DuplicateRequest(f"handle {new_handle} is in use"))
        self._batch.thaw(sequence, now_s)
        self._live.rename(sequence, new_handle)
        return Thawed(router, new_handle)
