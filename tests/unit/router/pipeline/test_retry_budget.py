"""Tests which failures leave a ticket for another decode worker, and how many attempts a request has."""

import asyncio
from dataclasses import dataclass

import pytest

from cluster.clock import ManualClock
from cluster.errors import (
    AllWorkersSilent,
    Draining,
    HandOffFailed,
    HandOffReason,
    TandemError,
    WorkerLost,
    WrongTokens,
)
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
    RetryBudget,
    failed_sequences,
)
from router.policies.hedging import Execution
from router.policies.placement import Placement, PlacementReason
from router.request.account import RequestAccount
from router.running import ChangeSignal

_EXPORTER, _IMPORTER = MemberId("prefill0", "a"), MemberId("decode0", "b")
_LOST = WorkerLost("it is lost")


class _Live:
    """The part of a live request that records failures."""

    request_id = "r"

    def __init__(self) -> None:
        self.account = RequestAccount(Telemetry(), ManualClock().now_s())
        self.execution = Execution()

    def failed(self, reason: str, member: MemberId) -> None:
        self.account.add_reason(reason)


@dataclass
class _Peer:
    is_reachable: bool = True


class _Fleet:
    def __init__(self) -> None:
        self.draining: list[MemberId] = []
        self.suspected: list[MemberId] = []
        self.peers: dict[MemberId, _Peer] = {}
        self.changes = ChangeSignal()

    def peer(self, member: MemberId) -> "_Peer | None":
        return self.peers.get(member)

    async def changed(self) -> None:
        await self.changes.wait()

    def mark_draining(self, member: MemberId, grace_s: float) -> None:
        self.draining.append(member)

    def suspect(self, member: MemberId) -> None:
        self.suspected.append(member)


def _retry_budget(max_attempts: int, live: _Live | None = None, fleet: _Fleet | None = None) -> RetryBudget:
    return RetryBudget(
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
        _failure(error=WrongTokens("another token"), reason=FIRST_TOKEN_MISMATCH),
        _failure(error=WrongTokens("too few"), reason=FIRST_TOKEN_COUNT),
        _failure(error=WrongTokens("twice"), reason=TOKEN_OUT_OF_ORDER),
        _handoff(HandOffReason.LEASE_LAPSED),
        _handoff(HandOffReason.UNKNOWN_TICKET),
        _handoff(HandOffReason.EXPORTER_LOST),
        _handoff(HandOffReason.PREFILL_FAILED),
        _handoff(HandOffReason.PROMPT_MISMATCH),
    ],
    ids=str,
)
def test_a_failure_that_needs_another_prefill_leaves_no_ticket(failure: AttemptFailed) -> None:
    assert not failure.leaves_ticket


def test_a_ticket_is_reissued_only_while_an_attempt_without_hand_off_is_left() -> None:
    retry_budget = _retry_budget(max_attempts=3)
    assert retry_budget.leaves_two_attempts_after(_failure())

    retry_budget.record_failure(_failure())

    assert not retry_budget.leaves_two_attempts_after(_failure())
    assert retry_budget.leaves_two_attempts_after(_failure(error=Draining("it leaves")))


def test_the_placement_of_an_attempt_is_explained_with_what_ended_it() -> None:
    live = _Live()
    retry_budget = _retry_budget(3, live)
    first, second = (Placement(_EXPORTER, _IMPORTER, PlacementReason.TIE) for _ in range(2))
    for number, placement in enumerate((first, second)):
        live.account.placements.add(placement, float(number))
    with retry_budget.attempting(first):
        retry_budget.record_failure(_failure())
        retry_budget.explain("ticket_reissued")
    with retry_budget.attempting(second):
        retry_budget.record_hedge("decode_hedged", None)
    explained = [attempt.failure for attempt in live.account.placements.attempts]
    assert explained == ["decode_worker_lost, ticket_reissued", "decode_hedged"]


@pytest.mark.parametrize(("is_over", "explained"), [(True, "hedge_called_off"), (False, "")])
def test_a_cancelled_attempt_is_explained_only_as_a_hedge_that_was_called_off(is_over: bool, explained: str) -> None:
    live = _Live()
    placement = Placement(_EXPORTER, _IMPORTER, PlacementReason.TIE)
    live.account.placements.add(placement, 0.0)
    live.execution.is_over = is_over
    with pytest.raises(asyncio.CancelledError), _retry_budget(3, live).attempting(placement):
        raise asyncio.CancelledError
    assert [attempt.failure for attempt in live.account.placements.attempts] == [explained]


def test_attempts_are_bounded_and_counted_from_zero_once_decode_has_worked() -> None:
    retry_budget = _retry_budget(max_attempts=2)
    retry_budget.record_failure(_failure())
    assert retry_budget.has_one_attempt_left and not retry_budget.is_exhausted
    retry_budget.reset()
    retry_budget.record_failure(_failure())
    retry_budget.record_failure(_failure())
    assert retry_budget.is_exhausted


def test_an_importer_that_came_too_late_costs_no_further_attempt() -> None:
    retry_budget = _retry_budget(max_attempts=3)
    retry_budget.record_failure(_failure())
    assert _handoff(HandOffReason.UNKNOWN_TICKET).lacks_ticket
    retry_budget.refund()
    retry_budget.record_failure(_handoff(HandOffReason.UNKNOWN_TICKET))
    assert not retry_budget.has_one_attempt_left


