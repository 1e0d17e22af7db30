"""The order of work under each policy. A rank is a pure function of the facts about the work."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.settings.worker_settings import SCHEDULING_POLICIES
from engine.scheduling.policies import (
    PROMPT_TOKENS_PER_OUTPUT,
    FirstCome,
    Policy,
    Priorities,
    ShortestFirst,
    SkipJoinMlfq,
    Work,
    displaces,
    full_rank,
    make_policy,
)
from tests.examples import num_examples

WORK = Work(arrival=0, arrived_s=0.0, deadline_s=600.0, num_prompt=64)
COUNTS = st.integers(0, 100_000)
TIMES = st.floats(0, 1e5)
WORKS = st.builds(
    Work,
    arrival=st.integers(0, 1 << 40),
    arrived_s=TIMES,
    deadline_s=TIMES,
    num_prompt=st.integers(1, 100_000),
    num_done=COUNTS,
    predicted_tokens=COUNTS,
    priority=st.integers(-(2**31), 2**31 - 1),
    is_batch=st.booleans(),
    waited_s=TIMES,
)
POLICIES = [make_policy(name) for name in SCHEDULING_POLICIES]


def in_order(policy: Policy, *works: Work, now_s: float = 0.0) -> list[int]:
    """Return the arrivals in the order of the policy."""
    return [work.arrival for work in sorted(works, key=lambda work: full_rank(policy, work, now_s))]


def aged(work: Work, arrival: int, arrived_s: float) -> Work:
    return replace(work, arrival=arrival, arrived_s=arrived_s, deadline_s=arrived_s + 600.0)


def mlfq_at(num_prompt: int, num_output: int, *, waited_s: float = 0.0, num_since_wait: int = 0) -> int:
    work = replace(WORK, num_prompt=num_prompt, num_done=num_prompt + num_output)
    return SkipJoinMlfq().level(replace(work, waited_s=waited_s, num_since_wait=num_since_wait))


@pytest.mark.parametrize("policy", POLICIES, ids=SCHEDULING_POLICIES)
@settings(max_examples=num_examples(suite=10, search=25))
@given(works=st.lists(WORKS, min_size=2, max_size=5, unique_by=lambda work: work.arrival), now_s=TIMES)
def test_any_two_pieces_of_work_have_an_order_and_the_batch_class_is_last(
    policy: Policy, works: list[Work], now_s: float
) -> None:
    ranks = [full_rank(policy, work, now_s) for work in works]
    assert len(set(ranks)) == len(ranks)
    ordered = sorted(works, key=lambda work: full_rank(policy, work, now_s))
    assert [work.is_batch for work in ordered] == sorted(work.is_batch for work in works)


@pytest.mark.parametrize("policy", POLICIES, ids=SCHEDULING_POLICIES)
@settings(max_examples=num_examples(suite=10, search=25))
@given(one=WORKS, other=WORKS, now_s=TIMES)
def test_no_two_pieces_of_work_preempt_each_other(policy: Policy, one: Work, other: Work, now_s: float) -> None:
    assert not (displaces(policy, one, other, now_s) and displaces(policy, other, one, now_s))


@pytest.mark.parametrize("policy", POLICIES, ids=SCHEDULING_POLICIES)
def test_the_batch_class_yields_under_every_policy(policy: Policy) -> None:
    batch, other = replace(WORK, is_batch=True, priority=-9, deadline_s=1.0), replace(WORK, arrival=1, num_prompt=9000)
    assert displaces(policy, other, batch, 0.0)
    assert not displaces(policy, batch, other, 0.0)


@pytest.mark.parametrize("name", ["fcfs"])
def test_a_policy_without_preemption_displaces_no_work(name: str) -> None:
    first = replace(WORK, arrival=0, num_prompt=1)
    assert not displaces(make_policy(name), first, replace(WORK, arrival=99, num_prompt=9000), 0.0)


def test_first_come_is_first_served() -> None:
    late, early = aged(WORK, 2, 5.0), aged(replace(WORK, num_prompt=9000, priority=9), 1, 0.0)
    assert in_order(FirstCome(), late, early) == [1, 2]
    assert in_order(FirstCome(), aged(WORK, 2, 5.0), aged(WORK, 1, 5.0)) == [1, 2]


def test_first_come_orders_by_arrival_at_the_cluster_and_not_at_the_worker() -> None:
    here, from_one_that_died = aged(WORK, 1, 5.0), aged(WORK, 2, 1.0)
    assert in_order(FirstCome(), here, from_one_that_died) == [2, 1]


def test_first_come_serves_resumed_work_before_new_work() -> None:
    begun = [replace(aged(WORK, arrival, 9.0 - arrival), is_resumed=True) for arrival in (3, 4)]
    assert in_order(FirstCome(), aged(WORK, 1, 0.0), *begun, aged(WORK, 2, 1.0)) == [4, 3, 1, 2]


def test_shortest_first_counts_the_remaining_prompt_and_predicted_tokens() -> None:
    long_prompt = replace(WORK, arrival=0, num_prompt=80 * PROMPT_TOKENS_PER_OUTPUT, predicted_tokens=10)
    long_output = replace(WORK, arrival=1, predicted_tokens=100)
    nearly_done = replace(long_output, arrival=2, num_done=WORK.num_prompt + 95)
    unknown = replace(WORK, arrival=3)
    assert in_order(ShortestFirst(), unknown, long_output, long_prompt, nearly_done) == [2, 0, 1, 3]


def test_work_past_its_prediction_counts_as_one_remaining_token() -> None:
    outlived = replace(WORK, arrival=0, predicted_tokens=10, num_done=WORK.num_prompt + 500)
    at_its_end = replace(outlived, num_done=WORK.num_prompt + 9)
    assert ShortestFirst().rank(outlived, 0.0) == ShortestFirst().rank(at_its_end, 0.0)


@pytest.mark.parametrize("policy", [ShortestFirst(), Priorities()], ids=lambda policy: policy.name)
def test_ageing_lets_the_last_ranked_work_become_the_first(policy: Policy) -> None:
    last = replace(WORK, arrival=0, num_prompt=8000, predicted_tokens=2000, priority=5)
    urgent = replace(WORK, predicted_tokens=1)
    assert in_order(policy, last, aged(urgent, 1, 10.0), now_s=10.0) == [1, 0]
    assert in_order(policy, last, aged(urgent, 2, 1000.0), now_s=1000.0) == [0, 2]


@given(one=WORKS, other=WORKS, now_s=TIMES, later_s=TIMES)
def test_ageing_never_swaps_the_order_of_two_waiting_requests(
    one: Work, other: Work, now_s: float, later_s: float
) -> None:
    """Otherwise they would displace each other repeatedly."""
    for policy in (ShortestFirst(), Priorities()):
        before, after = (policy.rank(one, t)[0] - policy.rank(other, t)[0] for t in (now_s, later_s))
        assert before == pytest.approx(after, abs=1e-3)


def test_priorities_go_from_low_to_high_and_equal_ones_by_arrival() -> None:
    works = [replace(WORK, arrival=arrival, priority=priority) for arrival, priority in enumerate([0, 3, -2, 0])]
    assert in_order(Priorities(), *works) == [2, 0, 3, 1]


def test_the_earliest_deadline_goes_first() -> None:
    works = [replace(WORK, arrival=arrival, deadline_s=deadline) for arrival, deadline in enumerate([9.0, 3.0, 5.0])]
    assert in_order(make_policy("deadline"), *works) == [1, 2, 0]


@pytest.mark.parametrize(
    ("num_prompt", "level"), [(1, 0), (255, 0), (256, 1), (511, 1), (512, 2), (8000, 5), (10**6, 7)]
)
def test_a_job_joins_the_first_mlfq_level_with_a_quantum_for_its_prompt(num_prompt: int, level: int) -> None:
    assert SkipJoinMlfq().level(replace(WORK, num_prompt=num_prompt)) == level
    # The same once the prompt is computed: it was what the level was chosen for.
    assert SkipJoinMlfq().level(replace(WORK, num_prompt=num_prompt, num_done=num_prompt)) == level


@pytest.mark.parametrize(
    ("num_output", "level"), [(0, 0), (23, 0), (24, 1), (87, 1), (88, 2), (215, 2), (216, 3), (10**6, 7)]
)
def test_each_used_quantum_moves_work_one_level_down(num_output: int, level: int) -> None:
    """The quanta are 32 tokens, then 64, 128, ...; the prompt's 64 tokens count as 8."""
    assert mlfq_at(64, num_output) == level


def test_waiting_work_rises_one_mlfq_level_at_a_time() -> None:
    assert [mlfq_at(64, 300, waited_s=waited_s) for waited_s in (0.0, 9.9, 10.0, 20.0, 30.0, 99.0)] == [
        3,
        3,
        2,
        1,
        0,
        0,
    ]


def test_risen_work_stays_at_its_mlfq_level_for_a_quantum() -> None:
    def level(num_since_wait: int) -> int:
        return mlfq_at(64, 300 + num_since_wait, waited_s=20.0, num_since_wait=num_since_wait)

    assert [level(0), level(63), level(64)] == [1, 1, 3]
