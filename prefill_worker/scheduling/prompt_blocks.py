"""The block pool of a prefill worker and who holds its blocks: running jobs, ended tickets, pulls. Pure.

A job with an importer leases each block as it is sealed. The lease outlives the job and ends with Release. Sealed
blocks also enter the prefix cache. `PulledBlocks` holds the blocks that a pull or a tier is filling;
`CacheEventSubscribers` holds the event loop's open questions for cache events. Owned by the prefill scheduler, which
decides who gets blocks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from cluster import holders
from cluster.protocol.hashing import BlockChain
from engine.kv.block_pool import BlockPool
from engine.scheduling.commands import LeasePrefix, PrefixLeased, Tail
from engine.scheduling.schedule import blocks_for, sealed_blocks, tail_length
from prefill_worker.scheduling.commands import (
    AdmitPull,
    AwaitCacheEvents,
    CacheEventsReady,
    LeasedForCopy,
    PullReserved,
    ReservePull,
    Sealed,
)
from prefill_worker.scheduling.jobs import Running


class PromptBlocks:
    def __init__(self, num_blocks: int, block_size: int, prefix_eviction: str) -> None:
        self.pool = BlockPool(num_blocks, prefix_eviction)
        self.pulled = PulledBlocks(self.pool)
        self.subscribers = CacheEventSubscribers(self.pool)
        self._block_size = block_size
        self._leased: dict[bytes, tuple[int, ...]] = {}  # by ticket, for tickets whose job has ended

    @property
    def num_tickets(self) -> int:
        """The number of tickets whose job has ended and that still hold leases."""
        return len(self._leased)

    def has_leased(self, ticket_id: bytes) -> bool:
        return ticket_id in self._leased

    def reserve(self, chain: BlockChain, token_ids: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
        """Return the blocks of a prompt and how many of its leading tokens they hold already. None: too few are
        available now."""
        chain.extend(token_ids)
        # The last token is always computed, for its logits; its block belongs to this job alone.
        cached = self.pool.find(chain.hashes[: sealed_blocks(len(token_ids) - 1, self._block_size)])
        block_ids = self.pool.reserve_beside(cached, blocks_for(len(token_ids), self._block_size) - len(cached))
        return None if block_ids is None else (block_ids, len(cached) * self._block_size)

    def seal(self, running: Running) -> tuple[Sealed, ...]:
        """Add the newly sealed blocks to the prefix cache; if an importer will come, lease and announce them."""
        num_sealed = sealed_blocks(running.num_computed, self._block_size)
        self._keep(running, num_sealed)
        newly_sealed = running.block_ids[running.num_leased : num_sealed]
        if not running.has_importer or not newly_sealed:
            return ()
        self.pool.lease(newly_sealed)
        first_index, running.num_leased = running.num_leased, num_sealed
        unverified = self.pool.unverified_among(newly_sealed)
        return (Sealed(running.ticket_id, first_index, newly_sealed, unverified),)

    def lease_tail(self, running: Running) -> Tail | None:
        """Lease the partly filled last block of a computed prompt. None: the prompt fills its last block, or no
        importer will come."""
        num_valid = tail_length(len(running.job.token_ids), self._block_size)
        if not running.has_importer or not num_valid:
            return None
        tail = Tail(running.block_ids[-1], num_valid)
        self.pool.lease((tail.block_id,))
        running.num_leased += 1
        return tail

    def end(self, running: Running) -> None:
        """Release the references of a job that has ended. Its leases stay until Release."""
        self.pool.release(running.block_ids)
        if running.num_leased:
            self._leased[running.ticket_id] = running.block_ids[: running.num_leased]

    def release(self, ticket_id: bytes, running: Running | None) -> None:
        """End the leases of a ticket. A job that still runs continues without an importer."""
        self.pool.end_lease(self._leased.pop(ticket_id, ()))
        if running is not None:
            self.pool.end_lease(running.block_ids[: running.num_leased])
            running.num_leased = 0
            running.has_importer = False

    def lease_prefix(self, command: LeasePrefix) -> PrefixLeased:
        assert command.ticket_id not in self._leased, f"ticket {command.ticket_id.hex()} used twice"
        block_ids = self.pool.find(command.block_hashes)
        if len(block_ids) < command.min_blocks:
            return PrefixLeased(command.ticket_id, ())
        self._leased[command.ticket_id] = block_ids
        self.pool.lease_found(block_ids)
        return PrefixLeased(command.ticket_id, block_ids, self.pool.unverified_among(block_ids))

    def lease_for_copy(self, ticket_id: bytes, block_hashes: Sequence[bytes], first: int) -> LeasedForCopy:
        """Lease the cached blocks of this chain from index `first` on, for a tier to copy them."""
        block_ids = self._leased[ticket_id] = self.pool.find(block_hashes)[first:]
        self.pool.lease_copied(block_ids)
        return LeasedForCopy(ticket_id, block_ids, self.pool.unverified_among(block_ids))

    def reserve_pull(self, command: ReservePull, *, num_to_leave: int) -> PullReserved:
        granted = self.pulled.reserve(command.pull_id, command.block_hashes, num_to_leave=num_to_leave)
        if granted is None:
            return PullReserved(command.pull_id, None, 0)
        block_ids, num_cached = granted
        return PullReserved(command.pull_id, block_ids, num_cached)

    def holders(self) -> Iterator[str]:
        """The names of all holders of blocks besides jobs: ended tickets, pulls, and hand-offs with quarantined
        blocks."""
        yield from map(holders.ticket, self._leased)
        yield from map(holders.hand_off, self.pulled.pull_ids)
        yield from map(holders.hand_off, self.pool.quarantined_for)

    def check(self, jobs: Iterable[Running]) -> None:
        """Raises AssertionError when the pool disagrees with its holders. `jobs`: all that run."""
        self.pool.check()
        references = [0] * self.pool.num_blocks
        leases = Counter(block_id for block_ids in self._leased.values() for block_id in block_ids)
        for running in jobs:
            leases.update(running.block_ids[: running.num_leased])
            for block_id in running.block_ids:
                references[block_id] += 1
        for block_id in self.pulled.block_ids:
            references[block_id] += 1
        self.pool.check_references(references)
        self.pool.check_leases(leases)

    def _keep(self, running: Running, num_sealed: int) -> None:
        chain, first, running.num_kept = running.chain, running.num_kept, num_sealed
        self.pool.keep(running.block_ids[first:num_sealed], chain.hashes[first:num_sealed], chain.parent_of(first))


class PulledBlocks:
    """The blocks that pulls fill, until they enter the prefix cache or are released.

    A pull gets all its blocks at once or none: it may speed up a prompt, and must never delay another one.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pulls: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def pull_ids(self) -> Iterable[int]:
        return self._pulls.keys()

    @property
    def block_ids(self) -> list[int]:
        return [block_id for block_ids in self._pulls.values() for block_id in block_ids]

    def reserve(
        self, pull_id: int, block_hashes: Sequence[bytes], *, num_to_leave: int
    ) -> tuple[tuple[int, ...], int] | None:
        """Return the blocks, and how many leading ones hold their content already. None: fewer than `num_to_leave`
        blocks would stay available."""
        assert pull_id not in self._pulls, f"pull {pull_id} reserves twice"
        found = self._pool.find(block_hashes)
        num_fresh = len(block_hashes) - len(found)
        if self._pool.num_available_beside(found) - num_fresh < num_to_leave:
            return None
        block_ids = self._pool.reserve_beside(found, num_fresh)
        assert block_ids is not None
        self._pulls[pull_id] = block_ids
        return block_ids, len(found)

    def admit(self, command: AdmitPull) -> None:
        """Add the blocks of a pull to the prefix cache, as far as they were filled, and release the rest."""
        block_ids = self._pulls.pop(command.pull_id)
        self._pool.mark_unverified(command.unverified)
        self._pool.keep(block_ids, command.block_hashes, command.root)
        self._pool.release(block_ids)

    def discard(self, pull_id: int, quarantined: frozenset[int]) -> None:
        """Release the blocks of a failed pull. No effect for a pull that was admitted or never got blocks."""
        block_ids = self._pulls.pop(pull_id, ())
        foreign = quarantined - set(block_ids)
        assert not foreign, f"pull {pull_id} quarantines {sorted(foreign)}, which it does not hold"
        self._pool.quarantine(sorted(quarantined), pull_id)
        self._pool.release([block_id for block_id in block_ids if block_id not in quarantined])


class CacheEventSubscribers:
    """Subscribers that wait for the next cache event. Each is answered once, with all changes since its last answer."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._since: dict[int, int | None] = {}  # by subscriber

    def add(self, command: AwaitCacheEvents) -> None:
        self._since[command.subscriber_id] = command.since

    def cancel(self, subscriber_id: int) -> None:
        """Remove a subscriber. Does nothing if it is not waiting."""
        self._since.pop(subscriber_id, None)

    def due(self) -> tuple[CacheEventsReady, ...]:
        """Answers for every subscriber for which there is an event. These no longer wait."""
        if not self._since:
            return ()
        number = self._pool.next_cache_event
        due = [(subscriber_id, since) for subscriber_id, since in self._since.items() if since != number]
        for subscriber_id, _ in due:
            del self._since[subscriber_id]
        return tuple(CacheEventsReady(subscriber_id, self._pool.cache_events(since)) for subscriber_id, since in due)
