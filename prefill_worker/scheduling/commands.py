"""What the prefill worker's event loop asks of its step thread, and what the step thread tells back. Pure values.

These two directions are the only meeting place of asyncio and the thread that owns the device and the block pool.
"""

from dataclasses import dataclass

from cluster.errors import TandemError
from cluster.messages import Inspect, Inspected, PrefillJob, PrefixNews, SampledToken


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a job. Answered by Accepted or Refused. `ticket_id` names it from here on."""

    ticket_id: bytes
    job: PrefillJob


@dataclass(frozen=True, slots=True)
class Cancel:
    """Compute no more of it. What was sealed stays leased until Release; the rest is free at once. Answered by Failed
    (reason cancelled) if it was still queued or running, by nothing if it had ended."""

    ticket_id: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """No lease on the ticket's blocks is left, and none will come: free them."""

    ticket_id: bytes


@dataclass(frozen=True, slots=True)
class FindPrefix:
    """How many leading blocks of this chain are here? Answered by PrefixFound."""

    question_id: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class OfferPrefix:
    """Lease the leading blocks of this chain that are here to a ticket, until Release. Answered by PrefixOffered."""

    ticket_id: bytes
    block_hashes: tuple[bytes, ...]
    min_blocks: int


@dataclass(frozen=True, slots=True)
class LendPrefix:
    """Lease the leading blocks of this chain that are here, from the one of index `first` on, while they are copied.
    Answered by PrefixLent; until Release."""

    ticket_id: bytes
    block_hashes: tuple[bytes, ...]
    first: int


@dataclass(frozen=True, slots=True)
class ReservePull:
    """Set blocks aside for a prefix that another worker has: now, or not at all. Answered by PullReserved."""

    pull_id: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AdmitPull:
    """Its blocks are verified and settled: whoever begins like this finds them from now on."""

    pull_id: int
    root: bytes
    block_hashes: tuple[bytes, ...]
    unverified: frozenset[int] = frozenset()  # of its blocks, those that were not verified


@dataclass(frozen=True, slots=True)
class DiscardPull:
    """It failed: forget its blocks. Those that a reader may still write to go to quarantine."""

    pull_id: int
    quarantined_block_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nobody can write to these quarantined blocks any more: free them."""

    block_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class FollowPrefixes:
    """What changes in the prefix cache from this event on? None: what is in it? Answered once, by PrefixesTold, as soon
    as there is something to tell."""

    follower_id: int
    since: int | None


@dataclass(frozen=True, slots=True)
class UnfollowPrefixes:
    """It does not wait for its answer any more."""

    follower_id: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Take no new job, and give back those that hold nothing yet: both are refused with Draining."""


Command = (
    Submit
    | Cancel
    | Leave
    | Release
    | FindPrefix
    | OfferPrefix
    | LendPrefix
    | ReservePull
    | AdmitPull
    | DiscardPull
    | Quiet
    | FollowPrefixes
    | UnfollowPrefixes
    | Inspect
)


@dataclass(frozen=True, slots=True)
class Accepted:
    ticket_id: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The queue is full, or the prompt can never fit."""

    ticket_id: bytes
    error: TandemError


@dataclass(frozen=True, slots=True)
class Sealed:
    """Blocks that are written for ever, in the ticket's order. Only for jobs with an importer."""

    ticket_id: bytes
    first_index: int
    block_ids: tuple[int, ...]
    unverified: frozenset[int] = frozenset()  # of these, those that came from elsewhere and were not verified


@dataclass(frozen=True, slots=True)
class Tail:
    """The last, partly filled block: frozen, unused positions zeroed."""

    block_id: int
    num_valid: int


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
class PrefixFound:
    question_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixesTold:
    follower_id: int
    news: PrefixNews


@dataclass(frozen=True, slots=True)
class PrefixOffered:
    """Nothing is leased when fewer blocks than wanted are here."""

    ticket_id: bytes
    block_ids: tuple[int, ...]
    unverified: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PrefixLent:
    ticket_id: bytes
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PullReserved:
    """The first `num_cached` hold their content already. None: there is no room."""

    pull_id: int
    block_ids: tuple[int, ...] | None
    num_cached: int


Event = (
    Accepted
    | Refused
    | Sealed
    | Finished
    | Failed
    | PrefixFound
    | PrefixOffered
    | PrefixLent
    | PullReserved
    | PrefixesTold
    | Inspected
)
