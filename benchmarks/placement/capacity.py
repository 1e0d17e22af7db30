"""A short search for the highest rate of evenly spaced requests that an arm keeps up with. Pure."""

from collections.abc import Sequence
from math import ceil, sqrt

from cli.load import Record

_KEPT_UP = 0.92  # completions per arrival in the second half of a try
_MOST_LATENCIES = 3.0  # from the last arrival to the last end, in parts of one quiet request
_NUM_BISECTIONS = 2
_LEAST_REQUESTS = 24
_LEAST_LATENCIES = 12.0  # a try lasts this many times as long as one quiet request


class CapacitySearch:
    """Doubles (or halves) the rate until one rate is kept up with and one is not, then bisects between them.

    `rate_rps` is the rate to try next. The capacity is the highest rate that was kept up with: up to a fifth too low.
    """

    def __init__(self, first_rps: float) -> None:
        self.rate_rps = first_rps
        self.is_ended = False
        self._kept_up_rps = 0.0
        self._too_high_rps = 0.0
        self._num_bisections = 0

    @property
    def capacity_rps(self) -> float:
        return self._kept_up_rps

    def add(self, *, kept_up: bool) -> None:
        """Take the result of a try at `rate_rps`."""
        if kept_up:
            self._kept_up_rps = self.rate_rps
        else:
            self._too_high_rps = self.rate_rps
        if not (self._kept_up_rps and self._too_high_rps):
            self.rate_rps *= 2.0 if kept_up else 0.5
        elif self._num_bisections < _NUM_BISECTIONS:
            self._num_bisections += 1
            self.rate_rps = sqrt(self._kept_up_rps * self._too_high_rps)
        else:
            self.is_ended = True


def num_requests(rate_rps: float, quiet_s: float) -> int:
    """Return how many requests a try needs. `quiet_s`: the time of one request on a quiet cluster."""
    return max(_LEAST_REQUESTS, ceil(rate_rps * quiet_s * _LEAST_LATENCIES))


def keeps_up(records: Sequence[Record], rate_rps: float, quiet_s: float) -> bool:
    """Return whether all requests were answered, in the second half as fast as they arrived, and the last one soon
    after the last arrival. The first half fills the batches. `quiet_s`: the time of one request on a quiet cluster.

    The rate of the answers alone would not tell: prompts precede decoding, so the sequences of an overloaded worker end
    together."""
    if any(record.error for record in records):
        return False
    ends_s = sorted(record.ended_s for record in records)
    half = len(ends_s) // 2
    took_s = ends_s[-1] - ends_s[half]
    is_fast = len(ends_s) - 1 - half >= _KEPT_UP * rate_rps * took_s
    return is_fast and ends_s[-1] - records[-1].scheduled_s <= _MOST_LATENCIES * quiet_s
