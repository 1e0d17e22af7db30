"""What is ahead at a worker, and how fast it goes, as one router sees it."""

import pytest

from router.fleet.backlog import Backlog


def _measured(num_prompts: int, *, num_tokens: int = 100, gap_s: float = 0.5) -> tuple[Backlog, float]:
    """One that was busy all the time; and when it ended."""
    backlog, now_s = Backlog(), 10.0
    numbers = [backlog.begin(num_tokens, now_s) for _ in range(num_prompts)]
    for number in numbers:
        now_s += gap_s
        backlog.done(number, now_s)
    return backlog, now_s


def test_what_waits_over_how_fast_prompts_were_computed_is_the_wait() -> None:
    backlog, now_s = _measured(20)
    for _ in range(3):
        backlog.begin(400, now_s)
    ahead = backlog.ahead(now_s)
    assert ahead.num_tokens == 1200
    assert ahead.tokens_per_s == pytest.approx(200.0)
    assert ahead.wait_s == pytest.approx(6.0)


def test_prompts_of_one_step_count_together() -> None:
    backlog, now_s = _measured(20, gap_s=0.0)
    for _ in range(40):
        numbers = [backlog.begin(50, now_s) for _ in range(4)]
        now_s += 1.0
        for number in numbers:
            backlog.done(number, now_s)
    assert backlog.ahead(now_s).tokens_per_s == pytest.approx(200.0, rel=0.15)


def test_idle_time_is_no_slowness() -> None:
    backlog, now_s = _measured(20)
    now_s += 3600.0
    number = backlog.begin(100, now_s)
    backlog.done(number, now_s + 0.5)
    assert backlog.ahead(now_s + 0.5).tokens_per_s == pytest.approx(200.0)


def test_a_few_prompts_tell_nothing() -> None:
    backlog, now_s = _measured(7)
    backlog.begin(10_000, now_s)
    assert backlog.ahead(now_s).tokens_per_s is None
    assert backlog.ahead(now_s).wait_s == 0.0


def test_what_is_dropped_is_not_ahead_and_a_prompt_ends_once() -> None:
    backlog, now_s = _measured(20)
    number = backlog.begin(100, now_s)
    backlog.drop(number)
    backlog.drop(number)
    assert backlog.ahead(now_s).num_tokens == 0


def test_a_full_queue_is_remembered_until_its_time_or_until_a_prompt_is_done() -> None:
    backlog, now_s = _measured(20)
    backlog.refused(None, now_s)
    assert backlog.ahead(now_s).full_for_s == 0.0
    backlog.refused(4.0, now_s)
    assert backlog.ahead(now_s + 1.0).full_for_s == pytest.approx(3.0)
    assert backlog.ahead(now_s + 4.0).full_for_s == 0.0
    number = backlog.begin(100, now_s)
    backlog.done(number, now_s + 1.0)
    assert backlog.ahead(now_s + 1.0).full_for_s == 0.0
