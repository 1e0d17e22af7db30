"""Prompts beside running sequences get the time of a step that the limit allows: the time between tokens is protected,
and every prompt progresses."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes, StepLimit, StepWork
from cluster.settings.worker_settings import SCHEDULING_POLICIES
from engine.scheduling.commands import LimitSteps
from engine.scheduling.policies import make_policy
from engine.scheduling.step import Chunk
from engine.timing.service_time_fit import step_work
from tests.examples import num_examples
from tests.unit.engine.scheduling.policies.decoding import (
    BLOCK_SIZE,
    Answered,
    Asked,
    Decoded,
    decode,
    limits,
    scheduler,
)
from tests.unit.engine.scheduling.policies.simulation import StepCost

COST = StepCost(fixed_s=0.010, token_s=0.0006)  # about this of a small model on one CPU core
TIMES = ServiceTimes(
    PrefillTimes(COST.fixed_s, COST.token_s, 0.0, 0.0), DecodeTimes(COST.fixed_s, COST.token_s, 0.0, 0.0)
)
QUIET_S = TIMES.step_s(8, 0)
RUNNING = [Asked(num_prompt=16, num_output=250) for _ in range(8)]


def run(
    asked: Sequence[Asked],
    *,
    target_s: float = 0.0,
    times: ServiceTimes | None = TIMES,
    policy: str = "fcfs",
    max_num_seqs: int = 32,
) -> Decoded:
    step_limit = StepLimit(target_s)
    allowed = replace(limits(max_num_seqs=max_num_seqs), step_limit=step_limit)
    return decode(
        sorted(asked, key=lambda one: one.arrives_s), scheduler(allowed, make_policy(policy), times=times), COST
    )


def gaps_s(answers: Sequence[Answered], from_s: float = 0.0) -> list[float]:
    """Return the times between tokens of all answers, after `from_s`."""
    pairs = (pair for answer in answers for pair in pairwise(answer.token_times_s))
    return [after - before for before, after in pairs if before >= from_s]


def ttft_s(answer: Answered) -> float:
    return answer.token_times_s[0] - answer.asked.arrives_s


def mixed(decoded: Decoded) -> list[tuple[float, StepWork]]:
    """Return the steps that compute prompts beside running sequences: the begin of each, and its work."""
    found = [(step.began_s, step_work(step.plan)) for step in decoded.steps]
    return [(began_s, work) for began_s, work in found if work is not None and work.is_mixed]


def test_a_prompt_delays_tokens_by_half_a_quiet_step_while_it_is_young() -> None:
    asked = [*RUNNING, Asked(arrives_s=1.0, num_prompt=80, num_output=2)]
    decoded = run(asked)
    assert max(gaps_s(decoded.answers[:8], 0.5)) <= 1.5 * QUIET_S + BLOCK_SIZE * COST.token_s
    assert max(gaps_s(run(asked, times=None).answers[:8], 0.5)) > 4 * QUIET_S


def test_a_prompt_takes_at_most_three_times_as_long_as_alone() -> None:
    """Prompts get a third of the time at once, and more with age."""
    for num_prompt in (80, 200, 500, 2000):
        decoded = run([*RUNNING, Asked(arrives_s=1.0, num_prompt=num_prompt, num_output=2)])
        assert ttft_s(decoded.answers[8]) <= 3.0 * TIMES.prefill_s(num_prompt) + QUIET_S


def test_a_target_for_the_time_per_token_replaces_the_factor() -> None:
    asked = [*RUNNING, Asked(arrives_s=1.0, num_prompt=200, num_output=2)]
    decoded = run(asked, target_s=0.060)
    assert 0.040 <= max(gaps_s(decoded.answers[:8], 0.5)) <= 0.75 * 0.060 + 1e-9
    assert ttft_s(decoded.answers[8]) < ttft_s(run(asked).answers[8])


def test_another_target_holds_from_the_next_step_on() -> None:
    changed = scheduler(limits(max_num_seqs=32), make_policy("fcfs"), times=TIMES)
    changed.apply(LimitSteps(StepLimit(0.060)), 0.0)
    decoded = decode([*RUNNING, Asked(arrives_s=1.0, num_prompt=200, num_output=2)], changed, COST)
    assert 0.040 <= max(gaps_s(decoded.answers[:8], 0.5)) <= 0.75 * 0.060 + 1e-9


def test_below_the_time_of_a_quiet_step_a_prompt_still_gets_a_block_per_step() -> None:
    decoded = run([*RUNNING, Asked(arrives_s=1.0, num_prompt=96, num_output=2)], target_s=0.001)
    sizes = [work.num_new for began_s, work in mixed(decoded) if began_s >= 1.0]
    assert min(sizes) >= BLOCK_SIZE
    assert sum(sizes) == 96


def test_a_worker_without_running_sequences_uses_the_whole_budget() -> None:
    steps = run([Asked(num_prompt=1536, num_output=1)]).steps
    assert [step.num_tokens for step in steps] == [512, 512, 512]


def test_the_batch_class_is_not_protected() -> None:
    asked = [replace(one, is_batch=True) for one in RUNNING] + [Asked(arrives_s=1.0, num_prompt=500, num_output=1)]
    assert max(work.num_new for _, work in mixed(run(asked))) == 500


def test_no_step_ends_a_prompt_with_less_than_a_block() -> None:
    for num_prompt in range(70, 130, 12):
        decoded = run([*RUNNING, Asked(arrives_s=1.0, num_prompt=num_prompt, num_output=1)])
        sizes = [work.num_new for began_s, work in mixed(decoded) if began_s >= 1.0]
        assert sum(sizes) == num_prompt
        assert sizes[-1] >= BLOCK_SIZE


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_prompts_are_computed_as_fast_as_they_arrive(load: float) -> None:
    """Sequences run all the time, and the prompts alone need this share of the worker's time. With a fixed limit of 1.5
    quiet steps they would get a third of it, and their queue would grow without end."""
    alone_s = 512 * COST.token_s
    endless = [Asked(num_prompt=16, num_output=3000) for _ in range(2)]
    prompts = [Asked(arrives_s=1 + number * alone_s / load, num_prompt=512, num_output=1) for number in range(60)]
    decoded = run([*endless, *prompts])
    waits = [ttft_s(answer) for answer in decoded.answers if answer.asked.num_output == 1]
    assert max(waits[30:]) <= 1.1 * max(waits[:30])  # steady
    # Where prompts need the share `load`, they get it at this age, by which the prompt before must have ended.
    assert max(waits) <= max(3.5 * alone_s, (load / (1 - load) + 3) * alone_s)


def test_prompts_that_waited_for_slots_begin_as_young_ones() -> None:
    asked = [*RUNNING[:7], Asked(num_prompt=16, num_output=300), Asked(arrives_s=1.0, num_prompt=80, num_output=2)]
    decoded = run(asked, max_num_seqs=8)
    waited = decoded.answers[8]
    assert ttft_s(waited) > 2.0
    assert max(gaps_s(decoded.answers[:7], 0.5)) <= 1.5 * QUIET_S + BLOCK_SIZE * COST.token_s


_PROMPTS = st.builds(
    Asked,
    arrives_s=st.floats(0, 3),
    num_prompt=st.integers(1, 900),
    num_output=st.integers(1, 30),
    is_batch=st.sampled_from([False, False, True]),
)


@settings(max_examples=num_examples(suite=8, search=25), deadline=None)
@given(
    asked=st.lists(_PROMPTS, min_size=1, max_size=12),
    target_s=st.sampled_from([0.0, 0.001, 0.02, 0.1]),
    policy=st.sampled_from(SCHEDULING_POLICIES),
    max_num_seqs=st.integers(2, 16),
)
def test_no_step_exceeds_its_limit_and_every_prompt_ends(
    asked: list[Asked], target_s: float, policy: str, max_num_seqs: int
) -> None:
    decoded = run(asked, target_s=target_s, policy=policy, max_num_seqs=max_num_seqs)  # fails if a sequence never ends
    assert decoded.inspected.violation == ""
    limit = StepLimit(target_s)
    for step in decoded.steps:
        running = [chunk for chunk in step.plan.chunks if chunk.start >= _prompt_length(decoded, chunk)]
        if all(decoded.answers[chunk.samples[0].seed].asked.is_batch for chunk in running):
            continue
        waiting = [a.asked for a in decoded.answers if a.asked.arrives_s <= step.began_s < a.token_times_s[0]]
        oldest_s = max((step.began_s - one.arrives_s for one in waiting), default=0.0)
        # With no time alone the patience is shortest, and waiting for slots may count less: this is the largest limit.
        most_s = limit.seconds(TIMES.step_s(len(running), 0), oldest_s, 0.0)
        # The floor: a block of the first prompt, and less than a block that ends a prompt.
        num_ending = sum(bool(chunk.samples) for chunk in step.plan.chunks if chunk not in running)
        num_above_floor = step.num_tokens - len(running) - BLOCK_SIZE - (BLOCK_SIZE - 1) * num_ending
        assert num_above_floor <= 0 or COST.seconds(len(running) + num_above_floor) <= most_s + 1e-9


def _prompt_length(decoded: Decoded, chunk: Chunk) -> float:
    """Return the length of the chunk's prompt; infinite for a chunk that does not end its prompt."""
    return decoded.answers[chunk.samples[0].seed].asked.num_prompt if chunk.samples else math.inf
