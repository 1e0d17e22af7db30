"""How far a sequence is at its decode worker, and how fast it goes; which of many cannot end there in time. Pure."""

from collections.abc import Mapping

from cluster.request_size import RequestSize

_NEWEST_SHARE = 0.1  # of the newest token in the pace
_TRUSTED_SHARE = 0.5  # of the time that is left: a batch may become slower, and a move takes time too
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 3.2


class Course:
    """One sequence's. The router counts; nobody else writes."""

    def __init__(self, num_left: int, size: RequestSize | None = None) -> None:
        """`size`: what a worker must hold to run it to its end; None: not known."""
        self.num_left = num_left  # tokens that it may still get
        self.size = size
        self.token_s: float | None = None  # from one token to the next; None: not known yet
        self.is_waiting = False  # was to move and did not decode: preempted, or computed again; no token since
        self._latest_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._stays_until_s = 0.0

    def drew(self, now_s: float) -> None:
        """A token came."""
        self.num_left -= 1
        if self.is_waiting:
            self.is_waiting, self._stays_until_s = False, now_s  # now it has KV that can move
        if self._latest_s is not None:
            newest_s = now_s - self._latest_s
            known_s = newest_s if self.token_s is None else self.token_s
            self.token_s = known_s + _NEWEST_SHARE * (newest_s - known_s)
        self._latest_s = now_s

    def stayed(self, now_s: float) -> None:
        """It was to move, and could not: it is left in peace for a while, each time for longer."""
        self._stays_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def may_move(self, now_s: float) -> bool:
        return now_s >= self._stays_until_s

    def ends_within(self, left_s: float) -> bool:
        """It is expected to; of one that has not shown its pace nothing is."""
        return self.token_s is not None and self.num_left * self.token_s <= left_s


def to_move(courses: Mapping[int, Course], now_s: float, leaves_at_s: float) -> list[int]:
    """Handles of those that should not wait for their end where they are, those with most left first."""
    trusted_s = _TRUSTED_SHARE * (leaves_at_s - now_s)
    late = [
        handle for handle, course in courses.items() if course.may_move(now_s) and not course.ends_within(trusted_s)
    ]
    return sorted(late, key=lambda handle: courses[handle].num_left, reverse=True)
