"""The failure of an attempt, by leg, worker and named reason, and the number of retries that a request has left.

Only a failure that another attempt may avoid becomes AttemptFailed. An invalid request stays an error of the client.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

from cluster.errors import (
    AllWorkersSilent,
    DeadlineExceeded,
    Draining,
    HandOffFailed,
    HandOffReason,
    InvalidRequest,
    QueueFull,
    TandemError,
    Unavailable,
    WorkerLost,
    WorkerTooSmall,
    WrongTokens,
)
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from cluster.service_times import bounded_retry_s
from router.fleet.fleet import Fleet
from router.policies.placement import Placement
from router.request.admitted_request import AdmittedRequest
from router.request.choice import Choice, OutOfOrder

PREFILL, HANDOFF, DECODE = "prefill", "handoff", "decode"
FIRST_TOKEN_MISMATCH = "first_token_mismatch"
FIRST_TOKEN_COUNT = "first_token_count"  # the decode worker named more or fewer than it started
TOKEN_OUT_OF_ORDER = "token_out_of_order"
_CALLED_OFF = "hedge_called_off"  # the suspect worker had the next token first
_DECODE_SIDE = frozenset({HandOffReason.NOT_ENOUGH_BLOCKS, HandOffReason.IMPORTER_LOST})
# A lapsed lease is not among them: the importer that renewed it too late was stopped or busy itself.
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
# The importer failed, or could not read from this exporter: the exporter still has the blocks, unless it is lost.
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
    """An attempt failed because `member` failed on `leg`. The client receives `error` if this was the last attempt."""

    def __init__(self, leg: str, member: MemberId, reason: str, error: TandemError) -> None:
        super().__init__(f"{leg} on {member}: {error.message}")
        self.leg = leg
        self.member = member
        self.reason = reason
        self.error = error

    @property
    def name(self) -> str:
        """Return the reason as the ledger lists it."""
        return f"{self.leg}_{self.reason}"

    @property
    def is_full_queue(self) -> bool:
        return isinstance(self.error, QueueFull)

    @property
    def is_leaving(self) -> bool:
        """Return whether `member` drains: it refused the work, or ended before the work did."""
        return isinstance(self.error, Draining)

    @property
    def is_too_small(self) -> bool:
        """Return whether `member` can never hold the request and refused it."""
        return isinstance(self.error, WorkerTooSmall)

    @property
    def is_of_pair(self) -> bool:
        """Return whether the link between the two workers failed, provided that both are alive."""
        return self.leg == HANDOFF and self.reason in _OF_PAIR

    @property
    def leaves_ticket(self) -> bool:
        """Return whether another decode worker may still import the prefilled KV. True only for sequences that have not
        started.
        """
        if self.leg == HANDOFF:
            return self.reason in _LEAVES_TICKET
        return self.leg == DECODE and self.reason not in (FIRST_TOKEN_MISMATCH, FIRST_TOKEN_COUNT, TOKEN_OUT_OF_ORDER)

    @property
    def lacks_ticket(self) -> bool:
        """Return whether the exporter no longer has the ticket."""
        return self.leg == HANDOFF and self.reason in _LACKS_TICKET


class leg:  # a generator would cost each request four times as much
    """Convert errors inside the `with` block to the failure of this leg."""

    def __init__(self, name: str, member: MemberId) -> None:
        self._name, self._member = name, member

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_known = isinstance(error, TandemError | OutOfOrder)
        if is_known and (failure := failure_of(self._name, self._member, error)) is not None:
            raise failure from error


def failure_of(name: str, member: MemberId, error: BaseException | None) -> AttemptFailed | None:
    """Return the failure of this leg that an error means; None if another attempt would not help."""
    match error:
        case AttemptFailed():
            return error
        case InvalidRequest() | DeadlineExceeded():
            return None
        case TandemError():
            return AttemptFailed(name, member, error.reason, error)
        case OutOfOrder():
            return AttemptFailed(name, member, TOKEN_OUT_OF_ORDER, WrongTokens(str(error)))
    return None


def failed_sequences(
    reason: str, detail: str, *, prefill: MemberId | None, decode: MemberId
) -> AttemptFailed | TandemError:
    """Convert a decode worker's SequenceFailed. A hand-off has two sides: the reason decides which worker is avoided
    next."""
    if reason in HandOffReason.__members__.values():
        handoff_reason = HandOffReason(reason)
        by_decode = prefill is None or handoff_reason in _DECODE_SIDE
        member = decode if by_decode or prefill is None else prefill
        return AttemptFailed(HANDOFF, member, reason, HandOffFailed(handoff_reason, detail))
    kind = _kinds(TandemError).get(reason)
    error = Unavailable(f"{reason}: {detail}") if kind is None else kind(detail)  # None: a newer version's reason
    if isinstance(error, InvalidRequest | DeadlineExceeded):
        return error
    return AttemptFailed(DECODE, decode, error.reason, error)


def _kinds(base: type[TandemError]) -> dict[str, type[TandemError]]:
    """Return every error class by its reason. HandOffFailed has reasons of its own."""
    kinds = {} if base is HandOffFailed else {base.reason: base}
    for kind in base.__subclasses__():
        kinds.update(_kinds(kind))
    return kinds


_LOG = logging.getLogger("tandem.router.retry_budget")
_ROOM_S = 1.0  # retry delay for a full worker whose answer has no retry delay
_PAUSE_S = 0.5  # before the attempts that were refunded: calls may fail at once although health checks pass


class RetryBudget:
    """The number of failed attempts in a row, for choices of one request that are attempted together.

    It also reports each failure to the request's ledger and explanation, the fleet, the metrics and the log. It never
    retries by itself.
    """

    def __init__(self, admitted: AdmittedRequest, *, max_attempts: int, fleet: Fleet, telemetry: Telemetry) -> None:
        """`max_attempts`: the maximum number of failed attempts in a row without a token from decode."""
        self._admitted = admitted
        self._max_attempts = max_attempts
        self._fleet = fleet
        self._telemetry = telemetry
        self._tries = 0
        self._last_cost = 0  # of the failure recorded last
        self._last_loss: MemberId | None = None  # its worker, if it is one of `_losses`
        self._losses = Counter[MemberId]()  # failures that were counted because this router lost the worker
        self._refunded = Counter[MemberId]()
        self._placement: Placement | None = None  # of the present attempt

    @contextmanager
    def attempting(self, placement: Placement) -> Iterator[None]:
        """Within the `with` block an attempt with this placement is made, and failures are its own."""
        self._placement = placement
        try:
            yield
        except asyncio.CancelledError:
            if self._admitted.execution.is_over:
                self.explain(_CALLED_OFF)
            raise

    def explain(self, reason: str) -> None:
        """Add why the present attempt ended, or did not continue at its workers, to the explanation of the request."""
        if self._placement is not None:
            self._admitted.account.placements.record_failure(self._placement, reason)

    @property
    def is_exhausted(self) -> bool:
        """Return whether no attempt is left."""
        return self._tries >= self._max_attempts

    @property
    def has_one_attempt_left(self) -> bool:
        return 0 < self._tries == self._max_attempts - 1

    def leaves_two_attempts_after(self, failure: AttemptFailed) -> bool:
        """Return whether two attempts are left after this failure. The last attempt makes no hand-off, so one more
        hand-off may be tried."""
        return self._tries + self._cost(failure) < self._max_attempts - 1

    def record_failure(self, failure: AttemptFailed) -> None:
        self._last_cost = self._cost(failure)
        self._tries += self._last_cost
        self._admitted.failed(failure.name, failure.member)
        self.explain(failure.name)
        self._telemetry.count("tandem_retries_total", leg=failure.leg, reason=failure.reason)
        self._last_loss = failure.member if self._last_cost and isinstance(failure.error, WorkerLost) else None
        if self._last_loss is not None:
            self._losses[self._last_loss] += 1
        if failure.is_leaving:
            self._fleet.mark_draining(failure.member, 0.0)
        if failure.is_too_small:
            self._admitted.too_small.add(failure.member)
        if failure.is_of_pair:
            self._fleet.suspect(failure.member)  # one of the two may be gone; if not, the pair is to blame
        fields = {"request_id": self._admitted.request_id, "reason": failure.name}
        level = logging.INFO if isinstance(failure.error, WorkerLost) else logging.WARNING  # the loss is a line itself
        _LOG.log(level, "the attempt failed: %s", failure, extra=fields)

    def record_hedge(self, name: str, failure: AttemptFailed | None) -> None:
        """Record that a hedge has taken over. `failure`: of the former execution; None if its worker was only
        suspect.
        """
        if failure is not None:
            self.record_failure(failure)
        self._admitted.account.add_reason(name)
        self.explain(name)

    def refund(self) -> None:
        """Count the failure that was recorded last and the one that it caused as one attempt."""
        self._tries -= self._last_cost
        self._last_cost = 0
        if self._last_loss is not None:
            self._losses[self._last_loss] -= 1
            self._last_loss = None

    def reset(self) -> None:
        """Count failures from zero again, because decode has worked."""
        self._tries = self._last_cost = 0
        self._last_loss = None
        self._losses.clear()
        self._refunded.clear()

    async def renew(self, failure: AttemptFailed, choices: Sequence[Choice]) -> None:
        """Return once another attempt may be made although none is left. Raises the error of the failure otherwise.

        A loss does not count if the worker has not died: then only the connection to it failed, and those of a router
        may fail one after the other. Failures count from zero again after the wait that a full worker has asked for, or
        once the workers change: a client that has tokens of these choices does not lose them to full queues, except
        where a suspected worker may still continue them.
        """
        if await self._refund_losses():
            return
        has_tokens = any(choice.num_committed for choice in choices)
        is_current = all(choice.execution is self._admitted.execution for choice in choices)
        if not (failure.is_full_queue and has_tokens and is_current):
            raise failure.error from failure
        retry_after_s = failure.error.retry_after_s
        await self._until_changed(bounded_retry_s(retry_after_s if retry_after_s is not None else _ROOM_S))
        self.reset()

    async def _refund_losses(self) -> bool:
        """Wait until a lost worker turns out to be alive or all are gone, and stop counting the losses of those alive,
        at most `max_attempts` of each: a request may be what stops a worker for a while. Returns whether there are any.
        """
        refundable = {
            member: min(number, self._max_attempts - self._refunded[member]) for member, number in self._losses.items()
        }
        lost = [member for member, number in refundable.items() if number]
        while peers := {member: peer for member in lost if (peer := self._fleet.peer(member)) is not None}:
            if alive := [member for member, peer in peers.items() if peer.is_reachable]:
                for member in alive:
                    del self._losses[member]
                    self._refunded[member] += refundable[member]
                    self._tries -= refundable[member]
                await self._until_changed(_PAUSE_S)
                return True
            await self._fleet.changed()
        return False

    async def _until_changed(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._fleet.changed()

    def _cost(self, failure: AttemptFailed) -> int:
        """Return how many attempts a failure costs: 0 for a worker that drains or is too small, which is not chosen
        again, and for a loss while no worker sends anything, because the next attempt cannot start before one answers.
        """
        is_free = failure.is_leaving or failure.is_too_small or isinstance(failure.error, AllWorkersSilent)
        return 0 if is_free else 1
