"""The progress of a sequence at its decode worker, how long it is expected to run, and which sequences cannot end there
in time. Pure."""

import math
from collections.abc import Iterable, Mapping

from cluster.outstanding_work import NO_SEQUENCE_WORK, SequenceWork, expected_left
from cluster.request_size import RequestSize
from router.policies.work_ahead import SequenceBatch

_NEWEST_SHARE = 0.1  # of the newest token in the pace
_TRUSTED_SHARE = 0.5  # of the time that is left: a batch may become slower, and a move takes time too
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 3.2
_NEWEST_LENGTH_SHARE = 0.05  # of the newest output in the expected length


class SequenceProgress:
    """The progress of one sequence. Only the router writes it."""

    def __init__(self, num_left: int, size: RequestSize | None = None, num_expected: float = math.inf) -> None:
        """`size`: what a worker must be able to hold to run the sequence to its end; None if it is not known.
        `num_expected`: tokens that it is expected to generate in all; infinite: as many as it may."""
        self.num_left = num_left  # tokens that it may still get
        self.size = size
        self._num_expected = num_expected
        self.token_s: float | None = None  # from one token to the next; None: not known yet
        self.is_waiting = False  # was to move and did not decode: preempted, or computed again; no token since
        self._latest_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._stays_until_s = 0.0

    @property
    def is_decoding(self) -> bool:
        """Whether its worker has generated a token of it."""
        return self._latest_s is not None

    @property
    def length(self) -> int:
        """The number of its tokens, prompt and output; 0 if its size is not known."""
        return self.size.num_prompt + self.size.max_tokens - self.num_left if self.size is not None else 0

    @property
    def expected_left(self) -> float:
        """The number of tokens that it is expected to generate yet."""
        if self.size is None or self._num_expected >= self.size.max_tokens:
            return float(self.num_left)
        return expected_left(self.size.max_tokens - self.num_left, self._num_expected, self.size.max_tokens)

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


class OutputLengths:
    """Statistics of the length of ended outputs: the mean share of `max_tokens` that was generated, for each power of
    two of `max_tokens`. Before the first one has ended, all of `max_tokens` is expected."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}  # by the bit length of max_tokens, so at most 32

    def record(self, num_output: int, max_tokens: int) -> None:
        """Record an output that ended."""
        share = num_output / max_tokens
        known = self._shares.get(max_tokens.bit_length(), share)
        self._shares[max_tokens.bit_length()] = known + _NEWEST_LENGTH_SHARE * (share - known)

    def expected(self, max_tokens: int) -> float:
        """Return the number of tokens, at least 1, that a choice is expected to generate in all."""
        return max(1.0, self._shares.get(max_tokens.bit_length(), 1.0) * max_tokens)


def batch_of(all_progress: Iterable[SequenceProgress], others: SequenceWork = NO_SEQUENCE_WORK) -> SequenceBatch:
    """Return the batch of this router's sequences at one worker and those of other routers."""
    num_running, num_joining, context, left = others.num_running, others.num_joining, others.context, others.left
    for progress in all_progress:
        num_running += progress.is_decoding
        num_joining += not progress.is_decoding
        context += progress.length
        left += progress.expected_left
    return SequenceBatch.of(SequenceWork(num_running, num_joining, context, left))


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
