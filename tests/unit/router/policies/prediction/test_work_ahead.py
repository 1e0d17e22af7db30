"""The work ahead of a new request at one worker, as one router counts it."""

import math

import pytest

from cluster.fair_queue import CREDIT
from cluster.messages import NO_TENANT, MemberId, TenantShare
from cluster.outstanding_work import OthersWork, OutstandingWork, PromptWork
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes
from engine.scheduling.policies import FirstCome
from router.policies.prediction.recent_prompts import NO_RECENT_PROMPTS
from router.policies.prediction.work_ahead import PromptBacklog
from tests.unit.engine.scheduling.policies.prefilling import Prompt, prefill
from tests.unit.engine.scheduling.policies.simulation import StepCost


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
    backlog.remove_prompt(number, 0.0)
    backlog.remove_prompt(number, 0.0)
    assert backlog.queue(0.0).work.num_new == 7
    backlog.record_computed(stays, 1.0)
    backlog.remove_prompt(stays, 1.0)
    assert backlog.queue(1.0).work == PromptWork()


def test_the_time_for_a_removed_prompt_is_no_progress_of_the_next_one() -> None:
    """A client leaves while its long prompt is computed. The one that waited behind it has just begun."""
    backlog = PromptBacklog()
    long = backlog.add_prompt(PromptWork.of(100_000, 0), 0.0)
    backlog.add_prompt(PromptWork.of(500, 0), 50.0)
    backlog.remove_prompt(long, 60.0)
    queue = backlog.queue(61.0)
    assert (queue.first.num_new, queue.elapsed_s) == (500, 1.0)
    backlog.remove_prompt(backlog.add_prompt(PromptWork.of(7, 0), 61.0), 61.5)
    assert backlog.queue(62.0).elapsed_s == 2.0, "one that only waited changes nothing"


def test_prompts_of_other_routers_count_until_the_next_report() -> None:
    backlog = PromptBacklog()
    number = backlog.add_prompt(PromptWork.of(100, 0), 0.0)
    backlog.record_report(OthersWork(1, prompts=PromptWork.of(200, 0)), 0.0)
    assert backlog.queue(0.0).work.num_new == 300
    backlog.record_computed(number, 1.0)
    assert backlog.queue(1.0).work.num_new == 200
    backlog.record_report(OthersWork(2), 1.0)
    assert backlog.queue(1.0).work.num_new == 0


def test_recent_prompts_count_by_what_they_add_to_steps_and_older_ones_count_less() -> None:
    times, backlog = ServiceTimes(PrefillTimes(1.0, 0.001, 0.0, 0.0), DecodeTimes(0.01, 0.0, 0.0, 0.0)), PromptBacklog()
    assert backlog.recent(times, 100.0) == NO_RECENT_PROMPTS
    for number in range(100):  # a prompt of 0.5 s each second
        backlog.record_computed(backlog.add_prompt(PromptWork.of(500, 0), float(number)), number + 0.5)
    steady, later = backlog.recent(times, 100.0), backlog.recent(times, 120.0)
    assert steady.computing_s / steady.seconds == pytest.approx(0.5, rel=0.03)
    assert steady.computing_s / steady.number == pytest.approx(0.5)
    assert later.computing_s / steady.computing_s == pytest.approx(math.exp(-1))
    assert later.seconds == pytest.approx(steady.seconds, rel=0.03)  # the pause counts


def test_prompts_that_were_not_computed_are_no_recent_ones() -> None:
    """A worker whose queue is full refuses prompts, and the one that misses a health check loses them to another one:
    they take none of its time."""
    times, backlog = ServiceTimes(PrefillTimes(0.0, 0.001, 0.0, 0.0), DecodeTimes(0.01, 0.0, 0.0, 0.0)), PromptBacklog()
    served, refused = PromptBacklog(), list[int]()
    for second in range(20):
        numbers = [one.add_prompt(PromptWork.of(500, 0), float(second)) for one in (served, backlog)]
        for one, number in zip((served, backlog), numbers, strict=True):
            one.record_computed(number, second + 0.5)
        refused.append(backlog.add_prompt(PromptWork.of(5000, 0), second + 0.6))
        if second % 2:  # some are refused at once
            backlog.remove_prompt(refused.pop(), second + 0.7)
    for number in refused:
        backlog.remove_prompt(number, 20.0)
    found, expected = backlog.recent(times, 20.0), served.recent(times, 20.0)
    assert (found.number, found.computing_s) == pytest.approx((expected.number, expected.computing_s))

    alone = PromptBacklog()
    alone.remove_prompt(alone.add_prompt(PromptWork.of(500, 0), 0.0), 0.1)
    assert alone.recent(times, 1.0).stretch(math.inf) == 1.0


def test_recent_prompts_are_those_of_all_routers() -> None:
    """Four routers take turns to send a prompt of 0.4 s every half a second; the worker reports each to the others."""
    times = ServiceTimes(PrefillTimes(0.0, 0.001, 0.0, 0.0), DecodeTimes(0.01, 0.0, 0.0, 0.0))
    routers = {MemberId(f"r{number}", "1"): PromptBacklog() for number in range(4)}
    worker, alone, work = OutstandingWork(), PromptBacklog(), PromptWork.of(400, 0)

    def report(sender: MemberId, now_s: float) -> None:
        for router, other in worker.reports([router for router in routers if router != sender], now_s).items():
            routers[router].record_report(other, now_s)

    for number in range(200):
        now_s, sender = number / 2, [*routers][number % 4]
        sent = routers[sender].add_prompt(work, now_s), alone.add_prompt(work, now_s)
        worker.add_export(number, sender, work, 1, now_s)
        report(sender, now_s + 0.01)
        worker.remove_export(number, now_s + 0.4)
        routers[sender].record_computed(sent[0], now_s + 0.4)
        alone.record_computed(sent[1], now_s + 0.4)
        report(sender, now_s + 0.41)
    expected = alone.recent(times, 100.0)
    for backlog in routers.values():
        found = backlog.recent(times, 100.0)
        assert found.stretch(math.inf) == pytest.approx(expected.stretch(math.inf), rel=0.02)
        assert found.number == pytest.approx(expected.number, rel=0.02)


