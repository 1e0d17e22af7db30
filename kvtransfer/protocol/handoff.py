"""The messages of a hand-off between importer and exporter, and the guards that keep it safe. Pure.

The two sides are state machines: `kvtransfer.protocol.export_machine` for one ticket with all its attempts, and
`kvtransfer.protocol.import_machine` for one attempt. Both are frozen values and a function

    advance(state, event, now_s) -> (state, actions)

that never waits, sends, reads or uses a clock. Drivers perform the actions in order and feed back the results as
events. A local event that the phase does not allow raises IllegalMove with the history; such a message from the peer
ends the hand-off with HandOffReason.PROTOCOL. Messages carry the epoch: those of another attempt are dropped, as are
duplicates, and nothing depends on the order in which messages arrive.

    importer                                         exporter
      Attach                              ->
                                          <-         Accepted | Refused
                                          <-         Sealed        as each chunk completes
      reserves once, reads as blocks are sealed
      Renew                               ->         every third of the lease, until it settles
                                          <-         Finished | ExportFailed
      verifies digests, count and prompt
      Settle{ok | unneeded | failed}      ->
                                          <-         Settled{the lease held throughout}
      delivers the blocks only now

`Guards` names every condition that keeps this safe, so that a test can remove each one and find the promise that
breaks.
"""

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cluster.errors import HandOffReason
from cluster.messages import NO_WAIT, Epoch, ExportWait
from kvtransfer.protocol.leases import LEASE_GUARDS, IllegalMove, LeaseGuards

_NUM_REMEMBERED = 32  # moves, for the history in an error message


class Outcome(StrEnum):
    OK = "ok"  # everything that was needed is there
    UNNEEDED = "unneeded"
    FAILED = "failed"


class RemoteBlock(NamedTuple):
    """A sealed block in the exporter's pool. Hand-offs have thousands, and a named tuple is made at half the price."""

    block_id: int
    digest: bytes  # empty: the exporter computes none
    is_unverified: bool = False  # the exporter did not verify it, or a block from which it computed this one


@dataclass(frozen=True, slots=True)
class FirstToken:
    token_id: int
    ended: bool  # nothing of this choice needs to be decoded


@dataclass(frozen=True, slots=True)
class Tail:
    """The last, partly filled block. It does not change any more, and its unused positions are zero."""

    block: RemoteBlock
    num_valid: int


@dataclass(frozen=True, slots=True)
class Attach:
    """The importer's request to read a ticket's blocks. The driver checks signature, expiry, addressee, layout and
    transports before it passes this to a machine."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Renew:
    epoch: Epoch
    wait: ExportWait = NO_WAIT  # of the importer; only drivers read it


@dataclass(frozen=True, slots=True)
class Settle:
    epoch: Epoch
    outcome: Outcome
    reason: HandOffReason | None = None


ImporterMessage = Attach | Renew | Settle


@dataclass(frozen=True, slots=True)
class Accepted:
    epoch: Epoch
    lease_s: float
    max_lease_s: float
    num_alternatives: int = 0  # number of further transports; the driver knows which


@dataclass(frozen=True, slots=True)
class Refused:
    epoch: Epoch
    reason: HandOffReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Sealed:
    epoch: Epoch
    first_index: int  # in the ticket's order
    blocks: tuple[RemoteBlock, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    epoch: Epoch
    first_tokens: tuple[FirstToken, ...]
    num_tokens: int
    prompt_hash: bytes
    tail: Tail | None


@dataclass(frozen=True, slots=True)
class ExportFailed:
    epoch: Epoch
    reason: HandOffReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    epoch: Epoch
    valid: bool


ExporterMessage = Accepted | Refused | Sealed | Finished | ExportFailed | Settled


@dataclass(frozen=True, slots=True)
class Guards:
    """Every condition that keeps a hand-off safe, by name; `leases` has those of leases.

    The defaults are the rules. Only tests pass other guards, one at a time."""

    # of both sides
    same_epoch: Callable[[Epoch, Epoch], bool]
    # of the importer
    whole_reservation: Callable[[int, int], int]  # (all blocks, offered so far) -> how many to reserve now
    exempt_as_drawn: Callable[[bool], bool]  # (drawn as one not to verify) -> is accepted without verification
    provenance_accepted: Callable[[bool, bool], bool]  # (never verified, this importer verifies) -> may be read
    same_digest: Callable[[bytes, bytes], bool]
    same_count: Callable[[int, int], bool]
    same_prompt: Callable[[bytes, bytes], bool]
    pulled_again_once: Callable[[int], bool]  # (times it was pulled again) -> once more?
    cached_left_alone: Callable[[int], int]  # (blocks that the pool shared) -> leading places that are never read into
    tail_needed: Callable[[bool], bool]  # (the choice ended with its first token) -> its tail is read
    all_complete: Callable[[int, int], bool]  # (places that need nothing more, all) -> may settle as ok
    delivered_when_valid: Callable[[bool], bool]  # (the exporter answered: valid) -> may deliver
    settled_when_quiet: Callable[[bool], bool]  # (a read is in flight) -> may settle
    quarantined_in_flight: Callable[[frozenset[int]], frozenset[int]]  # destinations -> those that may not be used yet
    proof_of_quiet: Callable[[bool], bool]  # (the read completed) -> nothing more is written
    quiet_before_fallback: Callable[[bool], bool]  # (the channel is destroyed) -> may read by another one
    waits_have_deadlines: Callable[[float, float], bool]  # (deadline, now) -> the wait is over
    # of the exporter
    leases: LeaseGuards


GUARDS = Guards(
    same_epoch=lambda ours, theirs: ours == theirs,
    whole_reservation=lambda num_blocks, num_offered: num_blocks,
    exempt_as_drawn=lambda is_unverified: is_unverified,
    provenance_accepted=lambda is_unverified, verifies: not (is_unverified and verifies),
    same_digest=hmac.compare_digest,  # in a time that does not tell where they differ
    same_count=lambda expected, found: expected == found,
    same_prompt=lambda expected, found: expected == found,
    pulled_again_once=lambda num_times: num_times < 1,
    cached_left_alone=lambda num_cached: num_cached,
    tail_needed=lambda has_ended: not has_ended,
    all_complete=lambda num_complete, num_blocks: num_complete == num_blocks,
    delivered_when_valid=lambda valid: valid,
    settled_when_quiet=lambda is_reading: not is_reading,
    quarantined_in_flight=lambda destinations: destinations,
    proof_of_quiet=lambda completed: completed,
    quiet_before_fallback=lambda destroyed: destroyed,
    waits_have_deadlines=lambda deadline_s, now_s: now_s >= deadline_s,
    leases=LEASE_GUARDS,
)


def remembered(history: tuple[str, ...], entry: str) -> tuple[str, ...]:
    """Return the history with one more entry; it is bounded."""
    return (*history[1 - _NUM_REMEMBERED :], entry)


def illegal(history: Sequence[str], what: str) -> IllegalMove:
    return IllegalMove(f"{what} after {' > '.join(history) or 'nothing'}")
