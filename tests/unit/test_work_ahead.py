"""The work ahead of a new request at one worker, as one router counts it."""

import pytest

from cluster.outstanding_work import OthersWork, PromptWork
from router.policies.work_ahead import PromptBacklog


def test_a_sent_prompt_counts_at_once_and_until_it_is_computed() -> None:
    backlog = PromptBacklog()
    first = backlog.add_prompt(PromptWork.of(100, 0), 10.0)
    second = backlog.add_prompt(PromptWork.of(300, 100), 11.0)
    queue = backlog.queue(12.0)
    assert (queue.work.num_new, queue.first.num_new, queue.elapsed_s) == (300, 100, 2.0)
    backlog.record_computed(first, 12.5)
    queue = backlog.queue(13.0)
    assert (queue.work.num_new, queue.first.num_new, queue.elapsed_s) == (200, 200, 0.5)
    backlog.record_computed(second, 14.0)
    assert backlog.queue(15.0).work == PromptWork()


def test_time_without_prompts_does_not_count_as_progress() -> None:
    backlog = PromptBacklog()
    backlog.record_computed(backlog.add_prompt(PromptWork.of(100, 0), 0.0), 1.0)
    backlog.add_prompt(PromptWork.of(100, 0), 3600.0)
    assert backlog.queue(3600.5).elapsed_s == 0.5


def test_a_removed_prompt_does_not_count_and_a_prompt_ends_once() -> None:
    backlog = PromptBacklog()
    number = backlog.add_prompt(PromptWork.of(100, 0), 0.0)
    stays = backlog.add_prompt(PromptWork.of(7, 0), 0.0)
    backlog.remove_prompt(number)
    backlog.remove_prompt(number)
    assert backlog.queue(0.0).work.num_new == 7
    backlog.record_computed(stays, 1.0)
    backlog.remove_prompt(stays)
    assert backlog.queue(1.0).work == PromptWork()


def test_prompts_of_other_routers_count_until_the_next_report() -> None:
    backlog = PromptBacklog()
    number = backlog.add_prompt(PromptWork.of(100, 0), 0.0)
    backlog.record_report(OthersWork(1, prompts=PromptWork.of(200, 0)), 0.0)
    assert backlog.queue(0.0).work.num_new == 300
    backlog.record_computed(number, 1.0)
    assert backlog.queue(1.0).work.num_new == 200
    backlog.record_report(OthersWork(2), 1.0)
    assert backlog.queue(1.0).work.num_new == 0


def test_a_full_queue_counts_until_its_retry_time_or_until_a_prompt_is_computed() -> None:
    backlog = PromptBacklog()
    backlog.record_full_queue("a", None, 0.0)
    assert backlog.full_for_s(0.0) == {}
    backlog.record_full_queue("a", 4.0, 0.0)
    backlog.record_full_queue("b", 6.0, 0.0)
    assert backlog.full_for_s(1.0) == pytest.approx({"a": 3.0, "b": 5.0})
    assert backlog.full_for_s(4.0) == pytest.approx({"b": 2.0})
    backlog.record_computed(backlog.add_prompt(PromptWork.of(100, 0), 0.0), 1.0)
    assert backlog.full_for_s(1.0) == {}


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    work = PromptWork.of(100, 100)
    assert (work.num_new, work.attended) == (1, 100)
