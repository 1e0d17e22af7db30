"""Which failures leave a ticket for another decode worker, and how often a request is tried."""

import pytest

from cluster.clock import ManualClock
from cluster.errors import Draining, HandOffFailed, HandOffReason, InternalError, TandemError, WorkerLost
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from router.pipeline.failures import (
    DECODE,
    FIRST_TOKEN_COUNT,
    FIRST_TOKEN_MISMATCH,
    HANDOFF,
    PREFILL,
    TOKEN_OUT_OF_ORDER,
    AttemptFailed,
    failed_sequences,
)
from router.pipeline.setbacks import Setbacks
from router.request.ledger import LedgerRecorder

_EXPORTER, _IMPORTER = MemberId("prefill0", "a"), MemberId("decode0", "b")
_LOST = WorkerLost("it is lost")


class _Live:
    """As much of a live request as hears of a failure."""

    request_id = "r"

    def __init__(self) -> None:
        self.ledger = LedgerRecorder(ManualClock().now_s())

    def failed(self, reason: str, member: MemberId) -> None:
        self.ledger.reason(reason)


class _Fleet:
    def __init__(self) -> None:
        self.left: list[MemberId] = []
        self.doubted: list[MemberId] = []

    def leave(self, member: MemberId, grace_s: float) -> None:
        self.left.append(member)

    def doubt(self, member: MemberId) -> None:
        self.doubted.append(member)


def _setbacks(max_attempts: int, live: _Live | None = None, fleet: _Fleet | None = None) -> Setbacks:
    return Setbacks(
        live or _Live(),  # type: ignore[arg-type]  # a stand-in
        max_attempts=max_attempts,
        fleet=fleet or _Fleet(),  # type: ignore[arg-type]  # a stand-in
        telemetry=Telemetry(),
    )


def _failure(leg: str = DECODE, error: TandemError = _LOST, reason: str = "") -> AttemptFailed:
    return AttemptFailed(leg, _IMPORTER, reason or error.reason, error)


def _handoff(reason: HandOffReason) -> AttemptFailed:
    failure = failed_sequences(reason, "", prefill=_EXPORTER, decode=_IMPORTER)
    assert isinstance(failure, AttemptFailed) and failure.leg == HANDOFF
    return failure


@pytest.mark.parametrize(
    "failure",
    [
        _failure(),
        _failure(error=Draining("it leaves")),
        _handoff(HandOffReason.NOT_ENOUGH_BLOCKS),
        _handoff(HandOffReason.READ_FAILED),
        _handoff(HandOffReason.NO_COMMON_TRANSPORT),
    ],
    ids=str,
)
def test_an_importer_that_fails_leaves_the_ticket(failure: AttemptFailed) -> None:
    assert failure.leaves_ticket


@pytest.mark.parametrize(
    "failure",
    [
        _failure(PREFILL),
        _failure(error=InternalError("another token"), reason=FIRST_TOKEN_MISMATCH),
        _failure(error=InternalError("too few"), reason=FIRST_TOKEN_COUNT),
        _failure(error=InternalError("twice"), reason=TOKEN_OUT_OF_ORDER),
        _handoff(HandOffReason.LEASE_LAPSED),
        _handoff(HandOffReason.UNKNOWN_TICKET),
        _handoff(HandOffReason.EXPORTER_LOST),
        _handoff(HandOffReason.PREFILL_FAILED),
        _handoff(HandOffReason.PROMPT_MISMATCH),
    ],
    ids=str,
)
def test_what_only_another_prefill_cures_leaves_none(failure: AttemptFailed) -> None:
    assert not failure.leaves_ticket


def test_a_ticket_goes_on_only_while_the_last_resort_is_left() -> None:
    setbacks = _setbacks(max_attempts=3)
    assert setbacks.leave_two_tries(_failure())

    setbacks.note(_failure())

    assert not setbacks.leave_two_tries(_failure())
    assert setbacks.leave_two_tries(_failure(error=Draining("it leaves")))


def test_tries_end_at_the_most_that_are_allowed_and_begin_anew_once_decode_has_worked() -> None:
    setbacks = _setbacks(max_attempts=2)
    setbacks.note(_failure())
    assert setbacks.leaves_one_try and not setbacks.is_enough
    setbacks.forget()
    setbacks.note(_failure())
    setbacks.note(_failure())
    assert setbacks.is_enough


def test_an_importer_that_came_too_late_costs_no_try_more_than_the_one_before_it() -> None:
    setbacks = _setbacks(max_attempts=3)
    setbacks.note(_failure())
    assert _handoff(HandOffReason.UNKNOWN_TICKET).lacks_ticket
    setbacks.forgive()
    setbacks.note(_handoff(HandOffReason.UNKNOWN_TICKET))
    assert not setbacks.leaves_one_try


def test_a_worker_that_leaves_costs_no_try_and_the_fleet_hears_of_it() -> None:
    fleet = _Fleet()
    setbacks = _setbacks(max_attempts=1, fleet=fleet)
    setbacks.note(_failure(error=Draining("it leaves")))
    assert not setbacks.is_enough
    assert fleet.left == [_IMPORTER]


def test_a_failure_of_a_pair_is_named_in_the_ledger_and_its_exporter_doubted() -> None:
    live, fleet = _Live(), _Fleet()
    failure = AttemptFailed(HANDOFF, _EXPORTER, "read_failed", HandOffFailed(HandOffReason.READ_FAILED, ""))
    _setbacks(3, live, fleet).note(failure)
    assert live.ledger.reasons == ("handoff_read_failed",)
    assert fleet.doubted == [_EXPORTER]
