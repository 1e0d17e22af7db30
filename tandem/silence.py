"""How long a router may say nothing to a reader who waits for it. Pure: time is an argument.

A client asks for a sign of life every so often, by metadata, and a router that knows this says in its initial metadata
that it gives them: an empty message when it has had nothing else to say for so long. So a router that is frozen is told
from one that is slow, through whatever proxy it is reached; one that promised nothing is waited for as long as it is
connected. When two signs have not come the router is asked directly, on the same connection, and left when it does not
answer at once; one that answers is left when five signs have not come.
"""

ALIVE_KEY = "tandem-alive-s"  # metadata, both ways: seconds from one sign of life to the next
SILENCE_S = 5.0  # as long as a member of the cluster may be silent
_SIGNS_IN_IT = 5  # that fail to come, one after the other
_ASK_SHARE = 0.4  # of the longest silence: two signs have not come
_ANSWER_SHARE = 0.1
_LEAST_ANSWER_S = 0.25  # a machine that is only busy may take as long
_LATE_S = 0.5  # who looks so much later than due was stopped or busy itself


def sign_every_s(silence_s: float) -> float:
    """What to ask for, to bear this."""
    return silence_s / _SIGNS_IN_IT


def borne_s(silence_s: float, told: str) -> float:
    """`told`: what the router answered. Raises ValueError when that is no number."""
    return max(silence_s, float(told) * _SIGNS_IN_IT)


class Silence:
    """Of one call. Counts only while its reader waits, from the beginning of each wait."""

    def __init__(self, limit_s: float | None, *, asks: bool = False) -> None:
        """`limit_s` None: it may last. `asks`: whoever watches it can ask the other side whether it is there."""
        self.limit_s = limit_s
        self.is_over = False  # it was too long: the other side is lost
        self.lasted_s = 0.0  # then: how long it was
        self._asks = asks
        self._began_s = 0.0
        self._due_s: float | None = None  # while the reader waits: when to look
        self._over_s = 0.0  # when it is too long, whatever the answer was
        self._is_asked = False
        self._is_question_due = False

    @property
    def answer_s(self) -> float:
        """So long the other side has to answer."""
        limit_s = self.limit_s or 0.0
        return min(max(limit_s * _ANSWER_SHARE, _LEAST_ANSWER_S), limit_s * (1 - _ASK_SHARE))

    def begin(self, now_s: float) -> float | None:
        """The reader waits from now on. When to look; None: never."""
        self._is_asked = self._is_question_due = False
        if self.limit_s is None:
            self._due_s = None
        else:
            self._began_s, self._over_s = now_s, now_s + self.limit_s
            self._due_s = now_s + self.limit_s * _ASK_SHARE if self._asks else self._over_s
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
            self._over_s = max(self._over_s, self._due_s + self.answer_s if self._asks else self._due_s)
            self._is_asked = False
        elif now_s >= self._due_s and self._asks and not self._is_asked:
            self._is_asked = self._is_question_due = True
            self._due_s = now_s + self.answer_s
        elif now_s >= self._due_s:
            self.is_over, self.lasted_s = True, now_s - self._began_s
            return None
        return self._due_s

    def take_question(self) -> bool:
        """After each look: whether to ask now."""
        is_due, self._is_question_due = self._is_question_due, False
        return is_due

    def answered(self) -> None:
        """The other side is there: it has the rest of its time to say something on the call itself."""
        if self._due_s is not None and self._is_asked:
            self._due_s = max(self._due_s, self._over_s)
