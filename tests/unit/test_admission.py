"""Admission control: when a refused client should retry, and which requests would be served too late."""

import pytest

from cluster.errors import Overloaded, QueueFull
from router.policies.admission import AdmissionControl, WorkerBacklog, early_refusal


def test_retry_after_follows_the_rate_at_which_places_become_free() -> None:
    admission = AdmissionControl(1)
    waits = []
    for gap_s in (4.0, 0.5):
        for number in range(50):
            admission.record_end((number + 1) * gap_s)
        with pytest.raises(Overloaded, match="1 requests") as refusal:
            admission.check_place(1)
        waits.append(refusal.value.retry_after_s)
    assert waits[0] == pytest.approx(4.0, rel=0.1)
    assert waits[1] == pytest.approx(0.5, rel=0.1)


def test_retry_after_is_bounded_before_any_request_has_ended() -> None:
    with pytest.raises(Overloaded) as refusal:
        AdmissionControl(1).check_place(1)
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
        ([_BUSY, _UNKNOWN], [], 1.0),  # the wait is not known
        ([_FULL, _IDLE], [_FULL, _IDLE], 1.0),
    ],
)
def test_a_request_that_can_be_served_in_time_is_not_refused(
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


def test_a_request_that_would_be_served_after_its_deadline_is_refused_with_both_times() -> None:
    refusal = early_refusal([_BUSY, WorkerBacklog(800, 100.0)], [], 5.0)
    assert isinstance(refusal, Overloaded) and not isinstance(refusal, QueueFull)
    assert "8 s" in refusal.message and "5 s" in refusal.message
    assert refusal.retry_after_s == pytest.approx(3.0)
