"""Latency and bandwidth out of reads: the line `seconds = latency + bytes / bandwidth`, old reads forgotten by degrees.

Pure. Weighted least squares, so that a small read's error counts as much as a large one's: weights fall with the
square of the size. A read that took much longer than the line says, because something else was in its way, pulls it by
a bounded amount; a way that did become slower is followed within a few reads.
"""

from dataclasses import dataclass

FORGETTING = 0.9  # per read: about the last ten count
MIN_READS = 3
_OUTLIER = 3.0  # times what the line says: more than this counts as this
_WEIGHT_FLOOR_BYTES = 256 * 1024  # below it, reads differ by latency only
_MIN_SPREAD = 0.05  # of sizes, relative: with less, they cannot tell latency from bandwidth
_MIN_SECONDS = 1e-7


@dataclass(frozen=True, slots=True)
class Estimate:
    bytes_per_s: float
    latency_s: float


class ReadFit:
    """Five sums; their weights shrink with every read."""

    def __init__(self) -> None:
        self._num_reads = 0
        self._w = self._wx = self._wxx = self._wt = self._wxt = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """A read of nothing says nothing."""
        if num_bytes <= 0:
            return
        seconds = max(seconds, _MIN_SECONDS)
        known = self.estimate()
        if known is not None:
            seconds = min(seconds, _OUTLIER * (known.latency_s + num_bytes / known.bytes_per_s))
        weight = (_WEIGHT_FLOOR_BYTES + num_bytes) ** -2.0
        self._w = self._w * FORGETTING + weight
        self._wx = self._wx * FORGETTING + weight * num_bytes
        self._wxx = self._wxx * FORGETTING + weight * num_bytes**2
        self._wt = self._wt * FORGETTING + weight * seconds
        self._wxt = self._wxt * FORGETTING + weight * num_bytes * seconds
        self._num_reads += 1

    def estimate(self) -> Estimate | None:
        """None before MIN_READS. Latency is never negative, bandwidth always positive and finite."""
        if self._num_reads < MIN_READS:
            return None
        determinant = self._w * self._wxx - self._wx**2
        if determinant > _MIN_SPREAD**2 * self._w * self._wxx:
            seconds_per_byte = (self._w * self._wxt - self._wx * self._wt) / determinant
            latency_s = (self._wt - seconds_per_byte * self._wx) / self._w
            if seconds_per_byte > 0 and latency_s >= 0:
                return Estimate(1 / seconds_per_byte, latency_s)
        # The line through the origin: all that reads of one size, or sizes drowned in noise, can say.
        return Estimate(self._wxx / self._wxt, 0.0)
