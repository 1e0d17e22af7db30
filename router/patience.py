"""How long this router waits for a worker that does not speak. docs/failover.md has the figures per stage."""

from dataclasses import dataclass

_ASK_SHARE = 0.3  # of the longest silence; asked, and answered or not, before two thirds of it have passed


@dataclass(frozen=True, slots=True)
class Patience:
    """`silence_s`: a stream on which a worker says nothing for so long, no heartbeat either, counts as broken.
    `grace_s`: so long a worker whose stream broke may come back, and one in doubt may fail to answer."""

    silence_s: float
    grace_s: float

    @property
    def ask_after_s(self) -> float:
        """A worker that has said nothing for so long is asked whether it is there."""
        return self.silence_s * _ASK_SHARE

    @property
    def answer_s(self) -> float:
        """It has so long to say so; then it is in doubt, and gets no new work."""
        return self.silence_s * _ASK_SHARE

    @property
    def call_s(self) -> float:
        """The longest that a call may take in which the worker only takes something in."""
        return self.silence_s + self.grace_s
