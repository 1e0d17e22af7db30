"""Service times that differ by chance are taken together; those of a worker that is clearly slower are its own."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.placement.simulation import Simulation
from benchmarks.placement.workload import Workload, poisson_arrivals
from benchmarks.placement_simulated import SETTING, TIMES
from cluster.messages import MemberId, Role
from cluster.service_times import (
    DecodeTimes,
    MixedTimes,
    PrefillTimes,
    ServiceTimes,
    StepLimit,
    StepWork,
    TimedStep,
    attended_tokens,
)
from router.policies.placement import PrefixAware
from router.policies.prediction.speeds import Speeds, shared
from router.policies.slo_aware import SloAware
from tests.unit.benchmarks.test_simulated_placement import COLOCATED, SEPARATE, Arm, attainment, targets_of

_NAMES = [MemberId(f"w{number}", "1") for number in range(4)]


def _times(prefill: float = 1.0, decode: float | None = None, mixed: float | None = None) -> ServiceTimes:
    """Return the times of a worker that takes this many times as long."""
    decode = prefill if decode is None else decode
    return ServiceTimes(
        PrefillTimes(0.004 * prefill, 0.0005 * prefill, 2e-7 * prefill, 0.1),
        DecodeTimes(0.008 * decode, 0.0007 * decode, 1e-6 * decode, 0.1),
        MixedTimes(mixed, 0.1) if mixed is not None else None,
        typical_prefill=TimedStep(StepWork(num_new=256, attended=attended_tokens(256, 0.0)), 0.14 * prefill),
        typical_decode=TimedStep(StepWork(batch=8, context=4096), 0.018 * decode),
    )


def _seconds(times: ServiceTimes) -> tuple[float, float]:
    return times.prefill_s(512), times.step_s(8, 4096)


def test_workers_of_about_the_same_speed_have_the_mean_of_their_models() -> None:
    quick, slow = shared([_times(0.95), _times(1.05)])
    assert _seconds(quick) == _seconds(slow) == pytest.approx(_seconds(_times()))


def test_a_worker_that_needs_twice_as_long_keeps_its_model_and_changes_no_other_one() -> None:
    a, b, slow = shared([_times(0.95), _times(1.05), _times(2.0)])
    assert _seconds(a) == _seconds(b) == pytest.approx(_seconds(_times()))
    assert slow == _times(2.0)


def test_a_worker_that_has_measured_little_must_be_slower_by_more() -> None:
    """Its few steps were measured at its start, and others that started beside it can only have made them slower."""
    new = replace(_times(1.9), typical_prefill=None, typical_decode=None)
    old, believed = shared([_times(), new])
    assert _seconds(believed) == _seconds(old) == _seconds(_times())
    much_slower = replace(_times(4.0), typical_prefill=None, typical_decode=None)
    assert shared([_times(), much_slower])[1] == much_slower
    quicker = replace(_times(0.6), typical_prefill=None, typical_decode=None)
    assert shared([_times(), _times(), quicker])[2] == quicker


def test_prompts_and_decoding_are_compared_apart() -> None:
    one, other = shared([_times(1.0, 1.0), _times(1.1, 3.0)])
    assert one.prefill == other.prefill
    assert (one.decode, other.decode) == (_times(1.0).decode, _times(3.0).decode)


def test_a_worker_without_a_measured_mixed_step_gets_the_factor_of_the_others() -> None:
    one, other, new = shared([_times(mixed=1.0), _times(mixed=1.2), _times()])
    assert [each.mixed.factor for each in (one, other, new) if each.mixed] == pytest.approx([1.1] * 3)
    assert [each.mixed for each in shared([_times(), _times()])] == [None, None]
    assert shared([_times(), _times(3.0, mixed=2.0)])[0].mixed is None


def test_workers_are_compared_by_steps_of_the_size_that_they_compute() -> None:
    """Fits to steps of one size differ where they are extrapolated."""
    steep = replace(_times(), prefill=PrefillTimes(0.0, 0.0011, 0.0, 0.1))
    flat = replace(_times(), prefill=PrefillTimes(0.1, 0.0001, 0.0, 0.1))
    assert steep.prefill.seconds(100, 0.0) == pytest.approx(flat.prefill.seconds(100, 0.0))
    one, other = shared([steep, flat])  # typical steps compute 256 tokens
    assert (one.prefill, other.prefill) == (steep.prefill, flat.prefill)
    typical = TimedStep(StepWork(num_new=100, attended=0.0), 0.11)
    one, other = shared([replace(steep, typical_prefill=typical), replace(flat, typical_prefill=typical)])
    assert one.prefill == other.prefill


@given(st.floats(0.2, 5.0), st.floats(1.0, 1.02))
def test_a_small_change_of_a_worker_changes_all_models_by_little_and_a_slower_one_is_never_believed_quicker(
    slowness: float, growth: float
) -> None:
    before = shared([_times(), _times(slowness)])
    after = shared([_times(), _times(slowness * growth)])
    for was, now in zip(before, after, strict=True):
        assert _seconds(now)[0] == pytest.approx(_seconds(was)[0], rel=6 * (growth - 1) + 1e-9)
    ratio = _seconds(after[1])[0] / _seconds(after[0])[0]
    assert ratio >= 1 - 1e-9 if slowness >= 1 else ratio <= growth + 1e-9


def test_workers_alone_and_service_times_of_zero_are_left_as_they_are() -> None:
    zero = ServiceTimes(PrefillTimes(0.0, 0.0, 0.0, 0.0), DecodeTimes(0.0, 0.0, 0.0, 0.0))
    assert shared([]) == []
    assert shared([_times(3.0)]) == [_times(3.0)]
    assert shared([zero, zero]) == [zero, zero]


def test_models_are_computed_again_after_a_report_and_at_once_for_other_workers() -> None:
    speeds, reported = Speeds(), dict(zip(_NAMES, (_times(0.9), _times(1.1)), strict=False))
    first = speeds.believed(dict(reported), 10.0)
    assert speeds.believed(dict(reported), 20.0) is first
    reported[_NAMES[1]] = _times(0.9)
    assert _seconds(speeds.believed(reported, 20.0)[_NAMES[0]]) == pytest.approx(_seconds(_times(0.9)))
    reported[_NAMES[1]] = _times(1.1)
    assert _seconds(speeds.believed(reported, 20.4)[_NAMES[0]]) == pytest.approx(_seconds(_times(0.9)))
    assert _seconds(speeds.believed(reported, 20.5)[_NAMES[0]]) == pytest.approx(_seconds(_times()))
    del reported[_NAMES[0]]
    assert speeds.believed(reported, 20.5) == {_NAMES[1]: _times(1.1)}


@pytest.mark.parametrize("seed", [2, 4])
def test_models_that_are_wrong_by_chance_cost_no_targets(seed: int) -> None:
    """Each worker by its own model: 92 and 87 % instead of 99 and 95."""
    workload, rate_rps, num_requests = Workload(64, 128), 4.0, 150
    targets, wrong = targets_of(workload), {Role.PREFILL: (1.0, 1.12), Role.DECODE: (1.0, 0.92)}

    def kept(policy: PrefixAware | SloAware, arm: Arm, target_s: float) -> float:
        limited = replace(SETTING, step_limit=StepLimit(target_s))
        workers = [replace(limited, role=role, reported=_scaled(TIMES, *off)) for role, off in wrong.items()]
        arrivals = poisson_arrivals(workload, rate_rps, num_requests, Random(seed))
        return attainment(Simulation(policy, workers, *arm).run(arrivals), targets)

    auto = kept(SloAware(targets, Random(1).random), SEPARATE, targets.itl_s)
    assert auto >= kept(PrefixAware(), COLOCATED, 0.0) - 0.02


def _scaled(times: ServiceTimes, prefill: float, decode: float) -> ServiceTimes:
    computing, decoding = times.prefill, times.decode
    return replace(
        times,
        prefill=PrefillTimes(
            prefill * computing.step_s, prefill * computing.per_token_s, prefill * computing.per_token_context_s, 0.1
        ),
        decode=DecodeTimes(
            decode * decoding.step_s, decode * decoding.per_sequence_s, decode * decoding.per_context_token_s, 0.1
        ),
    )
