"""The number of jobs that wait at a decode worker is bounded before the step thread receives them."""

import pytest

from cluster.errors import QueueFull
from cluster.messages import MemberId
from decode_worker.waiting_jobs import WaitingJobs

_ROUTER, _OTHER = MemberId("router", "1"), MemberId("other", "1")


def test_a_job_beyond_the_limit_is_refused_until_a_waiting_job_has_begun() -> None:
    waiting = WaitingJobs(2)
    waiting.add(_ROUTER, (1,))
    waiting.add(_OTHER, (1,))
    assert isinstance(waiting.refusal(), QueueFull)
    waiting.remove(_OTHER, (1,), 1.0)
    assert waiting.refusal() is None


def test_a_job_waits_until_all_its_sequences_have_begun_or_ended_and_counts_once() -> None:
    waiting = WaitingJobs(1)
    waiting.add(_ROUTER, range(100))
    assert len(waiting) == 1
    waiting.remove(_ROUTER, range(99), 1.0)
    assert waiting.refusal() is not None
    waiting.remove(_ROUTER, (99, 100), 1.0)
    waiting.remove(_ROUTER, (99,), 1.0)
    assert len(waiting) == 0


def test_retry_after_follows_the_rate_at_which_jobs_begin() -> None:
    waiting, now_s = WaitingJobs(1), 0.0
    for handle in range(50):
        waiting.add(_ROUTER, (handle,))
        now_s += 3.0
        waiting.remove(_ROUTER, (handle,), now_s)
    waiting.add(_ROUTER, (0,))
    refusal = waiting.refusal()
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(3.0, rel=0.1)
