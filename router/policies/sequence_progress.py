"""The progress of a sequence at its decode worker, and which sequences cannot end there in time. Pure."""

from collections.abc import Mapping

from cluster.request_size import RequestSize

_NEWEST_SHARE = 0.1  # of the newest token in the pace
_TRUSTED_SHARE = 0.5  # of the time that is left: a batch may become slower, and a move takes time too
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 3.2


class SequenceProgress:
    """The progress of one sequence. Only the router writes it."""

    def __init__(self, num_left: int, size: RequestSize | None = None) -> None:
        """`size`: what a worker must be able to hold to run the sequence to its end; None if it is not known."""
        self.num_left = num_left  # tokens that it may still get
        self.size = size
        self.token_s: float | None = None  # from one token to the next; None: not known yet
        self.is_waiting = False  # was to move and did not decode: preempted, or computed again; no token since
        self._latest_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._stays_until_s = 0.0

    def record_token(self, now_s: float) -> None:
        """Record that a token arrived."""
        self.num_left -= 1
        if self.is_waiting:
            self.is_waiting, self._stays_until_s = False, now_s  # now it has KV that can move
        if self._latest_s is not None:
            newest_s = now_s - self._latest_s
            known_s = newest_s if self.token_s is None else self.token_s
            self.token_s = known_s + _NEWEST_SHARE * (newest_s - known_s)
        self._latest_s = now_s

    def record_failed_move(self, now_s: float) -> None:
        """Record that the sequence could not be moved. It is not tried again for a while, each time for longer."""
        self._stays_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def may_move(self, now_s: float) -> bool:
        return now_s >= self._stays_until_s

    def will_end_within(self, left_s: float) -> bool:
        """Return whether the sequence is expected to end in this time. It is not if its speed is unknown."""
        return self.token_s is not None and self.num_left * self.token_s <= left_s


def sequences_to_move(all_progress: Mapping[int, SequenceProgress], now_s: float, drain_deadline_s: float) -> list[int]:
    """Return the handles of sequences that are not expected to end before the deadline, those with most tokens left
    first."""
    trusted_s = _TRUSTED_SHARE * (drain_deadline_s - now_s)
    late = [
        handle
        for handle, progress in all_progress.items()
        if progress.may_move(now_s) and not progress.will_end_within(trusted_s)
    ]
    return sorted(late, key=lambda handle: all_progress[handle].num_left, reverse=True)
