"""The sequences to which a decode worker gives its slots, under each policy and a simulated clock."""

from dataclasses import replace
from itertools import islice
from statistics import mean

import pytest

from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.policies import FirstCome, Policy, ShortestFirst, SkipJoinMlfq, make_policy
from tests.unit.engine.scheduling.policies.decoding import Asked, Decoded, decode, limits, scheduler
from tests.unit.engine.scheduling.policies.load import one_in, poisson
from tests.unit.engine.scheduling.policies.simulation import StepCost

SLOTS = 4
STEP_S = 0.02
NUM_BLOCKS = 400
PER_STEP = StepCost(fixed_s=STEP_S)


def mixed_jobs(num: int) -> list[Asked]:
    """Return jobs at 80 % load: 95 of 100 generate 8 tokens, 5 generate 400."""
    short, long = 8, 400
    rate = 0.8 * SLOTS / STEP_S / (0.95 * short + 0.05 * long)
    arrivals = islice(zip(poisson(rate, seed=2), one_in(20, seed=3), strict=False), num)
    return [Asked(arrives_s=at_s, num_prompt=16, num_output=long if is_long else short) for at_s, is_long in arrivals]


def served(asked: list[Asked], policy: Policy, *, slots: int = SLOTS, num_blocks: int = NUM_BLOCKS) -> Decoded:
    """Decode, and check that every output equals that of the sequence alone."""
    decode_limits = limits(max_num_seqs=slots, num_blocks=num_blocks)
    decoded = decode(asked, scheduler(decode_limits, policy), PER_STEP, num_blocks=num_blocks)
    decoded.assert_exact()
    return decoded


def test_mixed_jobs_end_in_half_the_time_of_first_come_and_no_job_waits_for_ever() -> None:
    asked, policy = mixed_jobs(250), SkipJoinMlfq(promote_after_s=2.0)
    by_arrival, by_level = served(asked, FirstCome()), served(asked, policy)
    assert by_level.inspected.figures["displaced"] > 0
    mean_s = [mean(answer.completion_s for answer in decoded.answers) for decoded in (by_arrival, by_level)]
    assert mean_s[1] <= 0.5 * mean_s[0]
    longest_wait_s = max(answer.longest_gap_s for answer in by_level.answers)
    assert longest_wait_s <= policy.num_levels * policy.promote_after_s


def test_shortest_first_learns_short_jobs_from_their_tenant() -> None:
    """Only the tenant distinguishes a short job."""
    asked = [replace(one, tenant=f"of {one.num_output}") for one in mixed_jobs(250)]
    decode_limits = limits(max_num_seqs=SLOTS)
    by_arrival = decode(asked, scheduler(decode_limits, FirstCome()), PER_STEP)
    by_length = decode(asked, scheduler(decode_limits, ShortestFirst(), LengthPredictor()), PER_STEP)
    mean_s = [mean(answer.completion_s for answer in decoded.answers) for decoded in (by_arrival, by_length)]
    assert mean_s[1] <= 0.5 * mean_s[0]


@pytest.mark.parametrize("name", ["priority", "deadline"])
def test_the_highest_ranked_sequence_takes_a_slot_at_the_next_step(name: str) -> None:
    running = [Asked(num_prompt=16, num_output=200) for _ in range(SLOTS)]
    urgent = Asked(arrives_s=1.0, num_prompt=16, num_output=5, priority=-1, timeout_s=100.0)
    assert served([*running, urgent], make_policy(name)).answers[-1].completion_s < 7.5 * STEP_S
    assert served([*running, urgent], FirstCome()).answers[-1].completion_s > 100 * STEP_S


@pytest.mark.parametrize("name", ["fcfs", "shortest", "mlfq", "priority", "deadline"])
def test_the_batch_class_gives_its_slots_to_every_other_sequence(name: str) -> None:
    others = [Asked(arrives_s=0.5 + 0.3 * number, num_prompt=16, num_output=10) for number in range(20)]
    batch = [Asked(num_prompt=16, num_output=300, is_batch=True, priority=-9, timeout_s=60.0) for _ in range(SLOTS)]
    alone, beside = served(others, make_policy(name)), served([*batch, *others], make_policy(name))
    for answer, undisturbed in zip(beside.answers[len(batch) :], alone.answers, strict=True):
        assert answer.completion_s <= undisturbed.completion_s + 1.001 * STEP_S  # the step that ran when it came
    assert beside.output_rate > 1.5 * alone.output_rate