def test_one_prompt_says_little_about_those_that_follow() -> None:
    times, backlog = ServiceTimes(PrefillTimes(0.0, 0.001, 0.0, 0.0), DecodeTimes(0.01, 0.0, 0.0, 0.0)), PromptBacklog()
    backlog.add_prompt(PromptWork.of(500, 0), 100.0)
    assert 1 < backlog.recent(times, 100.0).stretch(math.inf) < 1.2


def test_a_new_prompt_waits_for_its_tenants_prompts_and_for_others_in_proportion_to_weights() -> None:
    flood, other, heavy = TenantShare("flood"), TenantShare("other"), TenantShare("other", 4)
    backlog = PromptBacklog()
    for _ in range(10):
        backlog.add_prompt(PromptWork.of(100, 0), 0.0, flood)
    queue = backlog.queue(0.0)
    assert queue.before(flood, 64) is queue
    passing = queue.before(other, 64)
    assert passing.work.num_new == pytest.approx(64) and passing.first.num_new == 64, "the running step ends"
    for _ in range(3):
        number = backlog.add_prompt(PromptWork.of(100, 0), 0.0, other)
    queue = backlog.queue(0.0)
    assert queue.before(other, 64).work.num_new == pytest.approx(300 + 300)
    assert queue.before(heavy, 64).work.num_new == pytest.approx(300 + 75)
    assert queue.before(flood, 64).work.num_new == pytest.approx(1300)
    backlog.record_report(OthersWork(1, prompts=PromptWork.of(50, 0)), 0.0)
    assert backlog.queue(0.0).before(other, 64).work.num_new == pytest.approx(650), "other routers name no tenants"
    backlog.remove_prompt(number, 0.0)
    assert backlog.queue(0.0).before(other, 64).work.num_new == pytest.approx(450)


def test_prompts_of_the_batch_class_wait_for_all_others_and_nothing_waits_for_them_but_the_running_step() -> None:
    backlog = PromptBacklog()
    for is_batch in (True, True, False):
        backlog.add_prompt(PromptWork.of(1000, 0), 0.0, is_batch=is_batch)
    queue = backlog.queue(0.0)
    before = queue.before(NO_TENANT, 64)
    assert before.work.num_new == pytest.approx(1000 + 64) and before.first.num_new == 64
    assert queue.before(NO_TENANT, 64, is_batch=True) is queue
    other = TenantShare("other")
    assert queue.before(other, 64).work.num_new == pytest.approx(64), "what of its own class it passes"
    assert queue.before(other, 64, is_batch=True).work.num_new == pytest.approx(1000 + 64)


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_the_work_before_a_prompt_is_what_the_scheduler_computes_before_it(num_before: int, is_batch: bool) -> None:
    """A tenant's prompt comes while a flood of another one waits, and `num_before` of its own. `is_batch`: the flood is
    of the batch class."""
    flood, other = TenantShare("flood"), TenantShare("other")
    length, chunk = 160, 64
    arrivals = [(0.0, flood)] * 20 + [(1.0, other)] * (num_before + 1)
    prompts = [
        Prompt(arrives_s=at_s, num_tokens=length, tenant=tenant, is_batch=is_batch and tenant == flood)
        for at_s, tenant in arrivals
    ]
    run = prefill(prompts, FirstCome(), StepCost(token_s=1e-3), max_prefill_tokens=chunk)
    backlog = PromptBacklog()
    for _, tenant in [*arrivals[:14], *arrivals[20:-1]]:  # after a second, about 14 are left
        backlog.add_prompt(PromptWork.of(length, 0), 1.0, tenant, is_batch=is_batch and tenant == flood)
    predicted_s = (backlog.queue(1.0).before(other, chunk).work.num_new + length) * 1e-3
    saved_s = (8 * CREDIT + chunk) * 1e-3  # the prediction does not count what a tenant has saved up
    simulated_s = run.completion_s(prompts)[-1]
    assert simulated_s - (length + chunk) * 1e-3 <= predicted_s <= simulated_s + saved_s


def test_a_full_queue_counts_until_its_retry_time_or_until_the_worker_has_room() -> None:
    backlog = PromptBacklog()
    backlog.record_full_queue("a", None, 0.0)
    assert backlog.full_for_s(0.0) == {}
    backlog.record_full_queue("a", 4.0, 0.0)
    backlog.record_full_queue("b", 6.0, 0.0)
    assert backlog.full_for_s(1.0) == pytest.approx({"a": 3.0, "b": 5.0})
    assert backlog.full_for_s(4.0) == pytest.approx({"b": 2.0})
    backlog.record_accepted("b")
    assert backlog.full_for_s(1.0) == pytest.approx({"a": 3.0})
    backlog.record_computed(backlog.add_prompt(PromptWork.of(100, 0), 0.0), 1.0)
    assert backlog.full_for_s(1.0) == {}


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    work = PromptWork.of(100, 100)
    assert (work.num_new, work.attended) == (1, 100)
