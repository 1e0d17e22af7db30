"""Live sequences of a decode worker: the origin of each is reported with its start, even when other choices are
cancelled, and the number of waiting jobs is bounded before the step thread receives them."""

import pytest

from cluster.errors import QueueFull
from cluster.messages import NO_TENANT, MemberId, TenantShare
from decode_worker.live_handles import Arrival, LiveHandles, WaitingJobs
from decode_worker.streams import started_message
from engine.scheduling import commands

_ROUTER, _OTHER = MemberId("router", "1"), MemberId("other", "1")


def _arrived(*handles: int) -> LiveHandles:
    """Add choices of one prompt whose KV has been imported; their first tokens are ten times their handles."""
    live = LiveHandles(max_waiting_jobs=4)
    live.add_job(_ROUTER, handles, NO_TENANT, 0.0)
    for handle in handles:
        live.arrive(_ROUTER, handle, Arrival(10 * handle, 1.5, 0.25, 4096, "tcp"))
    return live


def test_a_choice_cancelled_during_the_first_step_hides_no_other_first_token() -> None:
    live = _arrived(1, 2, 3)
    live.remove(_ROUTER, frozenset({2}), 0.0)

    begun = live.begin(_ROUTER, (1, 2, 3), 1.0)

    assert {handle: arrival.first_token_id for handle, arrival in begun.items() if arrival} == {1: 10, 3: 30}
    event = commands.Started(_ROUTER, (1, 2, 3), queue_s=0.5, num_cached=0)
    started = started_message(event, begun).started
    assert (list(started.handles), len(started.first_token_ids)) == ([1, 3], 8)
    assert (started.transport, started.kv_bytes) == ("tcp", 4096)
    assert (started.queue_s, started.transfer_s) == (2.0, 0.25)  # the wait for room is part of the queue


def test_a_start_with_only_cancelled_choices_reports_no_sequence() -> None:
    live = _arrived(1, 2)
    live.remove(_ROUTER, frozenset({1, 2}), 0.0)
    assert live.begin(_ROUTER, (1, 2), 1.0) == {}


def test_a_prompt_prefilled_by_the_decode_worker_has_no_first_tokens_to_compare() -> None:
    live = LiveHandles(max_waiting_jobs=4)
    live.add_job(_ROUTER, (1, 2), NO_TENANT, 0.0)
    event = commands.Started(_ROUTER, (1, 2), queue_s=0.5, num_cached=0)
    started = started_message(event, live.begin(_ROUTER, (1, 2), 1.0)).started
    assert (list(started.handles), started.first_token_ids, started.transport) == ([1, 2], b"", "local")


def test_a_job_beyond_the_limit_is_refused_until_a_waiting_job_has_begun() -> None:
    waiting = WaitingJobs(2)
    waiting.add(_ROUTER, (1,), NO_TENANT, 0.0)
    waiting.add(_OTHER, (1,), NO_TENANT, 0.0)
    assert isinstance(waiting.refusal(NO_TENANT), QueueFull)
    waiting.remove(_OTHER, (1,), 1.0)
    assert waiting.refusal(NO_TENANT) is None


def test_a_changed_limit_applies_to_the_next_job() -> None:
    live = LiveHandles(max_waiting_jobs=1)
    live.add_job(_ROUTER, (1,), NO_TENANT, 0.0)
    assert isinstance(live.refusal(NO_TENANT), QueueFull)
    live.limit_waiting_jobs(2)
    assert live.refusal(NO_TENANT) is None


def test_jobs_of_one_tenant_that_fill_the_queue_do_not_keep_another_one_out() -> None:
    waiting, flood, other = WaitingJobs(2), TenantShare("flood"), TenantShare("other")
    for handle in range(2):
        waiting.add(_ROUTER, (handle,), flood, 0.0)
    assert waiting.refusal(flood) is not None and waiting.refusal(other) is None
    waiting.add(_ROUTER, (2,), other, 0.0)
    assert waiting.refusal(TenantShare("third")) is not None, "there is a bound for all"
    waiting.remove(_ROUTER, (0, 1), 1.0)
    assert waiting.refusal(flood) is None


def test_a_job_waits_until_all_its_sequences_have_begun_or_ended_and_counts_once() -> None:
    waiting = WaitingJobs(1)
    waiting.add(_ROUTER, range(100), NO_TENANT, 0.0)
    assert len(waiting) == 1
    waiting.remove(_ROUTER, range(99), 1.0)
    assert waiting.refusal(NO_TENANT) is not None
    waiting.remove(_ROUTER, (99, 100), 1.0)
    waiting.remove(_ROUTER, (99,), 1.0)
    assert len(waiting) == 0


def test_retry_after_follows_the_rate_at_which_jobs_begin() -> None:
    waiting, now_s = WaitingJobs(1), 0.0
    for handle in range(50):
        waiting.add(_ROUTER, (handle,), NO_TENANT, now_s)
        now_s += 3.0
        waiting.remove(_ROUTER, (handle,), now_s)
    waiting.add(_ROUTER, (0,), NO_TENANT, 0.0)
    refusal = waiting.refusal(NO_TENANT)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(3.0, rel=0.1)
