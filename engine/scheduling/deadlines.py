"""Deadlines of live work. Pure. Asking is O(1) until one of them may have passed."""

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """Owned by one scheduler. Every key that is added is discarded when its work ends, whatever ended it."""

    def __init__(self) -> None:
        self._deadlines: dict[Key, float] = {}
        self._earliest_s = math.inf  # of all there were since the last recount; never later than the true one

    def add(self, key: Key, deadline_s: float) -> None:
        assert key not in self._deadlines, f"{key!r} has a deadline already"
        self._deadlines[key] = deadline_s
        self._earliest_s = min(self._earliest_s, deadline_s)

    def discard(self, key: Key) -> None:
        self._deadlines.pop(key, None)

    def due(self, now_s: float) -> tuple[Key, ...]:
        """Takes out and returns what is past its deadline, in the order it was added."""
        if now_s < self._earliest_s:
            return ()
        due = tuple(key for key, deadline_s in self._deadlines.items() if deadline_s <= now_s)
        for key in due:
            del self._deadlines[key]
        self._earliest_s = min(self._deadlines.values(), default=math.inf)
        return due

    def next_s(self) -> float | None:
        """No deadline passes before this; None when there is no deadline. May be early, never late."""
        return self._earliest_s if self._deadlines else None
