"""Least squares with coefficients that are not negative."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.timing.least_squares import NormalEquations

_ROWS = st.lists(
    st.tuples(st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.floats(-1e3, 1e3)), max_size=12
)


def _product(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(c * feature for c, feature in zip(coefficients, features, strict=True))


def _equations(rows: Sequence[tuple[float, ...]]) -> NormalEquations:
    equations = NormalEquations(3)
    for *features, target in rows:
        equations.add(features, target, 1.0)
    return equations


def _error(rows: Sequence[tuple[float, ...]], coefficients: tuple[float, ...]) -> float:
    return sum((_product(row[:-1], coefficients) - row[-1]) ** 2 for row in rows)


@given(_ROWS)
@example([(0.0, 0.0, 7e-162, 1.0)])  # its square is the smallest number but one
def test_no_coefficients_that_are_not_negative_are_better(rows: list[tuple[float, ...]]) -> None:
    """No step along an axis improves the solution: it is the minimum, as the error is convex."""
    found = _equations(rows).solve()
    assert all(math.isfinite(c) and c >= 0 for c in found)
    least, size = _error(rows, found), sum(row[-1] ** 2 for row in rows)
    for axis, change in itertools.product(range(3), (1e-3, 1e-1, -1e-3, -1e-1)):
        other = list(found)
        other[axis] = max(0.0, other[axis] + change * max(1.0, other[axis]))
        assert _error(rows, tuple(other)) >= least - 1e-6 * (size + 1e-9)


def test_exact_measurements_give_the_exact_coefficients() -> None:
    true = (0.02, 6e-4, 1e-7)
    rows = [(1.0, n, n * c, _product(true, (1.0, n, n * c))) for n in (1, 64, 512) for c in (1, 100, 4000)]
    assert _equations(rows).solve() == pytest.approx(true, rel=1e-6)


def test_a_feature_that_would_need_a_negative_coefficient_gets_none() -> None:
    rows = [(1.0, float(x), 0.0, 10.0 - x) for x in range(5)]
    constant, slope, unseen = _equations(rows).solve()
    assert (slope, unseen) == (0.0, 0.0)
    assert constant == pytest.approx(8.0)


def test_equal_measurements_are_reproduced() -> None:
    coefficients = _equations([(1.0, 8.0, 800.0, 0.5)] * 4).solve()
    assert _product(coefficients, (1.0, 8.0, 800.0)) == pytest.approx(0.5)


def test_without_measurements_all_coefficients_are_zero() -> None:
    assert NormalEquations(3).solve() == (0.0, 0.0, 0.0)
