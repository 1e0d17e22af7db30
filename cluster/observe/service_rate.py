"""Estimates how often a queue's place becomes free, and from that when a refused client should retry. Pure."""

_SMOOTHING = 0.2
_FIRST_RETRY_S = 1.0  # before the first end
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


class ServiceRate:
    """A running mean of the time between the ends of two requests."""

    def __init__(self) -> None:
        self._last_end_s: float | None = None
        self._mean_gap_s: float | None = None

    def note_end(self, now_s: float) -> None:
        if self._last_end_s is not None:
            gap_s = max(0.0, now_s - self._last_end_s)
            mean_s = gap_s if self._mean_gap_s is None else self._mean_gap_s
            self._mean_gap_s = mean_s + _SMOOTHING * (gap_s - mean_s)
        self._last_end_s = now_s

    def retry_after_s(self) -> float:
        """The expected time until the next place becomes free."""
        return bounded_retry_s(_FIRST_RETRY_S if self._mean_gap_s is None else self._mean_gap_s)


def bounded_retry_s(expected_s: float) -> float:
    """Limit a retry delay to 0.1 to 30 s."""
    return min(max(expected_s, _MIN_RETRY_S), _MAX_RETRY_S)
