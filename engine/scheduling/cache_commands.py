"""The commands that concern the prefix cache, and their answers: finding and leasing cached blocks, filling blocks from
elsewhere, and following the content of the cache. Pure values.
"""

from dataclasses import dataclass

from cluster.messages import CacheEvents
from engine.scheduling.step import Answer, Key, Question


@dataclass(frozen=True, slots=True)
class FindPrefix(Question["PrefixFound"]):
    """Ask how many leading blocks of this chain are cached. Answered by PrefixFound."""

    question_id: int
    block_hashes: tuple[bytes, ...]

    @property
    def key(self) -> Key:
        return FindPrefix, self.question_id


@dataclass(frozen=True, slots=True)
class LeasePrefix(Question["PrefixLeased"]):
    """Lease the cached leading blocks of this chain to a ticket until Release."""

    ticket_id: bytes
    block_hashes: tuple[bytes, ...]
    min_blocks: int

    @property
    def key(self) -> Key:
        return LeasePrefix, self.ticket_id


@dataclass(frozen=True, slots=True)
class LeaseForCopy(Question["LeasedForCopy"]):
    """Lease the cached leading blocks of this chain, from index `first` on, to a ticket until Release, while they are
    copied to a tier. It does not count as a use of them. Answered by LeasedForCopy."""

    ticket_id: bytes
    block_hashes: tuple[bytes, ...]
    first: int

    @property
    def key(self) -> Key:
        return LeaseForCopy, self.ticket_id


@dataclass(frozen=True, slots=True)
class ReservePull(Question["PullReserved"]):
    """Reserve blocks at once, or not at all, for a prefix that comes from another worker or a tier. Answered by
    PullReserved."""

    pull_id: int
    block_hashes: tuple[bytes, ...]

    @property
    def key(self) -> Key:
        return ReservePull, self.pull_id


@dataclass(frozen=True, slots=True)
class AdmitPull:
    """The blocks of a pull hold their content: add them to the prefix cache."""

    pull_id: int
    root: bytes
    block_hashes: tuple[bytes, ...]
    unverified: frozenset[int] = frozenset()  # of its blocks, those whose digests were not verified


@dataclass(frozen=True, slots=True)
class AwaitCacheEvents(Question["CacheEventsReady"]):
    """Ask for the changes of the prefix cache from event `since` on; None: for its whole content. Answered once, by
    CacheEventsReady, as soon as there is at least one."""

    subscriber_id: int
    since: int | None

    @property
    def key(self) -> Key:
        return AwaitCacheEvents, self.subscriber_id


@dataclass(frozen=True, slots=True)
class CancelCacheEvents:
    """Drop a subscriber's pending AwaitCacheEvents."""

    subscriber_id: int


CacheCommand = FindPrefix | LeasePrefix | LeaseForCopy | ReservePull | AdmitPull | AwaitCacheEvents | CancelCacheEvents


@dataclass(frozen=True, slots=True)
class PrefixFound(Answer):
    question_id: int
    num_blocks: int

    @property
    def key(self) -> Key:
        return FindPrefix, self.question_id


@dataclass(frozen=True, slots=True)
class PrefixLeased(Answer):
    """The leased blocks; none if fewer than `min_blocks` are cached."""

    ticket_id: bytes
    block_ids: tuple[int, ...]
    unverified: frozenset[int] = frozenset()  # of these, the blocks that came from another worker and were not verified

    @property
    def key(self) -> Key:
        return LeasePrefix, self.ticket_id


@dataclass(frozen=True, slots=True)
class LeasedForCopy(Answer):
    ticket_id: bytes
    block_ids: tuple[int, ...]
    unverified: frozenset[int] = frozenset()  # of these, blocks that came from another worker and were not verified

    @property
    def key(self) -> Key:
        return LeaseForCopy, self.ticket_id


@dataclass(frozen=True, slots=True)
class PullReserved(Answer):
    """The blocks of a pull. The first `num_cached` hold their content already. `block_ids` is None: too few blocks are
    available.
    """

    pull_id: int
    block_ids: tuple[int, ...] | None
    num_cached: int

    @property
    def key(self) -> Key:
        return ReservePull, self.pull_id


@dataclass(frozen=True, slots=True)
class CacheEventsReady(Answer):
    subscriber_id: int
    events: CacheEvents

    @property
    def key(self) -> Key:
        return AwaitCacheEvents, self.subscriber_id


CacheAnswer = PrefixFound | PrefixLeased | LeasedForCopy | PullReserved | CacheEventsReady
