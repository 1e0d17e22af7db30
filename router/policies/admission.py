"""Which requests may begin: admission control and the early refusal of requests that would be served too late. Pure.

The time is an argument.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from cluster.errors import Overloaded, QueueFull
from cluster.observe.service_rate import ServiceRate, bounded_retry_s


class AdmissionControl:
    """At most `max_live_requests` requests are live at once.

    A request occupies a place before any work is spent on it, tokenizing included, until its client has left.
    """

    def __init__(self, max_live_requests: int) -> None:
        self._max_live_requests = max_live_requests
        self._rate = ServiceRate()

    def check_place(self, num_live: int, *, takes_over: bool = False) -> None:
        """Raise Overloaded where no place is free. A request that takes over a live stream ends it, so the place of
        that stream is about to become free: as many requests again may do so at once."""
        most = self._max_live_requests * (2 if takes_over else 1)
        if num_live >= most:
            raise Overloaded(
                f"{num_live} requests are being served, the most this router takes; try again",
                retry_after_s=self._rate.retry_after_s(),
            )

    def record_end(self, now_s: float) -> None:
        """Record that a place became free: `retry_after_s` follows the rate at which places become free."""
        self._rate.note_end(now_s)


@dataclass(frozen=True, slots=True)
class WorkerBacklog:
    """The prompts of this router that one worker has not computed yet."""

    num_tokens: int  # of prompts that are queued or being computed
    tokens_per_s: float | None  # None: not known yet
    full_for_s: float = 0.0  # its queue is full for this long, as it reported; 0: it accepts more

    @property
    def wait_s(self) -> float:
        """The time until a new prompt is computed; 0 if it is not known."""
        return self.num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0


def early_refusal(
    prefills: Sequence[WorkerBacklog], decodes: Sequence[WorkerBacklog], time_left_s: float
) -> Overloaded | None:
    """Return why a new request should be refused before any worker is asked: every queue of a role is full, or its
    deadline is before its turn at every worker. Without workers the request is not refused, and waits."""
    for pool, backlogs in (("prefill", prefills), ("decode", decodes)):
        if backlogs and all(backlog.full_for_s > 0 for backlog in backlogs):
            first_s = min(backlog.full_for_s for backlog in backlogs)
            return QueueFull(
                f"the queues of all {len(backlogs)} {pool} workers are full; try again",
                retry_after_s=bounded_retry_s(first_s),
            )
    least_s = min((backlog.wait_s for backlog in prefills), default=0.0)
    if least_s <= time_left_s:
        return None
    return Overloaded(
        f"about {least_s:.3g} s of other prompts are ahead of this one, and its deadline is in {time_left_s:.3g} s;"
        " allow more, or try again",
        retry_after_s=bounded_retry_s(least_s - time_left_s),
    )


_KEPT_SHARE = 0.9  # weight of the former sums in each measurement
_MIN_PROMPTS = 8  # measured before the rate is used: the first prompts of a worker are its slowest


class BacklogEstimator:
    """Estimates the backlog of one worker from the prompts that this router sent to it, and how fast they were
    computed.

    Prompts of other routers are not counted. A worker that several routers share is slower for each of them, so the
    estimated wait is still right.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._prompts: dict[int, int] = {}  # tokens of what is not computed yet
        self._num_measured = 0
        self._measured_tokens = 0.0
        self._measured_s = 0.0
        self._since_s = 0.0  # the start of the next measurement
        self._full_until_s = float("-inf")

    def add_prompt(self, num_tokens: int, now_s: float) -> int:
        """Record that a prompt was sent to the worker. Returns its number."""
        if not self._prompts:
            self._since_s = now_s
        number = next(self._numbers)
        self._prompts[number] = num_tokens
        return number

    def record_computed(self, number: int, now_s: float) -> None:
        """Record that the worker has computed the prompt, so that its queue has room again."""
        num_tokens = self._prompts.pop(number, 0)
        if now_s > self._since_s:  # prompts of one step are one sample
            self._measured_tokens *= _KEPT_SHARE
            self._measured_s = self._measured_s * _KEPT_SHARE + now_s - self._since_s
        self._measured_tokens += num_tokens
        self._num_measured += 1
        self._since_s = now_s
        self._full_until_s = float("-inf")

    def remove_prompt(self, number: int) -> None:
        """Remove a prompt that will not be computed. It has no effect on one that was."""
        self._prompts.pop(number, None)

    def record_full_queue(self, retry_after_s: float | None, now_s: float) -> None:
        """Record that the worker refused a prompt because its queue is full. Without a retry time it has no effect."""
        if retry_after_s is not None:
            self._full_until_s = now_s + retry_after_s

    def estimate(self, now_s: float) -> WorkerBacklog:
        """Return what a new prompt would find ahead of it."""
        is_known = self._num_measured >= _MIN_PROMPTS and self._measured_s > 0
        return WorkerBacklog(
            num_tokens=sum(self._prompts.values()),
            tokens_per_s=self._measured_tokens / self._measured_s if is_known else None,
            full_for_s=max(0.0, self._full_until_s - now_s),
        )
