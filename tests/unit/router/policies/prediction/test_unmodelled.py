"""Tests of corrections that are learned from requests: outliers have no effect, corrections are bounded, and old
observations fade.
"""

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.prediction.unmodelled import (
    NOTHING_UNMODELLED,
    DecodeSpan,
    ModelledRequest,
    Unmodelled,
    UnmodelledTimes,
)

REAL_S = st.floats(-1e6, 1e6, allow_nan=False)


def taught(excess_s: list[float], *, is_export: bool = False) -> UnmodelledTimes:
    times = UnmodelledTimes()
    for number, excess in enumerate(excess_s):
        times.record_ttft(1.0, 1.0 + excess, float(number), is_export=is_export)
    return times


def test_the_first_two_requests_change_nothing() -> None:
    assert taught([0.01, 0.01]).at(2.0) == NOTHING_UNMODELLED
    assert taught([0.01, 0.01, 0.01]).at(2.0).here_s == pytest.approx(0.01)


def test_single_requests_that_waited_long_change_nothing() -> None:
    assert taught([0.01, 5.0, 0.01, 0.02, 7.0, 0.01, 0.02]).at(6.0).here_s == pytest.approx(0.02)


def test_a_change_is_followed_within_eleven_requests() -> None:
    assert taught([0.01] * 40 + [0.03] * 11).at(50.0).here_s == pytest.approx(0.03)


def test_prompts_for_export_and_prompts_that_are_decoded_here_are_kept_apart() -> None:
    times = taught([0.02] * 5, is_export=True)
    assert (times.at(5.0).here_s, times.at(5.0).export_s) == pytest.approx((0.0, 0.02))


def test_figures_of_a_worker_older_than_two_minutes_are_forgotten() -> None:
    times = taught([0.5] * 10)
    assert times.at(100.0).here_s == pytest.approx(0.5)
    assert times.at(130.0) == NOTHING_UNMODELLED


def test_the_factor_of_the_time_between_tokens_is_that_of_the_median_request() -> None:
    times = UnmodelledTimes()
    for number, real_s in enumerate((0.011, 0.012, 0.013, 0.09, 0.012)):
        times.record_itl(0.01, real_s, float(number))
    times.record_itl(0.0, 0.01, 5.0)  # nothing was modelled
    assert times.at(5.0).itl_factor == pytest.approx(1.2)


@given(excess_s=st.lists(REAL_S, max_size=50), factors=st.lists(st.floats(0, 1e9), max_size=50))
def test_the_learned_corrections_are_always_within_bounds(excess_s: list[float], factors: list[float]) -> None:
    times = taught(excess_s)
    for number, factor in enumerate(factors):
        times.record_itl(1.0, factor, float(number))
    unmodelled = times.at(50.0)
    assert 0.0 <= unmodelled.here_s <= 1.0
    assert 0.5 <= unmodelled.itl_factor <= 4.0


def _decoded(seconds: list[float]) -> DecodeSpan:
    span = DecodeSpan()
    for each in seconds:
        span.add(each)
    return span


def _itl_factor(intervals_s: list[float], modelled_s: float = 0.01) -> float:
    """Return what is learned from twenty sequences that ran together with these times between their tokens."""
    times = UnmodelledTimes()
    for number in range(20):
        request = ModelledRequest(0.3, modelled_s, sent_s=number / 100, computes=times, decodes=times)
        request.record_end(_decoded(intervals_s), 10.0 + number / 100)
    return times.at(11.0).itl_factor


def test_a_pause_of_the_worker_is_not_learned_as_the_speed_of_all_sequences_that_it_delayed() -> None:
    assert _itl_factor([0.01] * 99 + [1.5]) == pytest.approx(1.0), "the mean is 2.5 times the modelled time"
    assert _itl_factor([0.02] * 99 + [1.5]) == pytest.approx(2.0), "the worker is slower, too"


def test_stalls_that_come_again_and_slow_models_are_learned() -> None:
    assert _itl_factor([0.01] * 95 + [0.6] * 5) == pytest.approx(0.01 * 95 / 99 / 0.01 + 0.6 * 4 / 99 / 0.01)
    assert _itl_factor([0.3] * 90 + [1.0] * 10, modelled_s=0.3) == pytest.approx((0.27 + 0.1) / 0.3)


def _served(times: UnmodelledTimes, sent_s: float, late_s: float, itl_s: float = 0.01) -> None:
    request = ModelledRequest(0.3, 0.01, sent_s=sent_s, computes=times, decodes=times)
    request.record_first_token(sent_s + 0.3 + late_s)
    request.record_end(_decoded([itl_s] * 10), sent_s + 0.4 + late_s)


@pytest.mark.parametrize("num_before", [0, 21])
def test_a_pause_that_delays_all_requests_of_a_worker_changes_nothing(num_before: int) -> None:
    """The worker stands still for 5 s with 20 requests; then it may get no others that show its speed."""
    times = UnmodelledTimes()
    for number in range(num_before):
        _served(times, float(number), late_s=0.02)
    for number in range(20):
        _served(times, 30.0 + number / 10, late_s=5.0 - number / 10, itl_s=0.09)
    known = times.at(40.0)
    assert (known.here_s, known.itl_factor) == pytest.approx((0.02 if num_before else 0.0, 1.0))


def test_a_worker_that_stays_late_is_known_as_late() -> None:
    times = UnmodelledTimes()
    for number in range(3):
        _served(times, 10.0 * number, late_s=5.0, itl_s=0.09)
    assert astuple(times.at(30.0)) == pytest.approx(astuple(Unmodelled(here_s=1.0, itl_factor=4.0)))


def test_a_request_updates_the_models_of_the_workers_that_computed_and_decoded_it() -> None:
    computes, decodes = UnmodelledTimes(), UnmodelledTimes()
    for number in range(3):
        request = ModelledRequest(0.3, 0.01, sent_s=float(number), computes=computes, decodes=decodes)
        request.record_first_token(number + 0.34)
        request.record_end(_decoded([0.015] * 10), number + 0.9)
    assert astuple(computes.at(3.0)) == pytest.approx(astuple(Unmodelled(export_s=0.04)))
    assert astuple(decodes.at(3.0)) == pytest.approx(astuple(Unmodelled(itl_factor=1.5)))
