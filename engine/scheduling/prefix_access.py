"""Answers the commands that concern the prefix cache. Pure. Owned by the scheduler."""

from collections.abc import Callable

from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.reservations import Reservations
from engine.scheduling.cache_commands import (
    AdmitPull,
    AwaitCacheEvents,
    CacheAnswer,
    CacheCommand,
    CacheEventsReady,
    CancelCacheEvents,
    FindPrefix,
    LeasedForCopy,
    LeaseForCopy,
    LeasePrefix,
    PrefixFound,
    PrefixLeased,
    PullReserved,
    ReservePull,
)
from engine.scheduling.exports import TicketLeases


class PrefixAccess:
    """`num_to_leave` returns how many blocks a pull must leave for work that waits."""

    def __init__(
        self, pool: BlockPool, *, leases: TicketLeases, reservations: Reservations, num_to_leave: Callable[[], int]
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._reservations = reservations
        self._num_to_leave = num_to_leave
        self._subscribers = CacheEventSubscribers(pool)

    def apply(self, command: CacheCommand) -> tuple[CacheAnswer, ...]:
        match command:
            case FindPrefix(question_id, block_hashes):
                return (PrefixFound(question_id, len(self._pool.find(block_hashes))),)
            case LeasePrefix(ticket_id, block_hashes, min_blocks):
                leased = self._leases.lease_prefix(ticket_id, block_hashes, min_blocks)
                return (PrefixLeased(ticket_id, leased, self._leases.unverified(ticket_id)),)
            case LeaseForCopy(ticket_id, block_hashes, first):
                leased = self._leases.lease_for_copy(ticket_id, block_hashes, first)
                return (LeasedForCopy(ticket_id, leased, self._leases.unverified(ticket_id)),)
            case ReservePull():
                return (self._reserve_pull(command),)
            case AdmitPull():
                self._admit_pull(command)
            case AwaitCacheEvents():
                self._subscribers.add(command)
            case CancelCacheEvents(subscriber_id):
                self._subscribers.cancel(subscriber_id)
        return ()

    def due(self) -> tuple[CacheEventsReady, ...]:
        """Return the answers to subscribers for which there are events."""
        return self._subscribers.due()

    def _reserve_pull(self, command: ReservePull) -> PullReserved:
        granted = self._reservations.reserve_pull(
            command.pull_id, command.block_hashes, num_to_leave=self._num_to_leave()
        )
        if granted is None:
            return PullReserved(command.pull_id, None, 0)
        block_ids, num_cached = granted
        return PullReserved(command.pull_id, block_ids, num_cached)

    def _admit_pull(self, command: AdmitPull) -> None:
        """Add the blocks of a pull to the prefix cache, as far as they were filled, and release the rest."""
        block_ids = self._reservations.pop_pull(command.pull_id)
        self._pool.mark_unverified(command.unverified)
        self._pool.keep(block_ids, command.block_hashes, command.root)
        self._pool.drop_references(block_ids)


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
