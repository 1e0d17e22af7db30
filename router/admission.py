"""Which requests may begin. Pure: the time is an argument.

Owns the ids of live requests and when the last ones ended, from which it says when to try again. Never looks at
workers.
"""

from cluster.errors import DuplicateRequest, Overloaded

_SMOOTHING = 0.2
_FIRST_RETRY_S = 1.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


class Admission:
    """At most `max_live_requests` at once, each id once."""

    def __init__(self, max_live_requests: int) -> None:
        self._max_live_requests = max_live_requests
        self._live: set[str] = set()
        self._last_end_s: float | None = None
        self._mean_gap_s: float | None = None  # between the ends of requests

    def __len__(self) -> int:
        return len(self._live)

    def admit(self, request_id: str) -> None:
        """Every admitted request must be released. Raises DuplicateRequest, Overloaded."""
        if request_id in self._live:
            raise DuplicateRequest(f"request id {request_id!r} belongs to a live request; choose another, or none")
        if len(self._live) >= self._max_live_requests:
            raise Overloaded(
                f"{len(self._live)} requests are being served, the most this router takes; try again",
                retry_after_s=self._retry_after_s(),
            )
        self._live.add(request_id)

    def release(self, request_id: str, now_s: float) -> None:
        self._live.remove(request_id)
        if self._last_end_s is not None:
            gap_s = max(0.0, now_s - self._last_end_s)
            mean_s = gap_s if self._mean_gap_s is None else self._mean_gap_s
            self._mean_gap_s = mean_s + _SMOOTHING * (gap_s - mean_s)
        self._last_end_s = now_s

    def _retry_after_s(self) -> float:
        """A place becomes free about once per mean gap."""
        expected_s = _FIRST_RETRY_S if self._mean_gap_s is None else self._mean_gap_s
        return min(max(expected_s, _MIN_RETRY_S), _MAX_RETRY_S)
