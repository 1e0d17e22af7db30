"""The order in which a prefill worker computes prompts, under each policy and a simulated clock."""

from dataclasses import replace
from itertools import cycle, islice
from math import inf
from statistics import mean

import pytest

from engine.scheduling.policies import EarliestDeadline, FirstCome, ShortestFirst, SkipJoinMlfq, make_policy
from tests.unit.engine.scheduling.policies.load import one_in, poisson
from tests.unit.engine.scheduling.policies.prefilling import Prompt, prefill
from tests.unit.engine.scheduling.policies.simulation import StepCost

PER_STEP = StepCost(fixed_s=1.0)
PER_TOKEN = StepCost(fixed_s=0.002, token_s=0.0001)


def order(name: str, *prompts: Prompt) -> list[int]:
    """Return the prompts in the order in which they were computed."""
    done_s = prefill(prompts, make_policy(name), PER_STEP).done_s
    return sorted(range(len(prompts)), key=lambda number: done_s[number])


def mixed_prompts(num: int) -> list[Prompt]:
    """Return prompts at 80 % load: 95 of 100 have 128 tokens, 5 have 8,192."""
    short, long = 128, 8192
    mean_s = sum(share * num_tokens * 0.0001 for share, num_tokens in ((0.95, short), (0.05, long)))
    arrivals = zip(poisson(0.8 / mean_s, seed=4), one_in(20, seed=5), strict=False)
    return [Prompt(arrives_s=at_s, num_tokens=long if is_long else short) for at_s, is_long in islice(arrivals, num)]


def test_a_long_prompt_yields_to_a_higher_ranked_one_and_keeps_its_blocks() -> None:
    long, short = Prompt(num_tokens=5120), Prompt(arrives_s=2.5, num_tokens=256)
    for policy, done_s in ((SkipJoinMlfq(), 4.0), (FirstCome(), 11.0)):
        prefilled = prefill([long, short], policy, PER_STEP, num_blocks=400)
        assert prefilled.done_s[1] == done_s
        assert [step.num_tokens for step in prefilled.steps] == [512] * 10 + [256], "something was computed twice"


def test_a_prompt_that_waits_for_blocks_is_not_overtaken() -> None:
    """The second prompt waits for blocks of the first. The third would fit together with the first, whose last step has
    tokens to spare, and would delay the second."""
    prompts = [Prompt(num_tokens=num_tokens) for num_tokens in (3000, 3200, 512)]
    assert prefill(prompts, FirstCome(), PER_STEP, num_blocks=224).done_s == [6.0, 13.0, 14.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fcfs", [0, 1, 2]),
        ("shortest", [2, 1, 0]),
        ("mlfq", [2, 1, 0]),
    ],
)
def test_prompts_end_in_the_order_of_the_policy(name: str, expected: list[int]) -> None:
    """The first prompt is already computing when the others arrive; the shortest arrives last."""
    lengths = ((0.0, 9216), (0.5, 2048), (0.6, 512))
    assert order(name, *(Prompt(arrives_s=at_s, num_tokens=num_tokens) for at_s, num_tokens in lengths)) == expected


def test_priorities_and_deadlines_count_only_under_their_policies() -> None:
    prompts = [Prompt(num_tokens=2048), Prompt(arrives_s=0.5, num_tokens=2048, priority=-1, timeout_s=60.0)]
    assert {name: order(name, *prompts)[0] for name in ("fcfs", "priority", "deadline")} == {
        "fcfs": 0,
        "priority": 1,
        "deadline": 1,
    }


@pytest.mark.parametrize("name", ["fcfs", "shortest", "mlfq", "priority"])
def test_prompts_of_the_batch_class_delay_no_other_prompt(name: str) -> None:
    """No other prompt ends later because of the batch class, and some of its prompts end before the others do."""
    others = [Prompt(arrives_s=0.9 * number, num_tokens=64 + 137 * number % 700) for number in range(60)]
    batch = [Prompt(num_tokens=700, is_batch=True, priority=-5) for _ in range(12)]
    alone = prefill(others, make_policy(name), PER_STEP)
    beside = prefill([*batch, *others], make_policy(name), PER_STEP)
    assert beside.done_s[len(batch) :] == alone.done_s
    assert beside.done_s[0] < alone.done_s[-1]


def test_mixed_prompts_are_done_in_half_the_time_of_first_come() -> None:
    prompts = mixed_prompts(1000)
    times = {
        policy.name: prefill(prompts, policy, PER_TOKEN).completion_s(prompts)
        for policy in (FirstCome(), ShortestFirst(), SkipJoinMlfq())
    }
    assert mean(times["mlfq"]) <= 0.5 * mean(times["fcfs"])
    assert mean(times["shortest"]) <= 0.5 * mean(times["fcfs"])
    assert max(times["mlfq"]) <= 1.5 * max(times["fcfs"])


def test_the_deadline_policy_meets_deadlines_that_first_come_misses() -> None:
    """Every fourth client waits for half a second, the others for ten."""
    timeouts_s = cycle((0.5, 10.0, 10.0, 10.0))
    prompts = [replace(prompt, timeout_s=next(timeouts_s)) for prompt in mixed_prompts(1000)]
    missed = {
        policy.name: prefill(prompts, policy, PER_TOKEN).done_s.count(inf)
        for policy in (FirstCome(), EarliestDeadline())
    }
    assert missed["deadline"] < 0.2 * missed["fcfs"]


def test_a_long_prompt_is_done_beside_an_endless_stream_of_short_ones() -> None:
    """Short prompts arrive faster than they can be computed. The long prompt joins two levels below them; two seconds
    later it is at their level for a quantum, which is a third of its length.
    """
    prompts = [Prompt(num_tokens=3072)] + [Prompt(arrives_s=0.05 * number, num_tokens=512) for number in range(400)]
    assert 6.0 < prefill(prompts, SkipJoinMlfq(promote_after_s=1.0), PER_TOKEN).done_s[0] < 7.0
    assert prefill(prompts, SkipJoinMlfq(promote_after_s=1e9), PER_TOKEN).done_s[0] > 20.0
