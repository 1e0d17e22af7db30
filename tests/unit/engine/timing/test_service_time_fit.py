"""Tests of a worker's models of its own speed: exact without noise, near with noise, and quick to follow a change."""

import math
import random
from collections.abc import Callable, Sequence
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages import Sampling
from cluster.service_times import (
    DecodeTimes,
    MixedTimes,
    PrefillTimes,
    ServiceTimes,
    StepWork,
    TimedStep,
    attended_tokens,
)
from engine.scheduling.step import BlockSwap, Chunk, Sample, StepPlan
from engine.timing.service_time_fit import IDLE_S, ServiceTimeFit, TypicalSteps, step_work
from tests.examples import num_examples

TRUE = ServiceTimes(PrefillTimes(0.02, 6e-4, 1e-7, 0.0), DecodeTimes(0.01, 8e-4, 2e-6, 0.0))


def prefill(num_new: int, context: int) -> StepWork:
    return StepWork(num_new=num_new, attended=attended_tokens(num_new, context))


def decode(batch: int, length: int) -> StepWork:
    return StepWork(batch=batch, context=batch * length)


def mixed(num_new: int, context: int, batch: int, length: int) -> StepWork:
    return StepWork(num_new, attended_tokens(num_new, context), batch, batch * length)


PREFILLS = [prefill(num_new, context) for num_new in (16, 64, 256, 512) for context in (0, 512, 2048)]
DECODES = [decode(batch, length) for batch in (1, 4, 16, 64) for length in (16, 256, 1024)]
AT_LOAD = [prefill(16, 0), prefill(64, 0), prefill(64, 256), decode(1, 16), decode(8, 16), decode(8, 256)]


def exact(work: StepWork) -> float:
    return TRUE.seconds(work)


def noisy(chance: random.Random, sigma: float) -> Callable[[StepWork], float]:
    """Return steps with a relative error of `sigma` whose median is the true time."""
    return lambda work: exact(work) * math.exp(chance.gauss(0, sigma))


def started(time_of: Callable[[StepWork], float] = exact) -> ServiceTimeFit:
    fit = ServiceTimeFit()
    fit.start([TimedStep(work, time_of(work)) for work in AT_LOAD])
    return fit


def run(fit: ServiceTimeFit, works: Sequence[StepWork], time_of: Callable[[StepWork], float]) -> None:
    for work in works:
        fit.add(TimedStep(work, time_of(work)))


def times_of(fit: ServiceTimeFit) -> ServiceTimes:
    assert fit.times is not None
    return fit.times


def errors(fit: ServiceTimeFit, works: Sequence[StepWork], factor: float = 1.0) -> list[float]:
    return [abs(times_of(fit).seconds(work) / (factor * exact(work)) - 1) for work in works]


_SMALL = st.floats(1e-6, 1e-1)


@settings(max_examples=num_examples(suite=5, search=15))
@given(st.tuples(_SMALL, _SMALL, _SMALL), st.tuples(_SMALL, _SMALL, _SMALL), st.randoms(use_true_random=False))
def test_steps_without_noise_give_the_exact_times_from_any_start(
    of_prefill: tuple[float, float, float], of_decode: tuple[float, float, float], chance: random.Random
) -> None:
    true = ServiceTimes(PrefillTimes(*of_prefill, 0.0), DecodeTimes(*of_decode, 0.0))
    fit = ServiceTimeFit()
    works = [*PREFILLS, *DECODES] * 40
    chance.shuffle(works)
    run(fit, works, true.seconds)
    for work in (*PREFILLS, *DECODES):
        assert times_of(fit).seconds(work) == pytest.approx(true.seconds(work), rel=0.02)


def test_the_first_step_is_predicted_from_the_steps_at_load() -> None:
    fit = started()
    assert max(errors(fit, [*PREFILLS, *DECODES])) < 1e-6
    assert times_of(fit).prefill.relative_error < 1e-6 and times_of(fit).decode.relative_error < 1e-6


