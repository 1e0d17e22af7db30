"""The figures of `make bench-router`, from rounds whose costs are known."""

import pytest

from benchmarks.router.figures import Pair, Round, interval, percentile, ratio


def _pair(token_us: float, request_ms: float) -> Pair:
    def round_of(max_tokens: int, num_requests: int) -> Round:
        return Round(num_requests, max_tokens, num_requests * (1e-3 * request_ms + 1e-6 * token_us * max_tokens), 0.0)

    return Pair(round_of(16, 256), round_of(208, 64))


def test_the_slope_and_the_rest_are_the_costs_of_a_token_and_a_request() -> None:
    pair = _pair(token_us=50.0, request_ms=3.0)
    assert pair.token_us == pytest.approx(50.0)
    assert pair.request_ms == pytest.approx(3.0)
    assert pair.all_in_us == pytest.approx(50.0 + 3000.0 / 64)


def test_ratios_compare_the_pairs_of_the_same_turn() -> None:
    ours, theirs = [_pair(10.0, 1.0), _pair(20.0, 1.0)], [_pair(20.0, 1.0), _pair(40.0, 1.0)]
    assert ratio(ours, theirs, lambda pair: pair.token_us) == pytest.approx((0.5, 0.5, 0.5))


def test_an_interval_contains_its_median() -> None:
    median, low, high = interval([3.0, 1.0, 2.0, 5.0, 4.0])
    assert low <= median == 3.0 <= high


def test_a_percentile_of_few_values_is_the_largest() -> None:
    assert percentile([2.0, 1.0], 0.99) == 2.0
