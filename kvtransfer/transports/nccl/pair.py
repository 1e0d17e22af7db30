"""The life of one pair's NCCL communicator: which step may follow which, each by when, and whether to try again.

Pure: it decides, links perform. It outlives communicators: what it remembers of failures keeps a broken pair from being
tried at every hand-off.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_HISTORY = 16


class PairState(StrEnum):
    ABSENT = "absent"  # no communicator; one may be made
    AGREEING = "agreeing"  # over the control connection: both want it, with one version of NCCL
    INITIALISING = "initialising"  # in the library's constructor, which nothing can interrupt
    WARMING = "warming"  # the first message, which builds the connections
    IDLE = "idle"
    TRANSFERRING = "transferring"
    POISONED = "poisoned"  # nothing is sent on it any more
    ABORTING = "aborting"
    UNUSABLE = "unusable"  # until a time


_LIVE = frozenset(
    {PairState.AGREEING, PairState.INITIALISING, PairState.WARMING, PairState.IDLE, PairState.TRANSFERRING}
)
# What may happen, and in which states.
_MOVES: Mapping[str, frozenset[PairState]] = {
    "begin": frozenset({PairState.ABSENT, PairState.UNUSABLE}),
    "withdraw": frozenset({PairState.AGREEING}),
    "agreed": frozenset({PairState.AGREEING}),
    "initialised": frozenset({PairState.INITIALISING}),
    "warmed": frozenset({PairState.WARMING}),
    "start_transfer": frozenset({PairState.IDLE}),
    "end_transfer": frozenset({PairState.TRANSFERRING}),
    "poison": _LIVE,
    "abort": frozenset({PairState.POISONED}),
    "aborted": frozenset({PairState.ABORTING}),
}


class IllegalMove(Exception):
    """With the states that led there."""


@dataclass(frozen=True, slots=True)
class PairLimits:
    """How long each step may take, and how long a pair that failed is left alone: doubled each time, up to a bound."""

    agree_s: float = 5.0
    initialise_s: float = 15.0
    warm_s: float = 10.0
    transfer_s: float = 10.0
    abort_s: float = 5.0
    look_s: float = 1.0  # how soon an idle importer notices that its peer is gone
    grace_s: float = 0.25  # for a cancelled transfer to end by itself, which is cheaper than a new communicator
    retry_s: float = 30.0
    max_retry_s: float = 600.0


class PairLife:
    """Not thread-safe. `why` says what the last failure was."""

    def __init__(self, limits: PairLimits) -> None:
        self._limits = limits
        self.state = PairState.ABSENT
        self.why = ""
        self.number = 0  # of the transfer under way, or the last one
        self.deadline_s: float | None = None  # by when the state must be left
        self._usable_from_s = 0.0
        self._failures = 0  # since the last transfer that was completed
        self._was_warm = False
        self._history: deque[PairState] = deque([PairState.ABSENT], _HISTORY)

    def can_begin(self, now_s: float) -> bool:
        """A communicator may be made: none is there, and the last failure is long enough ago."""
        if self.state is PairState.UNUSABLE:
            return now_s >= self._usable_from_s
        return self.state is PairState.ABSENT

    def is_overdue(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s > self.deadline_s

    def is_promising(self, now_s: float) -> bool:
        """There is a communicator that works as far as is known, or one may be made. A call that hangs in the library
        keeps a pair out for good."""
        return self.can_begin(now_s) or (self.state in _LIVE and not self.is_overdue(now_s))

    def begin(self, now_s: float) -> None:
        if not self.can_begin(now_s):
            raise IllegalMove(f"begin while {self.state}: {self.why or 'in use'}")
        self._was_warm, self.number = False, 0
        self._move("begin", PairState.AGREEING, now_s + self._limits.agree_s)

    def withdraw(self) -> None:
        """The other side will not, or not for this hand-off: no fault of the pair's."""
        self._move("withdraw", PairState.ABSENT, None)

    def agreed(self, now_s: float) -> None:
        self._move("agreed", PairState.INITIALISING, now_s + self._limits.initialise_s)

    def initialised(self, now_s: float) -> None:
        self._move("initialised", PairState.WARMING, now_s + self._limits.warm_s)

    def warmed(self) -> None:
        self._move("warmed", PairState.IDLE, None)
        self._was_warm = True

    def start_transfer(self, number: int, now_s: float) -> None:
        """Transfers are numbered from 1 without gaps: NCCL matches by order, so both sides must count the same."""
        if number != self.number + 1:
            raise IllegalMove(f"transfer {number} after {self.number}")
        self._move("start_transfer", PairState.TRANSFERRING, now_s + self._limits.transfer_s)
        self.number = number

    def end_transfer(self) -> None:
        self._move("end_transfer", PairState.IDLE, None)
        self._failures = 0

    def poison(self, why: str) -> None:
        """Whatever is live ends here; only an abort may follow. Of several reasons the first one counts."""
        if self.state in _LIVE:
            self.why = why
            self._move("poison", PairState.POISONED, None)

    def abort(self, now_s: float) -> None:
        self._move("abort", PairState.ABORTING, now_s + self._limits.abort_s)

    def aborted(self, now_s: float, *, failed: bool = True) -> None:
        """Nothing of it runs any more. `failed`: as opposed to closed because it is not needed. A pair that worked
        is tried again at once, one that never did or failed twice is left alone for a while."""
        if not failed:
            self._move("aborted", PairState.ABSENT, None)
            return
        self._failures += 1
        doublings = self._failures - (2 if self._was_warm else 1)
        if doublings < 0:
            self._move("aborted", PairState.ABSENT, None)
            return
        self._usable_from_s = now_s + min(self._limits.retry_s * 2**doublings, self._limits.max_retry_s)
        self._move("aborted", PairState.UNUSABLE, None)

    def _move(self, move: str, state: PairState, deadline_s: float | None) -> None:
        if self.state not in _MOVES[move]:
            raise IllegalMove(f"{move} in {self.state}, after {' -> '.join(self._history)}")
        self.state, self.deadline_s = state, deadline_s
        self._history.append(state)