def test_nothing_is_predicted_before_both_kinds_of_steps_were_measured() -> None:
    fit = ServiceTimeFit()
    assert fit.times is None
    run(fit, [StepWork(), prefill(16, 0)], exact)
    assert fit.times is None
    run(fit, [decode(1, 16)], exact)
    assert times_of(fit).seconds(decode(1, 16)) == pytest.approx(exact(decode(1, 16)))


@pytest.mark.parametrize("seed", range(10))
def test_noise_of_twenty_percent_changes_predictions_by_less_than_ten(seed: int) -> None:
    chance = random.Random(seed)
    fit = started(noisy(chance, 0.2))
    run(fit, chance.choices([*PREFILLS, *DECODES], k=400), noisy(chance, 0.2))
    assert median(errors(fit, [*PREFILLS, *DECODES])) < 0.10
    assert 0.08 < times_of(fit).decode.relative_error < 0.25


@pytest.mark.parametrize("seed", range(10))
def test_pauses_of_the_process_change_predictions_by_a_bounded_amount(seed: int) -> None:
    """Every twentieth step takes ten to a thousand times as long as it should."""
    chance = random.Random(seed)
    fit = started()

    def paused(work: StepWork) -> float:
        pause = 10 ** chance.uniform(1, 3) if chance.random() < 0.05 else 1.0
        return noisy(chance, 0.1)(work) * pause

    run(fit, chance.choices([*PREFILLS, *DECODES], k=400), paused)
    assert median(errors(fit, [*PREFILLS, *DECODES])) < 0.25


@pytest.mark.parametrize("seed", range(10))
def test_one_pause_changes_predictions_by_less_than_a_quarter(seed: int) -> None:
    chance = random.Random(seed)
    fit = started()
    run(fit, chance.choices([*PREFILLS, *DECODES], k=200), exact)
    fit.add(TimedStep(decode(4, 256), 60.0))
    assert max(errors(fit, [*PREFILLS, *DECODES])) < 0.25


@pytest.mark.parametrize("num_before", [0, 10, 100])
@pytest.mark.parametrize("first", [prefill(512, 0), prefill(512, 2048), prefill(2048, 0)])
def test_a_pause_at_the_first_step_of_a_size_does_not_change_its_predictions(first: StepWork, num_before: int) -> None:
    """The worker would seem slow for such steps only, and would get no other one that corrects it."""
    fit = started()
    small = [prefill(16, 0), prefill(64, 0), *DECODES]
    run(fit, random.Random(1).choices(small, k=num_before), exact)
    fit.add(TimedStep(first, 30.0))
    run(fit, small * 2, exact)
    assert max(errors(fit, [first, *PREFILLS, *DECODES])) < 0.02
    run(fit, [first], exact)
    assert max(errors(fit, [first, *PREFILLS, *DECODES])) < 0.02


def test_a_size_that_takes_longer_than_expected_is_predicted_by_its_steps_from_the_second_one_on() -> None:
    fit, larger = started(), prefill(2048, 0)
    run(fit, [prefill(64, 0)] * 10, exact)
    run(fit, [larger] * 2, lambda work: 4 * exact(work))
    assert times_of(fit).seconds(larger) > 2 * exact(larger)
    run(fit, [larger] * 20, lambda work: 4 * exact(work))
    assert max(errors(fit, [larger], factor=4.0)) < 0.1


@pytest.mark.parametrize("works", [PREFILLS, DECODES, [decode(8, 256)]], ids=["prompts", "batches", "one size"])
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_worker_whose_speed_changes_is_followed_within_eight_steps_for_steps_of_every_size(
    works: list[StepWork], factor: float
) -> None:
    chance = random.Random(7)
    fit = started()
    run(fit, chance.choices(works, k=100), exact)
    run(fit, chance.choices(works, k=8), lambda work: factor * exact(work))
    same_kind = PREFILLS if works is PREFILLS else DECODES
    assert max(errors(fit, same_kind, factor)) < 0.10


