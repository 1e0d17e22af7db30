"""What an importer's machine remembers of one hand-off. Pure values; `import_machine` has the moves.

Places number a hand-off's blocks: the prompt's full blocks in order, then one tail per choice.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.errors import HandOffReason
from cluster.messages import Epoch
from kvtransfer.protocol.handoff import Finished, RemoteBlock
from kvtransfer.protocol.import_events import FallBackReason


class ImportPhase(StrEnum):
    ATTACHING = "attaching"
    RESERVING = "reserving"
    PULLING = "pulling"
    SETTLING = "settling"
    DRAINING = "draining"
    ADMITTED = "admitted"
    ENDED = "ended"


MOVES = {
    ImportPhase.ATTACHING: {ImportPhase.RESERVING, ImportPhase.DRAINING},
    ImportPhase.RESERVING: {ImportPhase.PULLING, ImportPhase.DRAINING},
    ImportPhase.PULLING: {ImportPhase.SETTLING, ImportPhase.DRAINING},
    ImportPhase.SETTLING: {ImportPhase.ADMITTED, ImportPhase.DRAINING},
    ImportPhase.DRAINING: {ImportPhase.ENDED},
    ImportPhase.ADMITTED: set[ImportPhase](),
    ImportPhase.ENDED: set[ImportPhase](),
}
NEVER_S = float("inf")
ANSWERED = (ImportPhase.DRAINING, ImportPhase.ADMITTED, ImportPhase.ENDED)  # the request has its answer


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """What the request itself says about the KV it is to receive, and how long each wait may take."""

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
    verifies_all: bool = True  # --kv-verify all: takes no block that a worker before took without verifying it

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
class Import:
    """One attempt. Sets of places are frozensets; `offered` has a hole for what was not announced yet."""

    plan: ImportPlan
    deadline_s: float  # of the hand-off as a whole; in DRAINING: of the wait for quiet
    phase: ImportPhase = ImportPhase.ATTACHING
    wait_until_s: float | None = None  # ATTACHING: for Accepted; SETTLING: for Settled
    lease_s: float = 0.0  # as the exporter told
    renew_at_s: float | None = None
    offered: tuple[RemoteBlock | None, ...] = ()  # by place
    finished: Finished | None = None
    num_asked: int = 0  # blocks asked of the pool
    local_block_ids: tuple[int, ...] = ()  # by place
    num_cached: int = 0  # leading blocks that the pool had already
    num_needless: int = 0  # tails of choices that ended
    unverified: frozenset[int] = frozenset()  # places that are taken as they come
    complete: frozenset[int] = frozenset()
    pulled_again: frozenset[int] = frozenset()
    reading: Reading | None = None
    is_held: bool = False  # no read begins: more was said in the same moment, and is heard next
    num_reads: int = 0
    is_connected: bool = True  # the call stands, and Settle has not been sent on it
    num_ways_left: int = 0  # transports that were offered and not tried
    is_destroying: bool = False
    broken: FallBackReason | None = None  # why the channel is being destroyed, when another way is to follow
    failure: HandOffReason | None = None
    history: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_over(self) -> bool:
        """Nothing more will happen: forget it."""
        return self.phase in (ImportPhase.ADMITTED, ImportPhase.ENDED)

    @property
    def next_deadline_s(self) -> float | None:
        """When to Tick, at the latest. None: nothing is waited for, or (in DRAINING) the worker must restart."""
        if self.is_over:
            return None
        deadlines = [self.deadline_s, self.wait_until_s, self.renew_at_s]
        deadlines.append(self.reading.deadline_s if self.reading else None)
        return min(
            (deadline_s for deadline_s in deadlines if deadline_s is not None and deadline_s != NEVER_S), default=None
        )
