"""Tests that prompts are computed in chunks together with decodes (Sarathi, Agrawal et al., 2023; Dynamic SplitFuse,
DeepSpeed-FastGen, 2023): a long prompt delays each token of a decode by one chunk, and a backlog fills every step to
the budget."""

import pytest

from engine.scheduling.policies import FirstCome
from tests.unit.engine.scheduling.policies.decoding import Asked, decode, limits, scheduler
from tests.unit.engine.scheduling.policies.prefilling import Prompt, prefill
from tests.unit.engine.scheduling.policies.simulation import StepCost

COST = StepCost(fixed_s=0.005, token_s=0.0001)  # a step alone 5 ms, 10,000 prompt tokens a second
BUDGET = 256
LONG = 16_384


def worst_gap_s(max_prefill_tokens: int) -> float:
    """Return the longest gap between tokens of four decoding sequences while a long prompt is computed."""
    asked = [Asked(num_prompt=16, num_output=400) for _ in range(4)] + [
        Asked(arrives_s=0.5, num_prompt=LONG, num_output=1)
    ]
    decoded = decode(asked, scheduler(limits(max_prefill_tokens=max_prefill_tokens)), COST)
    return max(answer.longest_gap_s for answer in decoded.answers[:4])


def test_a_long_prompt_delays_each_token_of_decodes_by_one_chunk() -> None:
    assert worst_gap_s(BUDGET) <= 1.5 * COST.seconds(BUDGET)


def test_without_chunks_a_long_prompt_delays_decodes_by_the_whole_prefill() -> None:
    assert worst_gap_s(LONG + 4) == pytest.approx(COST.seconds(LONG + 4), rel=1e-6)
    assert worst_gap_s(LONG + 4) > 30 * worst_gap_s(BUDGET)


def test_with_a_backlog_every_step_carries_the_budget() -> None:
    asked = [Asked(num_prompt=100 + 37 * number % 900, num_output=20) for number in range(120)]
    decoded = decode(asked, scheduler(limits(max_prefill_tokens=BUDGET, max_num_seqs=64)), COST)
    last_prompt = max(number for number, step in enumerate(decoded.steps) if step.num_tokens > step.num_drawn)
    with_backlog = decoded.steps[: last_prompt + 1]
    assert sum(step.num_tokens == BUDGET for step in with_backlog) >= 0.95 * len(with_backlog)


def test_a_prefill_worker_with_a_backlog_fills_every_step() -> None:
    prompts = [Prompt(num_tokens=100 + 37 * number % 900) for number in range(120)]
    steps = prefill(prompts, FirstCome(), COST, max_prefill_tokens=BUDGET).steps
    assert {step.num_tokens for step in steps[:-1]} == {BUDGET}