def test_a_slowdown_under_noise_is_followed_within_thirty_steps() -> None:
    for seed in range(10):
        chance = random.Random(seed)
        fit = started()
        time_of = noisy(chance, 0.2)
        run(fit, chance.choices(DECODES, k=200), time_of)
        for work in chance.choices(DECODES, k=30):
            fit.add(TimedStep(work, 2 * time_of(work)))
        assert median(times_of(fit).seconds(work) / exact(work) for work in DECODES) > 1.6


def test_a_worker_that_was_slow_reports_its_quickest_speed_once_it_has_been_idle() -> None:
    fit = started()
    run(fit, [*PREFILLS, *DECODES] * 3, exact)
    run(fit, [*PREFILLS, *DECODES] * 2, lambda work: 3 * exact(work))
    for idle_s, factor in ((0.0, 3.0), (IDLE_S - 0.1, 3.0), (IDLE_S, 1.0)):
        reported = fit.times_after(idle_s)
        assert reported is not None
        for work in (*PREFILLS, *DECODES):
            assert reported.seconds(work) == pytest.approx(factor * exact(work), rel=0.1)


def test_a_worker_that_became_quicker_reports_that_speed_when_idle_too() -> None:
    fit = started()
    run(fit, DECODES * 5, exact)
    run(fit, DECODES * 5, lambda work: exact(work) / 2)
    reported = fit.times_after(IDLE_S)
    assert reported is not None
    assert reported.seconds(DECODES[5]) == pytest.approx(exact(DECODES[5]) / 2, rel=0.1)


def test_a_worker_that_decoded_one_sequence_for_long_still_predicts_batches() -> None:
    chance = random.Random(3)
    fit = started()
    run(fit, chance.choices(DECODES, k=200), noisy(chance, 0.1))
    run(fit, [decode(1, 20)] * 20_000, noisy(chance, 0.1))
    assert max(errors(fit, DECODES)) < 0.15


def test_equal_steps_are_predicted_and_larger_ones_take_no_less_and_at_most_in_proportion() -> None:
    fit = ServiceTimeFit()
    run(fit, [prefill(64, 0), decode(4, 100)] * 50, exact)
    times = times_of(fit)
    assert times.step_s(4, 400) == pytest.approx(exact(decode(4, 100)), rel=1e-6)
    assert times.step_s(4, 400) <= times.step_s(40, 4000) <= 10 * times.step_s(4, 400) * (1 + 1e-9)
    assert times.prefill_s(64) == pytest.approx(exact(prefill(64, 0)), rel=1e-6)


_TIMED = st.builds(
    TimedStep,
    st.builds(mixed, st.integers(0, 600), st.integers(0, 1 << 20), st.integers(0, 300), st.integers(1, 1 << 20)),
    st.floats(0.0, 1e6),
)


@settings(max_examples=num_examples(suite=20, search=60))
@given(st.lists(_TIMED, max_size=80))
def test_any_steps_give_finite_predictions_that_never_fall_with_more_work(steps: list[TimedStep]) -> None:
    fit = started()
    for step in steps:
        fit.add(step)
    times = times_of(fit)
    for less, more in ((prefill(1, 0), prefill(512, 4096)), (decode(1, 1), decode(64, 4096))):
        assert 0 <= times.seconds(less) <= times.seconds(more) < math.inf
        both = StepWork(more.num_new + 1, more.attended + 1, more.batch + 1, more.context + 1)
        assert times.seconds(more) * (1 - 1e-9) <= times.seconds(both) < math.inf


def test_a_mixed_step_is_predicted_from_its_parts_and_then_from_mixed_steps() -> None:
    fit, work = started(), mixed(128, 0, 8, 256)
    assert times_of(fit).mixed is None
    assert times_of(fit).seconds(work) == pytest.approx(exact(work))
    run(fit, [work] * 20, lambda work: 1.5 * exact(work))
    assert times_of(fit).seconds(work) == pytest.approx(1.5 * exact(work), rel=0.01)
    other = mixed(64, 512, 16, 100)
    assert times_of(fit).seconds(other) == pytest.approx(1.5 * exact(other), rel=0.01)
    assert isinstance(times_of(fit).mixed, MixedTimes)


