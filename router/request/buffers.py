"""Which client pays when the tokens that a router keeps for all its clients exceed their bound. Pure.

Owns the number of tokens kept for each client, and since when each client has taken nothing. A client is stopped when
it has taken nothing for `STOPPED_S` while tokens waited for it. Past the bound the client that has been stopped longest
is ended first, however little waits for it: a client that reads is not ended for one that does not. When no client is
stopped, the one with the most tokens is ended: it is what fills the buffers.
"""

from collections.abc import Callable

STOPPED_S = 0.5  # a client that reads takes something within this, on a busy machine too
EndClient = Callable[[str, bool], object]  # with what was kept for it, in words; whether it was stopped


class Share:
    """What is kept for one client."""

    def __init__(self, buffers: "Buffers", end: EndClient) -> None:
        self._buffers, self.end = buffers, end
        self.num_tokens = 0
        self.untaken_since_s: float | None = None  # None: the client has been offered nothing that it has not taken

    def offer(self, num_tokens: int, now_s: float) -> None:
        """More tokens wait for the client. Ends clients if they are too many."""
        if self.untaken_since_s is None:
            self.untaken_since_s = now_s
        self.keep(num_tokens, now_s)

    def keep(self, num_tokens: int, now_s: float) -> None:
        """More tokens are kept for the client, which cannot take any yet. Ends clients if they are too many."""
        self._count(num_tokens)
        self._buffers.relieve(now_s)

    def take(self, num_tokens: int, now_s: float) -> None:
        """The client has taken some, and is offered the others."""
        self._count(-num_tokens)
        self.untaken_since_s = now_s if self.num_tokens else None

    def clear(self) -> None:
        self._count(-self.num_tokens)
        self.untaken_since_s = None

    def stopped_s(self, now_s: float) -> float:
        """How long the client has taken nothing while something waited for it."""
        return 0.0 if self.untaken_since_s is None else now_s - self.untaken_since_s

    def _count(self, change: int) -> None:
        self.num_tokens += change
        self._buffers.num_tokens += change


class Buffers:
    """All of a router's."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._shares: set[Share] = set()
        self.num_tokens = 0

    def add(self, end: EndClient) -> Share:
        """One more client. `end` must clear its share."""
        share = Share(self, end)
        self._shares.add(share)
        return share

    def remove(self, share: Share) -> None:
        share.clear()
        self._shares.remove(share)

    def relieve(self, now_s: float) -> None:
        """Ends clients until what is kept is within the bound."""
        while self.num_tokens > self._max_tokens:
            victim = max((share for share in self._shares if share.num_tokens), key=lambda share: _rank(share, now_s))
            stopped_s = victim.stopped_s(now_s)
            is_stopped = stopped_s >= STOPPED_S
            told = f"{victim.num_tokens} tokens were kept for this client"
            told += f", which took none for {stopped_s:.1f} s" if is_stopped else ""
            told += f", and {self.num_tokens} for all clients, more than {self._max_tokens}"
            victim.end(told, is_stopped)
            assert victim.num_tokens == 0, "what is kept for a client that was ended must be cleared"

    def check(self) -> None:
        assert self.num_tokens == sum(share.num_tokens for share in self._shares), "kept tokens do not add up"


def _rank(share: Share, now_s: float) -> tuple[float, int]:
    """The highest is ended first."""
    stopped_s = share.stopped_s(now_s)
    return (stopped_s if stopped_s >= STOPPED_S else 0.0, share.num_tokens)
