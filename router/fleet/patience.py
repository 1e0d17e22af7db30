"""How long this router waits for a worker that does not speak. docs/failover.md has the figures per stage."""

from dataclasses import dataclass

# Of the longest silence. With the default lease of 5 s and a heartbeat each second a worker is asked when two have not
# come, and is in doubt half a second later.
_ASK_SHARE = 0.4
_ANSWER_SHARE = 0.1
_LEAST_ANSWER_S = 0.25  # a machine that is only busy may take as long


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
        return max(self.silence_s * _ANSWER_SHARE, _LEAST_ANSWER_S)

    @property
    def call_s(self) -> float:
        """The longest that a call may take in which the worker only takes something in."""
        return self.silence_s + self.grace_s