def test_a_draining_worker_costs_no_attempt_and_is_marked_by_the_fleet() -> None:
    fleet = _Fleet()
    retry_budget = _retry_budget(max_attempts=1, fleet=fleet)
    retry_budget.record_failure(_failure(error=Draining("it leaves")))
    assert not retry_budget.is_exhausted
    assert fleet.draining == [_IMPORTER]


def test_a_failure_of_a_pair_is_named_in_the_ledger_and_its_exporter_suspected() -> None:
    live, fleet = _Live(), _Fleet()
    failure = AttemptFailed(HANDOFF, _EXPORTER, "read_failed", HandOffFailed(HandOffReason.READ_FAILED, ""))
    _retry_budget(3, live, fleet).record_failure(failure)
    assert live.account.reasons == ("handoff_read_failed",)
    assert fleet.suspected == [_EXPORTER]


def test_a_loss_while_no_worker_sends_anything_costs_no_attempt() -> None:
    retry_budget = _retry_budget(max_attempts=2)
    retry_budget.record_failure(_failure())
    for leg in (PREFILL, DECODE):
        silent = _failure(leg, AllWorkersSilent("it does not answer"))
        assert silent.leaves_ticket is (leg == DECODE)
        retry_budget.record_failure(silent)
    retry_budget.refund()
    assert retry_budget.has_one_attempt_left, "the failure that counts is not refunded"


def _exhausted(fleet: _Fleet, max_attempts: int = 2) -> RetryBudget:
    retry_budget = _retry_budget(max_attempts, fleet=fleet)
    for _ in range(max_attempts):
        retry_budget.record_failure(_failure())
    assert retry_budget.is_exhausted
    return retry_budget


async def _renewed(retry_budget: RetryBudget, fleet: _Fleet) -> None:
    """Renew while the workers change again and again, so that no wait lasts."""
    renewal = asyncio.create_task(retry_budget.renew(_failure(), []))
    while not renewal.done():
        fleet.changes.set()
        await asyncio.sleep(0)
    await renewal


async def test_losses_of_a_worker_that_lives_do_not_end_a_request() -> None:
    fleet = _Fleet()
    fleet.peers[_IMPORTER] = _Peer()
    retry_budget = _exhausted(fleet)
    await _renewed(retry_budget, fleet)
    assert not retry_budget.is_exhausted and not retry_budget.has_one_attempt_left


async def test_the_last_attempt_waits_until_a_lost_worker_is_alive_or_gone() -> None:
    fleet = _Fleet()
    peer = fleet.peers[_IMPORTER] = _Peer(is_reachable=False)
    for is_alive in (True, False):
        peer.is_reachable, fleet.peers[_IMPORTER] = False, peer
        retry_budget = _exhausted(fleet)
        renewal = asyncio.create_task(_renewed(retry_budget, fleet))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not renewal.done()
        if is_alive:
            peer.is_reachable = True
            await renewal
            assert not retry_budget.is_exhausted
        else:
            del fleet.peers[_IMPORTER]
            with pytest.raises(WorkerLost):
                await renewal


async def test_losses_of_one_worker_that_lives_are_not_counted_for_a_limited_time() -> None:
    fleet = _Fleet()
    fleet.peers[_IMPORTER] = _Peer()
    retry_budget = _exhausted(fleet)
    await _renewed(retry_budget, fleet)
    for _ in range(2):
        retry_budget.record_failure(_failure())
    with pytest.raises(WorkerLost):
        await _renewed(retry_budget, fleet)
    retry_budget.reset()  # decode has worked
    for _ in range(2):
        retry_budget.record_failure(_failure())
    await _renewed(retry_budget, fleet)


async def test_a_loss_that_was_refunded_with_its_consequence_is_not_refunded_again() -> None:
    fleet = _Fleet()
    fleet.peers[_IMPORTER] = _Peer()
    retry_budget = _retry_budget(max_attempts=2, fleet=fleet)
    retry_budget.record_failure(_failure())
    retry_budget.refund()
    for _ in range(2):
        retry_budget.record_failure(_failure(error=WrongTokens("another token")))
    with pytest.raises(WorkerLost):
        await _renewed(retry_budget, fleet)


async def test_a_worker_that_is_checked_is_waited_for_where_another_one_lives_whose_losses_count() -> None:
    """Two losses of the importer were refunded already, and its third one counts."""
    fleet = _Fleet()
    fleet.peers[_IMPORTER], exporter = _Peer(), _Peer(is_reachable=False)
    fleet.peers[_EXPORTER] = exporter
    retry_budget = _exhausted(fleet)
    await _renewed(retry_budget, fleet)
    retry_budget.record_failure(_failure())
    retry_budget.record_failure(AttemptFailed(PREFILL, _EXPORTER, _LOST.reason, _LOST))
    assert retry_budget.is_exhausted
    renewal = asyncio.create_task(_renewed(retry_budget, fleet))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not renewal.done()
    exporter.is_reachable = True
    await renewal
    assert not retry_budget.is_exhausted
