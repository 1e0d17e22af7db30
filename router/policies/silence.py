"""Decides whether a worker is silent by itself, or whether this router may be cut off from all workers. Pure.

A health check that times out proves nothing about the worker if no other worker has sent anything since the check
began. Such a check is not counted.
"""

import math


class Silence:
    """The unanswered health checks of one worker since its last message.

    Times are seconds of one clock. `sent_s`: when the worker last sent anything. `another_sent_s`: when any other
    worker did, minus infinity if there is none.
    """

    def __init__(self) -> None:
        self.num_counted = 0  # missed checks that are the worker's own, in a row
        self._own_since_s = math.inf  # its silence is its own if another worker has sent anything since then
        self._last_asked_s = -math.inf

    def record_timeout(self, asked_s: float, *, sent_s: float) -> None:
        """Record that nothing came back in time from a health check that began at `asked_s`."""
        self._record(asked_s, asked_s, sent_s)

    def record_failure(self, asked_s: float, *, sent_s: float) -> None:
        """Record that a health check that began at `asked_s` failed by a broken connection or by the worker's own
        answer. If it is the first failed check, the worker itself has failed, because its host was reached.
        """
        self._record(asked_s, -math.inf, sent_s)

    def count(self, another_sent_s: float) -> None:
        """Count the check recorded last, if the worker is silent by itself."""
        self.num_counted += self.is_of_worker(another_sent_s)

    def num_missed(self, sent_s: float) -> int:
        """Return how many checks count; 0 once the worker has sent anything."""
        return self.num_counted if self.continues(sent_s) else 0

    def continues(self, sent_s: float) -> bool:
        """Return whether the worker has sent nothing since its last unanswered check began."""
        return sent_s <= self._last_asked_s

    def is_of_worker(self, another_sent_s: float) -> bool:
        """Return whether another worker has sent something since the first unanswered check began, or that check
        failed."""
        return another_sent_s >= self._own_since_s

    def _record(self, asked_s: float, own_since_s: float, sent_s: float) -> None:
        if not self.continues(sent_s):
            self.num_counted, self._own_since_s = 0, own_since_s
        self._last_asked_s = asked_s
