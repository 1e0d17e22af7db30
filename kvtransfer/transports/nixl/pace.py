"""How long a thread that polls rests between two polls."""

_SPIN_S = 0.001
_SHORTEST_REST_S = 50e-6


class Pace:
    """Not at all while something happened lately, then longer and longer. Owned by the polling thread."""

    def __init__(self, longest_rest_s: float) -> None:
        self._longest_rest_s = longest_rest_s
        self._rest_s = _SHORTEST_REST_S
        self._busy_until_s = 0.0

    def hurry(self, now_s: float) -> None:
        """Something happened, or is about to."""
        self._busy_until_s = now_s + _SPIN_S
        self._rest_s = _SHORTEST_REST_S

    def rest_s(self, now_s: float) -> float:
        """Before the next poll; 0 for none."""
        if now_s < self._busy_until_s:
            return 0.0
        rest_s, self._rest_s = self._rest_s, min(2 * self._rest_s, self._longest_rest_s)
        return rest_s
