"""The figures of one path through the router: CPU per token and per request, by the slope between two lengths. Pure."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALL_IN_TOKENS = 64  # the length of an answer for which the cost is given all in
_RESAMPLES = 2000
Interval = tuple[float, float, float]  # median, and its interval at 95 %


@dataclass(frozen=True, slots=True)
class Round:
    """One round of requests of one length."""

    num_requests: int
    max_tokens: int
    cpu_s: float  # of the router
    load_cpu_s: float  # of the load generator

    @property
    def per_request_s(self) -> float:
        return self.cpu_s / self.num_requests


@dataclass(frozen=True, slots=True)
class Pair:
    """A round of short answers and a round of long ones, next to each other."""

    short: Round
    long: Round

    @property
    def token_us(self) -> float:
        """CPU per further token of an answer."""
        more_s = self.long.per_request_s - self.short.per_request_s
        return 1e6 * more_s / (self.long.max_tokens - self.short.max_tokens)

    @property
    def request_ms(self) -> float:
        """CPU per request without what its tokens cost."""
        return 1e3 * self.short.per_request_s - 1e-3 * self.token_us * self.short.max_tokens

    @property
    def all_in_us(self) -> float:
        """CPU per token of an answer of ALL_IN_TOKENS tokens."""
        return self.token_us + 1e3 * self.request_ms / ALL_IN_TOKENS

    @property
    def load_all_in_us(self) -> float:
        """CPU of the load generator per token of long answers."""
        return 1e6 * self.long.load_cpu_s / (self.long.num_requests * self.long.max_tokens)


def interval(values: Sequence[float]) -> Interval:
    """Return the median and its bootstrap interval at 95 %."""
    draws = random.Random(0)
    resampled = sorted(statistics.median(draws.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return statistics.median(values), resampled[round(0.025 * _RESAMPLES)], resampled[round(0.975 * _RESAMPLES) - 1]


def of_pairs(pairs: Sequence[Pair], figure: Callable[[Pair], float]) -> Interval:
    return interval([figure(pair) for pair in pairs])


def ratio(pairs: Sequence[Pair], baseline: Sequence[Pair], figure: Callable[[Pair], float]) -> Interval:
    """Return the ratio of two arms whose pairs were measured in turns."""
    return interval([figure(ours) / figure(theirs) for ours, theirs in zip(pairs, baseline, strict=True)])


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
