"""Admission: how many requests are live, each id once, when to come back, and what would be in vain."""

import pytest

from cluster.errors import DuplicateRequest, Overloaded, QueueFull
from router.policies.admission import Admission, WorkerBacklog, early_refusal


def test_a_live_id_is_refused_until_it_is_released() -> None:
    admission = Admission(10)
    admission.admit("a")
    with pytest.raises(DuplicateRequest, match="'a'"):
        admission.admit("a")
    admission.release("a")
    admission.admit("a")
    assert len(admission) == 1


def test_one_too_many_is_refused_and_costs_no_place() -> None:
    admission = Admission(2)
    admission.enter()
    admission.enter()
    with pytest.raises(Overloaded, match="2 requests"):
        admission.enter()
    admission.leave(1.0)
    admission.enter()
    assert admission.num_places == 2


def test_a_request_that_takes_over_a_live_stream_has_a_place_beside_it_and_not_for_ever() -> None:
    admission = Admission(1)
    admission.enter()
    admission.admit("a")
    admission.enter(takes_over=True)
    with pytest.raises(Overloaded):
        admission.enter(takes_over=True)


def test_a_resumed_request_is_admitted_under_an_id_that_another_request_holds() -> None:
    admission = Admission(2)
    admission.admit("a")
    with pytest.raises(DuplicateRequest):
        admission.admit("a")
    admission.admit("a", is_resumed=True)
    admission.release("a")
    assert len(admission) == 1
    with pytest.raises(DuplicateRequest):
        admission.admit("a")
    admission.release("a")
    admission.admit("a")


def test_retry_after_follows_how_often_a_place_becomes_free() -> None:
    admission = Admission(1)
    waits = []
    for gap_s in (4.0, 0.5):
        now_s = 0.0
        for _ in range(50):
            admission.enter()
            now_s += gap_s
            admission.leave(now_s)
        admission.enter()
        with pytest.raises(Overloaded) as refusal:
            admission.enter()
        waits.append(refusal.value.retry_after_s)
        admission.leave(now_s)
    assert waits[0] == pytest.approx(4.0, rel=0.1)
    assert waits[1] == pytest.approx(0.5, rel=0.1)


def test_retry_after_is_bounded_even_before_anything_ended() -> None:
    admission = Admission(1)
    admission.enter()
    with pytest.raises(Overloaded) as refusal:
        admission.enter()
    assert refusal.value.retry_after_s == 1.0


_IDLE = WorkerBacklog(0, 100.0)
_BUSY = WorkerBacklog(1000, 100.0)  # ten seconds
_FULL = WorkerBacklog(1000, 100.0, full_for_s=2.0)
_FULL_LONGER = WorkerBacklog(0, None, full_for_s=5.0)
_UNKNOWN = WorkerBacklog(1000, None)


@pytest.mark.parametrize(
    ("prefills", "decodes", "time_left_s"),
    [
        ([], [], 1.0),  # it waits for a worker
        ([_IDLE], [_IDLE], 1.0),
        ([_BUSY], [], 11.0),
        ([_BUSY, _IDLE], [], 1.0),  # one of them will do
        ([_BUSY, _UNKNOWN], [], 1.0),  # nobody can tell
        ([_FULL, _IDLE], [_FULL, _IDLE], 1.0),
    ],
)
def test_what_may_be_served_in_time_is_not_refused(
    prefills: list[WorkerBacklog], decodes: list[WorkerBacklog], time_left_s: float
) -> None:
    assert early_refusal(prefills, decodes, time_left_s) is None


@pytest.mark.parametrize(
    ("prefills", "decodes", "pool"), [([_FULL, _FULL_LONGER], [_IDLE], "prefill"), ([_IDLE], [_FULL], "decode")]
)
def test_full_queues_of_one_pool_refuse_until_the_first_has_room(
    prefills: list[WorkerBacklog], decodes: list[WorkerBacklog], pool: str
) -> None:
    refusal = early_refusal(prefills, decodes, 60.0)
    assert isinstance(refusal, QueueFull)
    assert pool in refusal.message
    assert refusal.retry_after_s == 2.0


def test_a_turn_after_the_deadline_is_refused_with_what_is_missing() -> None:
    refusal = early_refusal([_BUSY, WorkerBacklog(800, 100.0)], [], 5.0)
    assert isinstance(refusal, Overloaded) and not isinstance(refusal, QueueFull)
    assert "8 s" in refusal.message and "5 s" in refusal.message
    assert refusal.retry_after_s == pytest.approx(3.0)
