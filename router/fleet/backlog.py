"""What one worker has yet to compute for this router, and how fast it has been lately. Pure: the time is an argument.

Other routers' prompts are not seen, and need not be: a worker that is shared is slower for each, and a wait that is
judged by this router's own share of it comes out the same.
"""

from itertools import count

from router.policies.admission import WorkerBacklog

_KEPT_SHARE = 0.9  # of the sums before, at each step: the last few dozen count
_MIN_PROMPTS = 8  # measured before the rate is believed: the first prompts of a worker are its slowest


class Backlog:
    def __init__(self) -> None:
        self._numbers = count()
        self._prompts: dict[int, int] = {}  # tokens of what is not computed yet
        self._num_measured = 0
        self._measured_tokens = 0.0
        self._measured_s = 0.0
        self._since_s = 0.0  # what was computed since then is not measured yet
        self._full_until_s = float("-inf")

    def begin(self, num_tokens: int, now_s: float) -> int:
        """A prompt was sent there. Answers the number by which it ends."""
        if not self._prompts:
            self._since_s = now_s
        number = next(self._numbers)
        self._prompts[number] = num_tokens
        return number

    def done(self, number: int, now_s: float) -> None:
        """It is computed: the worker has room again."""
        num_tokens = self._prompts.pop(number, 0)
        if now_s > self._since_s:  # prompts of one step are one sample
            self._measured_tokens *= _KEPT_SHARE
            self._measured_s = self._measured_s * _KEPT_SHARE + now_s - self._since_s
        self._measured_tokens += num_tokens
        self._num_measured += 1
        self._since_s = now_s
        self._full_until_s = float("-inf")

    def drop(self, number: int) -> None:
        """It will not be computed; nothing where it was done."""
        self._prompts.pop(number, None)

    def refused(self, retry_after_s: float | None, now_s: float) -> None:
        """Its queue is full. Without a word on when to come back nothing is concluded from it."""
        if retry_after_s is not None:
            self._full_until_s = now_s + retry_after_s

    def ahead(self, now_s: float) -> WorkerBacklog:
        """Of a newcomer."""
        is_known = self._num_measured >= _MIN_PROMPTS and self._measured_s > 0
        return WorkerBacklog(
            num_tokens=sum(self._prompts.values()),
            tokens_per_s=self._measured_tokens / self._measured_s if is_known else None,
            full_for_s=max(0.0, self._full_until_s - now_s),
        )
