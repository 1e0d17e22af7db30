"""Least-squares problems with few features, in which old measurements fade, and whose coefficients are not negative.
Pure.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations

_RIDGE = 1e-11  # of each feature's own square: equations that cannot tell features apart share between them
_LEAST_NORM = 1e-100  # of a feature over all measurements: the squares of smaller numbers have too few digits


class NormalEquations:
    """The sums of a weighted least-squares problem: a measurement costs O(features^2), and old ones can fade."""

    def __init__(self, num_features: int) -> None:
        self.num_features = num_features
        self._sums = [0.0] * (num_features * (num_features + 1))  # rows of `[features x features | features x target]`

    def add(self, features: Sequence[float], target: float, weight: float, keep: float = 1.0) -> None:
        """Add a measurement, after the weights of all earlier ones were multiplied by `keep`."""
        row = (*features, target)
        self._sums = [
            keep * old + weight * new
            for old, new in zip(self._sums, [a * b for a in features for b in row], strict=True)
        ]

    def scale_targets(self, factor: float) -> None:
        """Multiply the targets of all measurements so far."""
        for row in range(self.num_features):
            self._sums[self._at(row, self.num_features)] *= factor

    def prefer_zero(self, feature: int, share: float) -> None:
        """Prefer a coefficient of 0 where the measurements cannot tell this feature from others. `share`: of its own
        square; the smaller it is, the less it changes what was measured."""
        self._sums[self._at(feature, feature)] *= 1 + share

    def add_all(self, other: "NormalEquations", factor: float) -> None:
        """Add the measurements of another problem with `factor` times their weights."""
        self._sums = [mine + factor * theirs for mine, theirs in zip(self._sums, other._sums, strict=True)]

    def solve(self) -> tuple[float, ...]:
        """Return the best coefficients that are not negative; 0 for a feature that was (nearly) 0 in every measurement.

        The best ones are the least-squares solution of some subset of the features, the others being 0. All subsets are
        tried, the largest first; a full solution without negative coefficients is the best at once.
        """
        size = self.num_features
        norms = [math.sqrt(self._sums[self._at(i, i)]) for i in range(size)]
        present = [i for i in range(size) if norms[i] > _LEAST_NORM]
        best, best_gain = [0.0] * size, 0.0
        for subset in _subsets(tuple(present)):
            coefficients = self._solve_subset(subset, norms)
            if coefficients is None or min(coefficients) < 0:
                continue
            gain = sum(c * self._sums[self._at(i, size)] for i, c in zip(subset, coefficients, strict=True))
            if gain > best_gain:
                best_gain, best = gain, [0.0] * size
                for i, coefficient in zip(subset, coefficients, strict=True):
                    best[i] = coefficient
            if len(subset) == len(present):
                break
        return tuple(best)

    def _solve_subset(self, subset: Sequence[int], norms: Sequence[float]) -> list[float] | None:
        """Return the coefficients of these features alone, or None if they cannot be separated numerically."""
        rows = [
            [self._sums[self._at(i, j)] / (norms[i] * norms[j]) for j in subset]
            + [self._sums[self._at(i, self.num_features)] / norms[i]]
            for i in subset
        ]
        for place, row in enumerate(rows):
            row[place] += _RIDGE
        solution = _gauss(rows)
        return None if solution is None else [c / norms[i] for i, c in zip(subset, solution, strict=True)]

    def _at(self, row: int, column: int) -> int:
        return row * (self.num_features + 1) + column


@cache
def _subsets(features: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(subset for size in range(len(features), 0, -1) for subset in combinations(features, size))


def _gauss(rows: list[list[float]]) -> list[float] | None:
    """Solve a positive definite system, given as rows of `[matrix | right side]`, without pivoting."""
    size = len(rows)
    for i in range(size):
        pivot = rows[i][i]
        if pivot <= 0:
            return None
        for row in rows[i + 1 :]:
            factor = row[i] / pivot
            for j in range(i, size + 1):
                row[j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        solution[i] = (rows[i][size] - sum(rows[i][j] * solution[j] for j in range(i + 1, size))) / rows[i][i]
    return solution
