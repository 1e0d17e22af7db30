"""How often a place becomes free, and from that when to try again. Pure: the time is an argument."""

_SMOOTHING = 0.2
_FIRST_RETRY_S = 1.0  # before anything has ended
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


class ServiceRate:
    """A running mean of the gaps between the ends of what is served."""

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
        """A place becomes free about once per mean gap."""
        return bounded_retry_s(_FIRST_RETRY_S if self._mean_gap_s is None else self._mean_gap_s)


def bounded_retry_s(expected_s: float) -> float:
    """Neither at once nor so late that a client gives up what would be served."""
    return min(max(expected_s, _MIN_RETRY_S), _MAX_RETRY_S)
