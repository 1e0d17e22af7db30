"""The work queued at a worker, and the worker's speed, as one router estimates them."""

import pytest

from router.policies.admission import BacklogEstimator


def _measured(num_prompts: int, *, num_tokens: int = 100, gap_s: float = 0.5) -> tuple[BacklogEstimator, float]:
    """An estimator of a worker that was busy all the time, and the time of its last prompt's end."""
    backlog, now_s = BacklogEstimator(), 10.0
    numbers = [backlog.add_prompt(num_tokens, now_s) for _ in range(num_prompts)]
    for number in numbers:
        now_s += gap_s
        backlog.record_computed(number, now_s)
    return backlog, now_s


def test_wait_is_the_queued_tokens_divided_by_the_measured_speed() -> None:
    backlog, now_s = _measured(20)
    for _ in range(3):
        backlog.add_prompt(400, now_s)
    ahead = backlog.estimate(now_s)
    assert ahead.num_tokens == 1200
    assert ahead.tokens_per_s == pytest.approx(200.0)
    assert ahead.wait_s == pytest.approx(6.0)


def test_prompts_computed_in_one_step_count_together_towards_the_speed() -> None:
    backlog, now_s = _measured(20, gap_s=0.0)
    for _ in range(40):
        numbers = [backlog.add_prompt(50, now_s) for _ in range(4)]
        now_s += 1.0
        for number in numbers:
            backlog.record_computed(number, now_s)
    assert backlog.estimate(now_s).tokens_per_s == pytest.approx(200.0, rel=0.15)


def test_idle_time_does_not_lower_the_measured_speed() -> None:
    backlog, now_s = _measured(20)
    now_s += 3600.0
    number = backlog.add_prompt(100, now_s)
    backlog.record_computed(number, now_s + 0.5)
    assert backlog.estimate(now_s + 0.5).tokens_per_s == pytest.approx(200.0)


def test_speed_is_unknown_after_few_prompts() -> None:
    backlog, now_s = _measured(7)
    backlog.add_prompt(10_000, now_s)
    assert backlog.estimate(now_s).tokens_per_s is None
    assert backlog.estimate(now_s).wait_s == 0.0


def test_a_removed_prompt_does_not_count_and_a_prompt_ends_once() -> None:
    backlog, now_s = _measured(20)
    number = backlog.add_prompt(100, now_s)
    backlog.remove_prompt(number)
    backlog.remove_prompt(number)
    assert backlog.estimate(now_s).num_tokens == 0


def test_a_full_queue_counts_until_its_retry_time_or_until_a_prompt_is_computed() -> None:
    backlog, now_s = _measured(20)
    backlog.record_full_queue(None, now_s)
    assert backlog.estimate(now_s).full_for_s == 0.0
    backlog.record_full_queue(4.0, now_s)
    assert backlog.estimate(now_s + 1.0).full_for_s == pytest.approx(3.0)
    assert backlog.estimate(now_s + 4.0).full_for_s == 0.0
    number = backlog.add_prompt(100, now_s)
    backlog.record_computed(number, now_s + 1.0)
    assert backlog.estimate(now_s + 1.0).full_for_s == 0.0
