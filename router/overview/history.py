"""The rates and latencies of a router in the last minutes: a bounded list of samples. Pure; the time is an argument.

A sample is the difference between two readings of the router's counters, so nothing here costs a request anything.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SAMPLE_PERIOD_S = 2.0
MAX_SAMPLES = 150  # of five minutes
LATENCIES = ("ttft", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Totals:
    """A reading of a router's counters, which count since its start."""

    at_s: float  # Unix time
    num_ended: int
    num_failed: int
    num_prompt_tokens: int
    num_tokens: int
    num_live: int  # now
    latencies: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by name in LATENCIES: observations per range


@dataclass(frozen=True, slots=True)
class Sample:
    """The changes between two readings. The latencies are (median, 99th percentile) in seconds; None: no value."""

    number: int  # from 1 on
    at_s: float
    period_s: float
    num_ended: int
    num_failed: int
    num_prompt_tokens: int
    num_tokens: int
    num_live: int
    ttft_s: tuple[float, float] | None
    itl_s: tuple[float, float] | None


def quantile_s(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return a quantile of a histogram, interpolated within its range as Prometheus does; None without observations.

    `counts` has one number more than `bounds_s`: a value above the last bound counts as that bound."""
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            if index == len(bounds_s):
                return bounds_s[-1]
            lower = bounds_s[index - 1] if index else 0.0
            return lower + (bounds_s[index] - lower) * (rank - below) / count
        below += count
    return bounds_s[-1]


class History:
    """The last readings, and the samples between them."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        """`bounds_s`: the upper bounds of the ranges of all latencies."""
        self.bounds_s = tuple(bounds_s)
        self._totals: deque[Totals] = deque(maxlen=MAX_SAMPLES + 1)
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    @property
    def newest(self) -> int:
        """The number of the newest sample; 0: there is none."""
        return self._samples[-1].number if self._samples else 0

    def add(self, now: Totals) -> None:
        """Add a reading. The first one starts the history."""
        if self._totals:
            self._samples.append(self._between(self._totals[-1], now))
        self._totals.append(now)

    def since(self, number: int) -> Iterator[Sample]:
        """Return the samples after the one with this number, the oldest first."""
        return (sample for sample in self._samples if sample.number > number)

    def latencies(self) -> dict[str, tuple[int, ...]]:
        """Return the number of observations per range in the whole time that is kept, by name."""
        if not self._totals:
            return {name: (0,) * (len(self.bounds_s) + 1) for name in LATENCIES}
        return {name: _difference(self._totals[0], self._totals[-1], name) for name in LATENCIES}

    def _between(self, before: Totals, now: Totals) -> Sample:
        return Sample(
            number=self.newest + 1,
            at_s=now.at_s,
            period_s=now.at_s - before.at_s,
            num_ended=now.num_ended - before.num_ended,
            num_failed=now.num_failed - before.num_failed,
            num_prompt_tokens=now.num_prompt_tokens - before.num_prompt_tokens,
            num_tokens=now.num_tokens - before.num_tokens,
            num_live=now.num_live,
            ttft_s=self._median_and_99(_difference(before, now, "ttft")),
            itl_s=self._median_and_99(_difference(before, now, "itl")),
        )

    def _median_and_99(self, counts: Sequence[int]) -> tuple[float, float] | None:
        median = quantile_s(self.bounds_s, counts, 0.5)
        return None if median is None else (median, quantile_s(self.bounds_s, counts, 0.99) or median)


def _difference(before: Totals, now: Totals, name: str) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(before.latencies[name], now.latencies[name], strict=True))
