"""What the decode worker's event loop asks of its step thread, and what the step thread tells back. Pure values.

These two directions are the only meeting place of asyncio and the thread that owns the device and the block pool.
"""

from dataclasses import dataclass

from cluster.errors import TandemError
from cluster.messages import DecodeJob, Inspect, Inspected, MemberId, SampledToken


@dataclass(frozen=True, slots=True)
class Reserve:
    """Set blocks aside for one hand-off: all at once, in the policy's order, above the watermark. Answered by Reserved
    when they are there, or by Unreservable when they can never be. `block_hashes`: of the full blocks that come first;
    what is known by them is not moved. `job`: whose sequences will join, if any will."""

    handoff_id: int
    num_blocks: int
    block_hashes: tuple[bytes, ...] = ()
    job: DecodeJob | None = None


@dataclass(frozen=True, slots=True)
class Discard:
    """The hand-off is over and its sequences will not join: forget the reservation. Blocks that a reader may still
    write to go to quarantine instead of to the free ones."""

    handoff_id: int
    quarantined_block_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nobody can write to these quarantined blocks any more: free them."""

    block_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class AdmitImported:
    """The hand-off's blocks are verified and settled: its sequences join at the next step. The reservation becomes
    theirs: `sealed_block_ids` shared by all choices, then one tail block per choice (empty when the prompt ends on a
    block boundary). `first_tokens[i]` is what choice i goes on from; None where the choice ended with it."""

    handoff_id: int
    job: DecodeJob
    sealed_block_ids: tuple[int, ...]
    tail_block_ids: tuple[int, ...]
    first_tokens: tuple[int | None, ...]
    unverified: frozenset[int] = frozenset()  # of its blocks, those that were not verified


@dataclass(frozen=True, slots=True)
class AdmitLocal:
    """Prefill the job here. Its choices share the prompt's blocks. A sequence that has committed tokens goes on after
    them. Refused by Failed when the queue is full or it can never fit."""

    job: DecodeJob


@dataclass(frozen=True, slots=True)
class CancelSequences:
    """Free these within the step that is running. Unknown handles are ignored: they ended already."""

    router: MemberId
    handles: frozenset[int]


@dataclass(frozen=True, slots=True)
class Freeze:
    """Take a decoding sequence out of the batch and lease its blocks to this ticket, until Release. It keeps its place
    in every other way: it is live until it is cancelled, thawed, or past its deadline. Answered by Frozen, or by
    FreezeRefused when it does not decode here."""

    ticket_id: bytes
    router: MemberId
    handle: int


@dataclass(frozen=True, slots=True)
class Thaw:
    """Go on with a frozen sequence here, as `new_handle`. Answered by Thawed, or by ThawRefused when it is not frozen
    here."""

    router: MemberId
    handle: int
    new_handle: int


@dataclass(frozen=True, slots=True)
class Release:
    """No lease on the ticket's blocks is left, and none will come."""

    ticket_id: bytes


@dataclass(frozen=True, slots=True)
class OfferPrefix:
    """Lease the leading blocks of this chain that are here to a ticket, until Release. Answered by PrefixOffered."""

    ticket_id: bytes
    block_hashes: tuple[bytes, ...]
    min_blocks: int


Command = (
    Reserve
    | Discard
    | Quiet
    | AdmitImported
    | AdmitLocal
    | CancelSequences
    | Freeze
    | Thaw
    | OfferPrefix
    | Release
    | Inspect
)


@dataclass(frozen=True, slots=True)
class Reserved:
    """The first `num_cached` hold their content already."""

    handoff_id: int
    block_ids: tuple[int, ...]
    num_cached: int


@dataclass(frozen=True, slots=True)
class Unreservable:
    """More blocks than the pool could ever set aside."""

    handoff_id: int
    error: TandemError


@dataclass(frozen=True, slots=True)
class Started:
    """These joined the batch. `queue_s`: from AdmitImported or AdmitLocal to the first step that holds them.
    `num_cached`: tokens whose KV was here before them."""

    router: MemberId
    handles: tuple[int, ...]
    queue_s: float
    num_cached: int


@dataclass(frozen=True, slots=True)
class SequenceToken:
    """`index` counts the tokens of this choice's output from 0, committed ones and the imported first one included."""

    router: MemberId
    handle: int
    index: int
    token: SampledToken


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Every token of one engine step, over all routers."""

    step: int
    tokens: tuple[SequenceToken, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    router: MemberId
    handles: tuple[int, ...]
    error: TandemError


@dataclass(frozen=True, slots=True)
class Tail:
    """The last, partly filled block: unused positions zeroed, unchanged while it is leased."""

    block_id: int
    num_valid: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """Comes after the last token of the sequence. `token_ids`: those whose KV the blocks hold, which are all that it
    has but `last_token_id`, drawn last."""

    ticket_id: bytes
    request_id: str
    token_ids: tuple[int, ...]
    last_token_id: int
    num_output: int
    sealed_block_ids: tuple[int, ...]
    tail: Tail | None
    unverified: frozenset[int] = frozenset()  # of all these, those that came from elsewhere and were not verified


@dataclass(frozen=True, slots=True)
class FreezeRefused:
    ticket_id: bytes
    error: TandemError


@dataclass(frozen=True, slots=True)
class Thawed:
    router: MemberId
    handle: int  # the new one


@dataclass(frozen=True, slots=True)
class ThawRefused:
    router: MemberId
    handle: int  # the new one
    error: TandemError


@dataclass(frozen=True, slots=True)
class PrefixOffered:
    """Nothing is leased when fewer blocks than wanted are here."""

    ticket_id: bytes
    block_ids: tuple[int, ...]
    unverified: frozenset[int] = frozenset()


Event = (
    Reserved
    | Unreservable
    | Started
    | StepTokens
    | Failed
    | Frozen
    | FreezeRefused
    | Thawed
    | ThawRefused
    | PrefixOffered
    | Inspected
)
