"""The keep-alive timeout of one call: when to ping the router, and when the call counts as lost. Pure: time is an
argument.

A client asks for keep-alive messages with metadata, and a router that sends them returns their interval in its initial
metadata. This separates a frozen router from a slow one, also behind a proxy. After two missing messages the client
pings the router on the same connection, and the call is lost if no response comes in time. If the router responds, the
call is lost after five missing messages. A router that has not returned an interval must only respond to the ping: the
call is lost if neither a message nor the response to the ping comes within `FIRST_RESPONSE_S`.
"""

KEEPALIVE_KEY = "tandem-keepalive-s"  # metadata in both directions: the seconds between two keep-alive messages
KEEPALIVE_TIMEOUT_S = 5.0
FIRST_RESPONSE_S = 5.0  # for the first response of a router, to which the client may have to connect first
_MESSAGES_PER_TIMEOUT = 5
_PING_SHARE = 0.4  # of the timeout, after which the router is pinged: two messages are missing
_RESPONSE_SHARE = 0.1  # of the timeout, for the response to the ping
_LEAST_RESPONSE_S = 0.25  # a busy machine may need this long
_LATE_S = 0.5  # a check that is later than this shows that this process was stopped or busy


def keepalive_interval_s(timeout_s: float) -> float:
    """Return the interval of keep-alive messages to ask for, in seconds."""
    return timeout_s / _MESSAGES_PER_TIMEOUT


def keepalive_timeout_s(timeout_s: float, interval: str) -> float:
    """Return the timeout for a router that sends keep-alive messages at `interval` (seconds, as text), at least
    `timeout_s`. Raises ValueError for an interval that is no number."""
    return max(timeout_s, float(interval) * _MESSAGES_PER_TIMEOUT)


class KeepAliveTimer:
    """The timer of one call. It runs only while a reader waits for the next message, and restarts with each wait."""

    def __init__(self, timeout_s: float | None, *, can_ping: bool = False, is_response_enough: bool = False) -> None:
        """`timeout_s` None: no timeout. `can_ping`: the owner can ping the other side. `is_response_enough`: the other
        side may send no keep-alive messages, so one that responds to the ping has no timeout after that."""
        self.timeout_s = timeout_s
        self.is_over = False  # the call is lost
        self.waited_s = 0.0  # how long the reader had waited when the call was lost
        self._can_ping = can_ping
        self._is_response_enough = is_response_enough
        self._began_s = 0.0
        self._check_s: float | None = None  # while a reader waits: the time of the next check
        self._over_s = 0.0  # the time at which the call is lost even if the other side responds to the ping
        self._is_pinged = False
        self._is_ping_due = False

    @classmethod
    def of_first_call(cls, timeout_s: float) -> "KeepAliveTimer":
        """Return the timer of a call to a router that has not sent anything yet. `timeout_s`: of later calls."""
        return cls(max(FIRST_RESPONSE_S, timeout_s), can_ping=True, is_response_enough=True)

    @property
    def response_s(self) -> float:
        """Return the seconds that the other side has for its response to the ping."""
        timeout_s = self.timeout_s or 0.0
        rest_s = timeout_s * (1 - _PING_SHARE)
        # The first call to a router may have to connect to it first.
        return rest_s if self._is_response_enough else min(max(timeout_s * _RESPONSE_SHARE, _LEAST_RESPONSE_S), rest_s)

    def on_first_message(self, timeout_s: float | None) -> None:
        """Record that the other side sends keep-alive messages with this timeout; None: it sends none, so there is no
        timeout from now on.
        """
        self.timeout_s, self._is_response_enough = timeout_s, False

    def begin(self, now_s: float) -> float | None:
        """Start a wait. Returns the time of the first check, None without a timeout."""
        self._is_pinged = self._is_ping_due = False
        if self.timeout_s is None:
            self._check_s = None
        else:
            self._began_s, self._over_s = now_s, now_s + self.timeout_s
            self._check_s = now_s + self.timeout_s * _PING_SHARE if self._can_ping else self._over_s
        return self._check_s

    def end(self) -> None:
        """End the wait: a message came, or the stream ended."""
        self._check_s = None

    def check(self, now_s: float) -> float | None:
        """Check the wait. Returns the time of the next check, None if there is none.

        A check that is late may run before a message that has arrived was read, so the timer then waits for one more
        interval."""
        if self._check_s is None or self.timeout_s is None:
            return None
        if now_s - self._check_s > _LATE_S:
            self._check_s = now_s + keepalive_interval_s(self.timeout_s)
            self._over_s = max(self._over_s, self._check_s + self.response_s if self._can_ping else self._check_s)
            self._is_pinged = False
        elif now_s >= self._check_s and self._can_ping and not self._is_pinged:
            self._is_pinged = self._is_ping_due = True
            self._check_s = now_s + self.response_s
        elif now_s >= self._check_s:
            self.is_over, self.waited_s = True, now_s - self._began_s
            return None
        return self._check_s

    def pop_ping(self) -> bool:
        """Return whether to send a ping now. To be called after each check."""
        is_due, self._is_ping_due = self._is_ping_due, False
        return is_due

    def on_ping_response(self) -> None:
        """Record that the other side responded. It has the rest of the timeout to send a message on the call, unless
        its response is enough.
        """
        if self._check_s is not None and self._is_pinged:
            self._check_s = None if self._is_response_enough else max(self._check_s, self._over_s)