@pytest.mark.parametrize("num_slow", [1, 2])
def test_mixed_steps_that_are_slow_once_do_not_change_the_factor(num_slow: int) -> None:
    """The first steps of a kind may compile kernels. A worker whose factor they set gets no others."""
    fit, work = started(), mixed(128, 0, 8, 256)
    run(fit, [work] * num_slow, lambda work: 30.0)
    assert times_of(fit).seconds(work) == pytest.approx(exact(work))
    run(fit, [work] * 20, lambda work: 1.5 * exact(work))
    assert times_of(fit).seconds(work) == pytest.approx(1.5 * exact(work), rel=0.01)


def test_a_model_that_is_measured_by_one_step_of_each_kind_predicts_long_prompts_about_in_proportion() -> None:
    """Predictions that are far too late refuse a request, and a worker without requests never corrects them."""
    fit = ServiceTimeFit()
    fit.start([TimedStep(prefill(16, 0), 0.4), TimedStep(decode(1, 16), 0.2)])
    for num_tokens in (64, 512, 2048, 8192):
        assert 0.1 < times_of(fit).prefill_s(num_tokens) / (0.4 * num_tokens / 16) < 1.0
    assert times_of(fit).step_s(1, 4096) < 0.5


def _chunk(start: int, num_tokens: int, num_draft_tokens: int = 0) -> Chunk:
    samples = (Sample(0, start + num_tokens, Sampling()),)
    return Chunk(0, (1,) * num_tokens, start, (0,), samples, num_draft_tokens)


def test_a_plan_is_read_as_new_tokens_batch_and_context() -> None:
    plan = StepPlan((_chunk(9, 1), _chunk(99, 1), _chunk(40, 3), _chunk(0, 16)))
    assert step_work(plan) == StepWork(num_new=19, attended=41 + 42 + 43 + 136, batch=2, context=110)


def test_draft_tokens_count_as_rows_of_the_batch() -> None:
    assert step_work(StepPlan((_chunk(10, 4, num_draft_tokens=3),))) == StepWork(batch=4, context=4 * 14)


def test_a_step_that_copies_to_host_memory_is_not_measured() -> None:
    assert step_work(StepPlan((_chunk(9, 1),), swaps_out=(BlockSwap(0, 0),))) is None


def test_a_typical_step_is_reported_once_enough_steps_were_measured() -> None:
    fit = started()
    for number in range(4 * 32):
        assert fit.times is not None and fit.times.typical_decode is None, f"after {number} steps"
        fit.add(TimedStep(decode(4, 256), 0.02))
    fit.add(TimedStep(decode(4, 256), 0.02))
    assert fit.times is not None and fit.times.typical_decode is not None
    assert fit.times.typical_decode.work == decode(4, 256)
    assert fit.times.typical_decode.seconds == pytest.approx(0.02)
    assert fit.times.typical_prefill is None
    idle = fit.times_after(IDLE_S)
    assert idle is not None and idle.typical_decode == fit.times.typical_decode


def test_a_typical_step_shows_a_part_of_a_core_and_not_one_long_pause() -> None:
    """Every third step of one worker takes five times as long; another one stands still once, for a whole minute."""
    shared, paused = TypicalSteps(12), TypicalSteps(12)
    for number in range(60):
        shared.add(TimedStep(decode(1, 16), 0.25 if number % 3 == 0 else 0.05))
        paused.add(TimedStep(decode(1, 16), 60.0 if number == 20 else 0.05))
    assert shared.newest is not None and paused.newest is not None
    assert shared.newest.seconds == pytest.approx((0.25 + 2 * 0.05) / 3)
    assert paused.newest.seconds == pytest.approx(0.05)


def test_quick_steps_are_not_compared_before_they_have_taken_two_seconds() -> None:
    steps = TypicalSteps(32)
    for number in range(2000):
        assert steps.newest is None, f"after {number} steps"
        steps.add(TimedStep(decode(1, 16), 0.001001))
    assert steps.newest is not None
