"""The commands of the prefill worker's event loop to its step thread, and the events that come back. Pure values.

These two directions are the only meeting place of asyncio and the thread that owns the device and the block pool.
"""

from dataclasses import dataclass

from cluster.errors import TandemError
from cluster.messages import CacheEvents, PrefillJob, SampledToken
from engine.scheduling.commands import (
    Answer,
    Inspect,
    Inspected,
    Key,
    LeasePrefix,
    PrefixLeased,
    Question,
    Quiet,
    Release,
    Tail,
)


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a job. Answered by Accepted or Refused. `ticket_id` names it from here on."""

    ticket_id: bytes
    job: PrefillJob


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a job. Its sealed blocks stay leased until Release, its other blocks are free at once. Answered by Failed
    (reason cancelled) if it was still queued or running, by nothing if it had ended."""

    ticket_id: bytes


@dataclass(frozen=True, slots=True)
class FindPrefix(Question["PrefixFound"]):
    """Ask how many leading blocks of this chain are cached. Answered by PrefixFound."""

    question_id: int
    block_hashes: tuple[bytes, ...]

    @property
    def key(self) -> Key:
        return FindPrefix, self.question_id


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
class DiscardPull:
    """The pull failed: release its blocks. Blocks to which a read may still write are quarantined."""

    pull_id: int
    quarantined_block_ids: frozenset[int] = frozenset()


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


@dataclass(frozen=True, slots=True)
class Leave:
    """Refuse new jobs and jobs that have no blocks yet, with Draining."""


Command = (
    Submit
    | Cancel
    | Leave
    | Release
    | FindPrefix
    | LeasePrefix
    | LeaseForCopy
    | ReservePull
    | AdmitPull
    | DiscardPull
    | Quiet
    | AwaitCacheEvents
    | CancelCacheEvents
    | Inspect
)


@dataclass(frozen=True, slots=True)
class Accepted:
    ticket_id: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The job was refused: the queue is full, the worker drains, or the prompt can never fit."""

    ticket_id: bytes
    error: TandemError


@dataclass(frozen=True, slots=True)
class Sealed:
    """Blocks that were sealed, in the ticket's order. Only for jobs with an importer."""

    ticket_id: bytes
    first_index: int
    block_ids: tuple[int, ...]
    unverified: frozenset[int] = frozenset()  # of these, those that came from elsewhere and were not verified


@dataclass(frozen=True, slots=True)
class Finished:
    """The prompt is computed. Comes after its last Sealed. Durations by the step thread's clock."""

    ticket_id: bytes
    tokens: tuple[SampledToken, ...]  # one per choice
    tail: Tail | None
    num_cached: int  # tokens that were found in the prefix cache and not computed
    queue_s: float
    prefill_s: float
    ended_s: float  # when its last step ended


@dataclass(frozen=True, slots=True)
class Failed:
    ticket_id: bytes
    error: TandemError


@dataclass(frozen=True, slots=True)
class PrefixFound(Answer):
    question_id: int
    num_blocks: int

    @property
    def key(self) -> Key:
        return FindPrefix, self.question_id


@dataclass(frozen=True, slots=True)
class CacheEventsReady(Answer):
    subscriber_id: int
    events: CacheEvents

    @property
    def key(self) -> Key:
        return AwaitCacheEvents, self.subscriber_id


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
    """The first `num_cached` blocks hold their content already. `block_ids` is None: too few blocks are available."""

    pull_id: int
    block_ids: tuple[int, ...] | None
    num_cached: int

    @property
    def key(self) -> Key:
        return ReservePull, self.pull_id


Event = (
    Accepted
    | Refused
    | Sealed
    | Finished
    | Failed
    | PrefixFound
    | PrefixLeased
    | LeasedForCopy
    | PullReserved
    | CacheEventsReady
    | Inspected
)
