"""The state, events and actions of the importer's state machine for one hand-off. Pure values.

`import_machine` has the moves. Places number the blocks of a hand-off: the full blocks of the prompt in order, then one
tail per choice.

Events                                             meaning
    FromExporter(message, is_followed)             The exporter sent this message. If `is_followed`, the next message
                                                   comes at once, so that one read may serve both.
    Reserved(block_ids, num_cached, unverified)    The pool reserved these blocks. The first num_cached already have
                                                   their content; the places in `unverified` need no digest.
    Unreservable()                                 The pool can never reserve them.
    ReadCompleted(read_id, digests)                The blocks are written and visible to the device. `digests` are those
                                                   of the local copies, in order, empty where none was requested.
    OpenFailed(read_id, detail)                    There is no channel: nothing was written and nothing will be.
    ReadFailed(read_id, detail)                    The read failed. It may still write.
    ChannelDestroyed()                             Nothing can write any more.
    Cancel()                                       The request does not need the hand-off.
    CallEnded()                                    The stream to the exporter has ended.
    Tick()                                         A deadline may have passed; send one at `next_deadline_s`.
Actions                                            what the driver does
    Send(message)                                  Send Attach, Renew or Settle.
    Reserve(num_blocks)                            Ask the pool for blocks; the answer is an event.
    StartRead(read_id, remote, local, unverified)  Read. Open the channel first if there is none. Compute no digests of
                                                   the local blocks in `unverified`.
    DestroyChannel()                               Destroy the channel; ends in ChannelDestroyed.
    FallBack(reason)                               Use the next transport for the next read; the channel is gone.
    Discard(quarantined)                           Return the reserved blocks except `quarantined`. Given once, if
                                                   Reserve was given; Reserved may still arrive.
    ReleaseQuarantined(block_ids)                  These quarantined blocks are free of writers; return them.
    ReportFailure(reason, detail)                  Report the failure to the request. Given once; the machine continues
                                                   until ENDED.
    Deliver(sealed, tails, first_tokens)           Give the verified blocks to the request. Given once.
    ReportUnhealthy()                              The channel was not destroyed within `quarantine_s`.
    Close()                                        The last action: half-close the call after what was sent, and release
                                                   the channel unless it was destroyed.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.errors import HandOffReason
from cluster.messages import Epoch
from kvtransfer.protocol.frozen import changed
from kvtransfer.protocol.handoff import (
    ExporterMessage,
    Finished,
    FirstToken,
    ImporterMessage,
    RemoteBlock,
    illegal,
    remembered,
)

NEVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class FromExporter:
    message: ExporterMessage
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class Reserved:
    block_ids: tuple[int, ...]
    num_cached: int = 0
    unverified: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Unreservable:
    pass


@dataclass(frozen=True, slots=True)
class ReadCompleted:
    read_id: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class OpenFailed:
    read_id: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReadFailed:
    read_id: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ChannelDestroyed:
    pass


@dataclass(frozen=True, slots=True)
class Cancel:
    pass


@dataclass(frozen=True, slots=True)
class CallEnded:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    FromExporter
    | Reserved
    | Unreservable
    | ReadCompleted
    | OpenFailed
    | ReadFailed
    | ChannelDestroyed
    | Cancel
    | CallEnded
    | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    message: ImporterMessage


@dataclass(frozen=True, slots=True)
class Reserve:
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StartRead:
    read_id: int
    remote_block_ids: tuple[int, ...]
    local_block_ids: tuple[int, ...]
    unverified: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DestroyChannel:
    pass


class FallBackReason(StrEnum):
    """The reasons for which a hand-off switches to the next transport."""

    OPEN_FAILED = "open_failed"
    READ_FAILED = "read_failed"
    READ_TIMEOUT = "read_timeout"


@dataclass(frozen=True, slots=True)
class FallBack:
    reason: FallBackReason


@dataclass(frozen=True, slots=True)
class Discard:
    quarantined: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReleaseQuarantined:
    block_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReportFailure:
    reason: HandOffReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Deliver:
    sealed_block_ids: tuple[int, ...]
    tail_block_ids: tuple[int, ...]  # those of ended choices hold nothing
    first_tokens: tuple[FirstToken, ...]
    num_cached: int  # of the sealed ones, the pool's own
    num_read: int
    unverified_block_ids: frozenset[int] = frozenset()  # of those that were read; tails of ended choices may be among


@dataclass(frozen=True, slots=True)
class ReportUnhealthy:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    pass


Action = (
    Send
    | Reserve
    | StartRead
    | DestroyChannel
    | FallBack
    | Discard
    | ReleaseQuarantined
    | ReportFailure
    | Deliver
    | ReportUnhealthy
    | Close
)


class ImporterPhase(StrEnum):
    ATTACHING = "attaching"
    RESERVING = "reserving"
    PULLING = "pulling"
    SETTLING = "settling"
    DRAINING = "draining"
    DELIVERED = "delivered"
    ENDED = "ended"


MOVES = {
    ImporterPhase.ATTACHING: {ImporterPhase.RESERVING, ImporterPhase.DRAINING},
    ImporterPhase.RESERVING: {ImporterPhase.PULLING, ImporterPhase.DRAINING},
    ImporterPhase.PULLING: {ImporterPhase.SETTLING, ImporterPhase.DRAINING},
    ImporterPhase.SETTLING: {ImporterPhase.DELIVERED, ImporterPhase.DRAINING},
    ImporterPhase.DRAINING: {ImporterPhase.ENDED},
    ImporterPhase.DELIVERED: set[ImporterPhase](),
    ImporterPhase.ENDED: set[ImporterPhase](),
}
ANSWERED = (ImporterPhase.DRAINING, ImporterPhase.DELIVERED, ImporterPhase.ENDED)  # the request has its answer


@dataclass(frozen=True, slots=True)
class HandOffPlan:
    """The prompt that the request expects, and the timeouts of its hand-off."""

    epoch: Epoch
    num_sealed: int  # full blocks of the prompt
    num_choices: int
    num_tail_valid: int  # tokens in the partly filled last block; 0: there is none
    num_tokens: int
    prompt_hash: bytes
    attach_timeout_s: float  # for Accepted
    read_timeout_s: float  # for one read
    quarantine_s: float  # for a dead read to end by itself, then for the destruction of its channel
    timeout_s: float  # for the hand-off as a whole
    vocab_size: int = 1 << 31  # first tokens are below it
    verifies_all: bool = True  # --kv-verify all or keyed: takes no block that a worker before took without verifying it

    @property
    def num_blocks(self) -> int:
        return self.num_sealed + (self.num_choices if self.num_tail_valid else 0)


@dataclass(frozen=True, slots=True)
class Reading:
    """The read in flight."""

    read_id: int
    places: tuple[int, ...]
    deadline_s: float | None  # None: it is dead already


@dataclass(frozen=True, slots=True)
class ImporterState:
    """The state of one attempt. `offered` has None for each place that was not announced yet."""

    plan: HandOffPlan
    deadline_s: float  # of the hand-off as a whole; in DRAINING: of the wait for the end of the read
    phase: ImporterPhase = ImporterPhase.ATTACHING
    wait_until_s: float | None = None  # ATTACHING: for Accepted; SETTLING: for Settled
    lease_s: float = 0.0  # as the exporter announced
    renew_at_s: float | None = None
    offered: tuple[RemoteBlock | None, ...] = ()  # by place
    finished: Finished | None = None
    num_asked: int = 0  # blocks that were requested from the pool
    local_block_ids: tuple[int, ...] = ()  # by place
    num_cached: int = 0  # leading blocks that the pool had already
    num_needless: int = 0  # tails of choices that ended
    unverified: frozenset[int] = frozenset()  # places whose blocks are accepted without verification
    complete: frozenset[int] = frozenset()
    pulled_again: frozenset[int] = frozenset()
    reading: Reading | None = None
    is_held: bool = False  # no read begins: more messages of the same group follow at once
    num_reads: int = 0
    is_connected: bool = True  # the call to the exporter is open, and Settle has not been sent on it
    num_transports_left: int = 0  # accepted transports that were not tried yet
    is_destroying: bool = False
    broken: FallBackReason | None = None  # why the channel is being destroyed, if the next transport follows
    failure: HandOffReason | None = None
    history: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will happen, so that the state can be dropped."""
        return self.phase in (ImporterPhase.DELIVERED, ImporterPhase.ENDED)

    @property
    def is_announced(self) -> bool:
        """Return whether the exporter has announced a block or the end of the prefill, so that it computes."""
        return self.finished is not None or any(self.offered)

    @property
    def next_deadline_s(self) -> float | None:
        """Return the time of the next Tick, or None if nothing is waited for or (in DRAINING) the worker must
        restart."""
        if self.is_over:
            return None
        deadlines = [self.deadline_s, self.wait_until_s, self.renew_at_s]
        deadlines.append(self.reading.deadline_s if self.reading else None)
        return min(
            (deadline_s for deadline_s in deadlines if deadline_s is not None and deadline_s != NEVER_S), default=None
        )

    @property
    def missing_places(self) -> tuple[int, ...]:
        """Return the places that were offered and reserved but are not complete."""
        offered, complete = self.offered[: len(self.local_block_ids)], self.complete
        return tuple([place for place, block in enumerate(offered) if block and place not in complete])

    @property
    def unverified_block_ids(self) -> frozenset[int]:
        """Return the blocks that were read without verification, here or by a worker before. Cached blocks are not
        among them."""
        return frozenset(
            local
            for place, (block, local) in enumerate(zip(self.offered, self.local_block_ids, strict=True))
            if place >= self.num_cached and (place in self.unverified or (block is not None and block.is_unverified))
        )

    def to(self, phase: ImporterPhase) -> "ImporterState":
        """Return the state in another phase. Raises IllegalMove if MOVES does not allow the phase."""
        if phase not in MOVES[self.phase]:
            raise illegal(self.history, f"{self.phase} to {phase}")
        return changed(self, phase=phase)

    def after(self, event: Event) -> "ImporterState":
        """Return the state with the event in its history."""
        if isinstance(event, Tick):
            return self
        name = type(event.message).__name__ if isinstance(event, FromExporter) else type(event).__name__
        return changed(self, history=remembered(self.history, f"{name}:{self.phase}"))
