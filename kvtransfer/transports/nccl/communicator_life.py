"""The life of one link's NCCL communicator: the legal order of its steps, their deadlines, and the backoff after
failures.

Pure: it decides, links perform. It outlives communicators: its record of failures keeps a broken link from being tried
at every hand-off.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_HISTORY = 16


class CommunicatorState(StrEnum):
    ABSENT = "absent"  # no communicator; one may be made
    AGREEING = "agreeing"  # over the control connection: both sides agree, with one version of NCCL
    INITIALISING = "initialising"  # in the library's constructor, which nothing can interrupt
    WARMING = "warming"  # the first message, which builds the connections
    IDLE = "idle"
    TRANSFERRING = "transferring"
    POISONED = "poisoned"  # nothing is sent on it any more
    ABORTING = "aborting"
    UNUSABLE = "unusable"  # until a time


_LIVE = frozenset(
    {
        CommunicatorState.AGREEING,
        CommunicatorState.INITIALISING,
        CommunicatorState.WARMING,
        CommunicatorState.IDLE,
        CommunicatorState.TRANSFERRING,
    }
)
# The moves, and the states that allow them.
_MOVES: Mapping[str, frozenset[CommunicatorState]] = {
    "begin": frozenset({CommunicatorState.ABSENT, CommunicatorState.UNUSABLE}),
    "withdraw": frozenset({CommunicatorState.AGREEING}),
    "agreed": frozenset({CommunicatorState.AGREEING}),
    "initialised": frozenset({CommunicatorState.INITIALISING}),
    "warmed": frozenset({CommunicatorState.WARMING}),
    "start_transfer": frozenset({CommunicatorState.IDLE}),
    "end_transfer": frozenset({CommunicatorState.TRANSFERRING}),
    "poison": _LIVE,
    "abort": frozenset({CommunicatorState.POISONED}),
    "aborted": frozenset({CommunicatorState.ABORTING}),
}


class IllegalMove(Exception):
    """A step that the state does not allow. The message lists the states before it."""


@dataclass(frozen=True, slots=True)
class CommunicatorLimits:
    """The timeouts of each step, and the backoff after a failure, which doubles each time up to a bound."""

    agree_s: float = 5.0
    initialise_s: float = 15.0
    warm_s: float = 10.0
    transfer_s: float = 10.0
    abort_s: float = 5.0
    look_s: float = 1.0  # how soon an importer that is idle, or initialises, notices that its peer is gone
    grace_s: float = 0.25  # for a cancelled transfer to end by itself, which is cheaper than a new communicator
    retry_s: float = 30.0
    max_retry_s: float = 600.0


class CommunicatorLife:
    """The life of one link's communicator. Not thread-safe. `why` has the reason of the last failure."""

    def __init__(self, limits: CommunicatorLimits) -> None:
        self._limits = limits
        self.state = CommunicatorState.ABSENT
        self.why = ""
        self.number = 0  # of the transfer under way, or the last one
        self.deadline_s: float | None = None  # the deadline of this state
        self._usable_from_s = 0.0
        self._failures = 0  # since the last transfer that was completed
        self._was_warm = False
        self._history: deque[CommunicatorState] = deque([CommunicatorState.ABSENT], _HISTORY)

    def can_begin(self, now_s: float) -> bool:
        """Return whether a communicator may be made: there is none, and the backoff is over."""
        if self.state is CommunicatorState.UNUSABLE:
            return now_s >= self._usable_from_s
        return self.state is CommunicatorState.ABSENT

    def is_overdue(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s > self.deadline_s

    def is_promising(self, now_s: float) -> bool:
        """Return whether a working communicator exists or one may be made. It stays False while a call hangs in the
        library."""
        return self.can_begin(now_s) or (self.state in _LIVE and not self.is_overdue(now_s))

    def begin(self, now_s: float) -> None:
        if not self.can_begin(now_s):
            raise IllegalMove(f"begin while {self.state}: {self.why or 'in use'}")
        self._was_warm, self.number = False, 0
        self._move("begin", CommunicatorState.AGREEING, now_s + self._limits.agree_s)

    def withdraw(self) -> None:
        """Record that the other side refused, which does not count as a failure."""
        self._move("withdraw", CommunicatorState.ABSENT, None)

    def agreed(self, now_s: float) -> None:
        self._move("agreed", CommunicatorState.INITIALISING, now_s + self._limits.initialise_s)

    def initialised(self, now_s: float) -> None:
        self._move("initialised", CommunicatorState.WARMING, now_s + self._limits.warm_s)

    def warmed(self) -> None:
        self._move("warmed", CommunicatorState.IDLE, None)
        self._was_warm = True

    def start_transfer(self, number: int, now_s: float) -> None:
        """Start a transfer. Both sides number transfers from 1 without gaps, because NCCL matches them by order."""
        if number != self.number + 1:
            raise IllegalMove(f"transfer {number} after {self.number}")
        self._move("start_transfer", CommunicatorState.TRANSFERRING, now_s + self._limits.transfer_s)
        self.number = number

    def end_transfer(self) -> None:
        self._move("end_transfer", CommunicatorState.IDLE, None)
        self._failures = 0

    def poison(self, why: str) -> None:
        """End every use of the communicator; only an abort may follow. The first reason is kept."""
        if self.state in _LIVE:
            self.why = why
            self._move("poison", CommunicatorState.POISONED, None)

    def abort(self, now_s: float) -> None:
        self._move("abort", CommunicatorState.ABORTING, now_s + self._limits.abort_s)

    def aborted(self, now_s: float, *, failed: bool = True) -> None:
        """Record that nothing of the communicator runs any more.

        `failed` is False if it was closed because it was not needed. A link that worked is tried again at once; one
        that never worked, or failed twice, gets a backoff."""
        if not failed:
            self._move("aborted", CommunicatorState.ABSENT, None)
            return
        self._failures += 1
        doublings = self._failures - (2 if self._was_warm else 1)
        if doublings < 0:
            self._move("aborted", CommunicatorState.ABSENT, None)
            return
        self._usable_from_s = now_s + min(self._limits.retry_s * 2**doublings, self._limits.max_retry_s)
        self._move("aborted", CommunicatorState.UNUSABLE, None)

    def _move(self, move: str, state: CommunicatorState, deadline_s: float | None) -> None:
        if self.state not in _MOVES[move]:
            raise IllegalMove(f"{move} in {self.state}, after {' -> '.join(self._history)}")
        self.state, self.deadline_s = state, deadline_s
        self._history.append(state)
