"""Whose blocks are whose on a prefill worker: jobs that run, tickets that have ended, prefixes on their way. Pure.

Owns the block pool and what ended tickets have pinned of it. Blocks are leased as they are sealed when an importer will
come for them, and stay leased, whatever becomes of the job, until Release; they are kept for prompts that begin alike.
Owned by the prefill scheduler, which decides who gets them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from cluster import holders
from cluster.protocol.hashing import BlockChain
from engine.kv.block_pool import BlockPool
from engine.scheduling.schedule import blocks_for, sealed_blocks, tail_length
from prefill_worker.scheduling.commands import OfferPrefix, PrefixOffered, PullReserved, ReservePull, Sealed, Tail
from prefill_worker.scheduling.jobs import Running
from prefill_worker.scheduling.prefix_followers import PrefixFollowers
from prefill_worker.scheduling.pulled_blocks import PulledBlocks


class PromptBlocks:
    def __init__(self, num_blocks: int, block_size: int, prefix_eviction: str) -> None:
        self.pool = BlockPool(num_blocks, prefix_eviction)
        self.pulled = PulledBlocks(self.pool)
        self.followers = PrefixFollowers(self.pool)
        self._block_size = block_size
        self._leased: dict[bytes, tuple[int, ...]] = {}  # what ended tickets still have pinned

    @property
    def num_tickets(self) -> int:
        """That have ended and hold leases."""
        return len(self._leased)

    def has_leased(self, ticket_id: bytes) -> bool:
        return ticket_id in self._leased

    def reserve(self, chain: BlockChain, token_ids: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
        """(a prompt's blocks, how many of its first tokens they hold already). None: they cannot be had now."""
        chain.extend(token_ids)
        # At least the last token is computed: its logits are the answer. The block it is in stays this job's own.
        cached = self.pool.find(chain.hashes[: sealed_blocks(len(token_ids) - 1, self._block_size)])
        block_ids = self.pool.reserve_beside(cached, blocks_for(len(token_ids), self._block_size) - len(cached))
        return None if block_ids is None else (block_ids, len(cached) * self._block_size)

    def seal(self, running: Running) -> tuple[Sealed, ...]:
        """Blocks that are written for ever: kept for others with the same beginning, and offered to the importer."""
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
        """Of a prompt that is computed, with all before it sealed. None: it has none, or nobody will come for it."""
        num_valid = tail_length(len(running.job.token_ids), self._block_size)
        if not running.has_importer or not num_valid:
            return None
        tail = Tail(running.block_ids[-1], num_valid)
        self.pool.lease((tail.block_id,))
        running.num_leased += 1
        return tail

    def end(self, running: Running) -> None:
        """The computation is over: drops its references. What is leased stays so until Release."""
        self.pool.release(running.block_ids)
        if running.num_leased:
            self._leased[running.ticket_id] = running.block_ids[: running.num_leased]

    def release(self, ticket_id: bytes, running: Running | None) -> None:
        """Ends the leases of a ticket, which may still run: then it goes on without an importer."""
        self.pool.end_lease(self._leased.pop(ticket_id, ()))
        if running is not None:
            self.pool.end_lease(running.block_ids[: running.num_leased])
            running.num_leased = 0
            running.has_importer = False

    def offer_prefix(self, command: OfferPrefix) -> PrefixOffered:
        assert command.ticket_id not in self._leased, f"ticket {command.ticket_id.hex()} used twice"
        block_ids = self.pool.find(command.block_hashes)
        if len(block_ids) < command.min_blocks:
            return PrefixOffered(command.ticket_id, ())
        self._leased[command.ticket_id] = block_ids
        self.pool.lease_found(block_ids)
        return PrefixOffered(command.ticket_id, block_ids, self.pool.unverified_among(block_ids))

    def lend_prefix(self, ticket_id: bytes, block_hashes: Sequence[bytes], first: int) -> tuple[int, ...]:
        """To be copied out: those before the first that was not verified. Tiers keep no provenance, and files outlive
        this process."""
        found = self.pool.find(block_hashes)[first:]
        unverified = self.pool.unverified_among(found)
        num_verified = next((n for n, block_id in enumerate(found) if block_id in unverified), len(found))
        block_ids = self._leased[ticket_id] = found[:num_verified]
        self.pool.lease_copied(block_ids)
        return block_ids

    def reserve_pull(self, command: ReservePull, *, num_to_leave: int) -> PullReserved:
        granted = self.pulled.reserve(command.pull_id, command.block_hashes, num_to_leave=num_to_leave)
        if granted is None:
            return PullReserved(command.pull_id, None, 0)
        block_ids, num_cached = granted
        return PullReserved(command.pull_id, block_ids, num_cached)

    def holders(self) -> Iterator[str]:
        """Of blocks that no job holds: tickets that have ended, and prefixes on their way."""
        yield from map(holders.ticket, self._leased)
        yield from map(holders.hand_off, self.pulled.pull_ids)
        yield from map(holders.hand_off, self.pool.quarantined_for)

    def check(self, jobs: Iterable[Running]) -> None:
        """Raises AssertionError when the pool and `jobs`, all that run, disagree."""
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
