"""How an attempt fails: on which leg, through whom, by which named reason, and what the client hears if it was last.

Only failures that another attempt may cure become AttemptFailed; a request that is wrong stays wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import (
    DeadlineExceeded,
    Draining,
    HandOffFailed,
    HandOffReason,
    InternalError,
    InvalidRequest,
    QueueFull,
    TandemError,
    WorkerTooSmall,
)
from cluster.messages import MemberId
from router.request.choice import OutOfOrder

PREFILL, HANDOFF, DECODE = "prefill", "handoff", "decode"
FIRST_TOKEN_MISMATCH = "first_token_mismatch"
FIRST_TOKEN_COUNT = "first_token_count"  # the decode worker named more or fewer than it started
TOKEN_OUT_OF_ORDER = "token_out_of_order"
_DECODE_SIDE = frozenset({HandOffReason.NOT_ENOUGH_BLOCKS, HandOffReason.IMPORTER_LOST})
# Not a lapsed lease: whoever renewed it too late was stopped or busy itself.
_OF_PAIR = frozenset(
    {
        HandOffReason.EXPORTER_LOST,
        HandOffReason.READ_FAILED,
        HandOffReason.READ_TIMEOUT,
        HandOffReason.DIGEST_MISMATCH,
        HandOffReason.UNVERIFIABLE,
        HandOffReason.UNVERIFIED_PROVENANCE,
        HandOffReason.NO_COMMON_TRANSPORT,
        HandOffReason.NO_COMMON_PROTOCOL,
        HandOffReason.LAYOUT_MISMATCH,
        HandOffReason.PROTOCOL,
        HandOffReason.MALFORMED_MESSAGE,
    }
)
# The importer could not, or not from there: the exporter still has the blocks. If it is lost instead, it will be seen.
_LEAVES_TICKET = frozenset(
    {
        HandOffReason.NOT_ENOUGH_BLOCKS,
        HandOffReason.IMPORTER_LOST,
        HandOffReason.READ_FAILED,
        HandOffReason.READ_TIMEOUT,
        HandOffReason.DIGEST_MISMATCH,
        HandOffReason.UNVERIFIABLE,
        HandOffReason.NO_COMMON_TRANSPORT,
        HandOffReason.NO_COMMON_PROTOCOL,
        HandOffReason.LAYOUT_MISMATCH,
    }
)
_LACKS_TICKET = frozenset({HandOffReason.UNKNOWN_TICKET, HandOffReason.TICKET_EXPIRED})


class AttemptFailed(Exception):
    """`member` failed on `leg`; `error` is for the client if this was the last attempt."""

    def __init__(self, leg: str, member: MemberId, reason: str, error: TandemError) -> None:
        super().__init__(f"{leg} on {member}: {error.message}")
        self.leg = leg
        self.member = member
        self.reason = reason
        self.error = error

    @property
    def name(self) -> str:
        """As ledgers know it."""
        return f"{self.leg}_{self.reason}"

    @property
    def is_full_queue(self) -> bool:
        return isinstance(self.error, QueueFull)

    @property
    def is_leaving(self) -> bool:
        """`member` takes no new work: nothing was tried."""
        return isinstance(self.error, Draining)

    @property
    def is_too_small(self) -> bool:
        """`member` can never hold the request: nothing was tried."""
        return isinstance(self.error, WorkerTooSmall)

    @property
    def is_of_pair(self) -> bool:
        """What failed is between the two workers, unless one of them turns out to be lost."""
        return self.leg == HANDOFF and self.reason in _OF_PAIR

    @property
    def leaves_ticket(self) -> bool:
        """Of sequences that have not begun: another decode worker may still import what was prefilled for them."""
        if self.leg == HANDOFF:
            return self.reason in _LEAVES_TICKET
        return self.leg == DECODE and self.reason not in (FIRST_TOKEN_MISMATCH, FIRST_TOKEN_COUNT, TOKEN_OUT_OF_ORDER)

    @property
    def lacks_ticket(self) -> bool:
        """The exporter does not have it any more."""
        return self.leg == HANDOFF and self.reason in _LACKS_TICKET


@contextmanager
def leg(name: str, member: MemberId) -> Iterator[None]:
    """What goes wrong inside is the failure of this leg of the attempt."""
    try:
        yield
    except (InvalidRequest, DeadlineExceeded):
        raise
    except TandemError as error:
        raise AttemptFailed(name, member, error.reason, error) from error
    except OutOfOrder as error:
        raise AttemptFailed(name, member, TOKEN_OUT_OF_ORDER, InternalError(str(error))) from error


def failed_sequences(
    reason: str, detail: str, *, prefill: MemberId | None, decode: MemberId
) -> AttemptFailed | TandemError:
    """What a decode worker's SequenceFailed means. A hand-off has two sides: the reason says who is avoided next."""
    if reason in HandOffReason.__members__.values():
        handoff_reason = HandOffReason(reason)
        by_decode = prefill is None or handoff_reason in _DECODE_SIDE
        member = decode if by_decode or prefill is None else prefill
        return AttemptFailed(HANDOFF, member, reason, HandOffFailed(handoff_reason, detail))
    error = _kinds(TandemError).get(reason, InternalError)(detail)
    if isinstance(error, InvalidRequest | DeadlineExceeded):
        return error
    return AttemptFailed(DECODE, decode, error.reason, error)


def _kinds(base: type[TandemError]) -> dict[str, type[TandemError]]:
    """Every kind by its reason; HandOffFailed has reasons of its own."""
    kinds = {} if base is HandOffFailed else {base.reason: base}
    for kind in base.__subclasses__():
        kinds.update(_kinds(kind))
    return kinds
