"""A circuit breaker per pair of workers: excludes pairs whose hand-offs fail. Pure; the time is an argument.

    CLOSED --failures in a row, within the window--> OPEN --pause over, next hand-off begins--> HALF_OPEN
       ^                                              ^                                            |
       |                                              +-------------- its trial fails -------------+
       +------------------------------------ any hand-off between the two succeeds ----------------+

An open pair is excluded, and so is a half-open pair whose trial is in progress: one request at a time tries it. Each
reopening doubles the pause, until the pair has worked for a whole window. Hand-offs that end for a reason unrelated to
the pair (a cancelled request, a deadline, a full queue) are `dropped`. Pairs that never failed are not stored.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.messages import MemberId

Pair = tuple[MemberId, MemberId]  # exporter, importer


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_MOVES = {
    BreakerState.CLOSED: {BreakerState.OPEN},
    BreakerState.OPEN: {BreakerState.HALF_OPEN, BreakerState.CLOSED},
    BreakerState.HALF_OPEN: {BreakerState.OPEN, BreakerState.CLOSED},
}


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """The settings of circuit breakers. `failures` 0 turns them off."""

    failures: int = 3  # in a row
    window_s: float = 60.0  # within which they come
    first_pause_s: float = 1.0
    max_pause_s: float = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A hand-off between two workers. While the pair is half open, one trial decides."""

    pair: Pair


@dataclass(slots=True)
class _Breaker:
    state: BreakerState = BreakerState.CLOSED
    failed_s: list[float] = field(default_factory=list)  # CLOSED: since the last success
    num_openings: int = 0
    open_until_s: float = 0.0
    closed_s: float = 0.0
    decides: Trial | None = None  # HALF_OPEN

    def move(self, state: BreakerState) -> None:
        assert state in _MOVES[self.state], f"{self.state} to {state} after {self.num_openings} openings"
        self.state = state
        self.decides = None
        self.failed_s.clear()

    def is_excluded(self, now_s: float) -> bool:
        if self.state is BreakerState.HALF_OPEN:
            return self.decides is not None
        return self.state is BreakerState.OPEN and now_s < self.open_until_s


class PairBreakers:
    """The circuit breakers of all pairs of workers that have failed."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._breakers: dict[Pair, _Breaker] = {}

    def excluded_pairs(self, now_s: float) -> frozenset[Pair]:
        """Return the pairs that no request should use now."""
        return frozenset(pair for pair, breaker in self._breakers.items() if breaker.is_excluded(now_s))

    def begin(self, pair: Pair, now_s: float) -> Trial:
        """Begin a hand-off. Exactly one of `succeeded`, `failed` and `dropped` ends it."""
        trial = Trial(pair)
        breaker = self._breakers.get(pair)
        if breaker is None or breaker.state is BreakerState.CLOSED or breaker.is_excluded(now_s):
            return trial
        if breaker.state is BreakerState.OPEN:
            breaker.move(BreakerState.HALF_OPEN)
        breaker.decides = trial
        return trial

    def succeeded(self, trial: Trial, now_s: float) -> bool:
        """Record a success. Returns whether it closed the pair."""
        breaker = self._breakers.get(trial.pair)
        if breaker is None:
            return False
        if breaker.state is BreakerState.CLOSED:
            breaker.failed_s.clear()
            return False
        breaker.move(BreakerState.CLOSED)
        breaker.closed_s = now_s
        return True

    def failed(self, trial: Trial, now_s: float, jitter: float) -> float | None:
        """Record a failure. Returns the pause in seconds if it opened the pair, else None.

        `jitter`, from 0 up to 1, shortens the pause by up to half, so that routers do not retry at the same time.
        Failures of hand-offs that began before the pair opened are ignored.
        """
        if not self._policy.failures:
            return None
        breaker = self._breakers.setdefault(trial.pair, _Breaker())
        if breaker.state is BreakerState.CLOSED:
            breaker.failed_s = [at_s for at_s in breaker.failed_s if at_s > now_s - self._policy.window_s] + [now_s]
            if len(breaker.failed_s) < self._policy.failures:
                return None
            if now_s - breaker.closed_s > self._policy.window_s:
                breaker.num_openings = 0
        elif breaker.decides is not trial:
            return None
        breaker.move(BreakerState.OPEN)
        breaker.num_openings += 1
        doubled_s = self._policy.first_pause_s * 2.0 ** min(breaker.num_openings - 1, 30)
        pause_s = min(doubled_s, self._policy.max_pause_s) * (1 - jitter / 2)
        breaker.open_until_s = now_s + pause_s
        return pause_s

    def dropped(self, trial: Trial) -> None:
        """Record a hand-off that ended for a reason unrelated to the pair; the next one may decide."""
        breaker = self._breakers.get(trial.pair)
        if breaker is not None and breaker.decides is trial:
            breaker.decides = None

    def keep(self, members: Collection[MemberId]) -> None:
        """Drop the pairs with any other member. A restarted worker is another member."""
        self._breakers = {
            pair: breaker for pair, breaker in self._breakers.items() if pair[0] in members and pair[1] in members
        }

    def failing(self) -> dict[Pair, BreakerState]:
        """Return the pairs that are open or half open."""
        return {pair: each.state for pair, each in self._breakers.items() if each.state is not BreakerState.CLOSED}
