"""Intervals of shares and of their differences, at 95 %. Pure.

Requests of one queue are not independent, so the true intervals are somewhat wider.
"""

from dataclasses import dataclass
from math import sqrt

_Z = 1.959964  # of the normal distribution, for 95 %


@dataclass(frozen=True, slots=True)
class Share:
    """`met` of `count` requests."""

    met: int
    count: int

    @property
    def value(self) -> float:
        return self.met / self.count if self.count else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Return Wilson's score interval; (0, 1) for no request."""
        if not self.count:
            return 0.0, 1.0
        z2 = _Z * _Z
        centre = (self.met + z2 / 2) / (self.count + z2)
        half = _Z / (self.count + z2) * sqrt(self.met * (self.count - self.met) / self.count + z2 / 4)
        return max(0.0, centre - half), min(1.0, centre + half)


def difference(one: Share, other: Share) -> tuple[float, float]:
    """Return the interval of `one` minus `other`: Newcombe's hybrid of the two score intervals (1998, method 10)."""
    (low, high), (other_low, other_high) = one.interval, other.interval
    apart = one.value - other.value
    below = sqrt((one.value - low) ** 2 + (other_high - other.value) ** 2)
    above = sqrt((high - one.value) ** 2 + (other.value - other_low) ** 2)
    return apart - below, apart + above
