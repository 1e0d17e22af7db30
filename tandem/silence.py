"""How long a router may say nothing to a reader who waits for it. Pure: time is an argument.

A client asks for a sign of life every so often, by metadata, and a router that knows this says in its initial metadata
that it gives them: an empty message when it has had nothing else to say for so long. So a router that is frozen is told
from one that is slow, through whatever proxy it is reached; one that promised nothing is waited for as long as it is
connected.
"""

ALIVE_KEY = "tandem-alive-s"  # metadata, both ways: seconds from one sign of life to the next
SILENCE_S = 5.0  # as long as a member of the cluster may be silent
_SIGNS_IN_IT = 5  # that fail to come, one after the other
_LATE_S = 0.5  # who looks so much later than due was stopped or busy itself


def sign_every_s(silence_s: float) -> float:
    """What to ask for, to bear this."""
    return silence_s / _SIGNS_IN_IT


def borne_s(silence_s: float, told: str) -> float:
    """`told`: what the router answered. Raises ValueError when that is no number."""
    return max(silence_s, float(told) * _SIGNS_IN_IT)


class Silence:
    """Of one call. Counts only while its reader waits, from the beginning of each wait."""

    def __init__(self, limit_s: float | None) -> None:
        """`limit_s` None: it may last."""
        self.limit_s = limit_s
        self.is_over = False  # it was too long: the other side is lost
        self._due_s: float | None = None  # while the reader waits

    def begin(self, now_s: float) -> float | None:
        """The reader waits from now on. When to look; None: never."""
        self._due_s = now_s + self.limit_s if self.limit_s is not None else None
        return self._due_s

    def end(self) -> None:
        """Something came, or the stream ended."""
        self._due_s = None

    def look(self, now_s: float) -> float | None:
        """When to look again; None: no more. What came while nobody looked may not have been read yet: whoever looks
        too late gives it the time of one sign."""
        if self._due_s is None or self.limit_s is None:
            return None
        if now_s - self._due_s > _LATE_S:
            self._due_s = now_s + sign_every_s(self.limit_s)
        elif now_s >= self._due_s:
            self.is_over = True
            return None
        return self._due_s
