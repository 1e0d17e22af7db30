"""Which requests may begin. Pure: the time is an argument.

Owns the places of live requests and their ids, and says from how fast places became free when to try again. What it
knows of workers it is told: what waits at them, and how fast they are.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import DuplicateRequest, Overloaded, QueueFull
from cluster.observe.service_rate import ServiceRate, bounded_retry_s


class Admission:
    """At most `max_live_requests` at once. A new request must have an id that is not live.

    A request takes its place before anything is spent on it, tokenizing included, and holds it until its client has
    left. It holds its id while it is served. A resumed request is admitted under a live id too: its acceptance names
    its stream, so another client that chose the same id cannot keep it out.
    """

    def __init__(self, max_live_requests: int) -> None:
        self._max_live_requests = max_live_requests
        self._num_places = 0  # taken
        self._live: Counter[str] = Counter()
        self._rate = ServiceRate()

    def __len__(self) -> int:
        """Requests that hold an id."""
        return self._live.total()

    @property
    def num_places(self) -> int:
        """That are taken."""
        return self._num_places

    def enter(self, *, takes_over: bool = False) -> None:
        """Takes a place, which must be left again. Raises Overloaded. A request that takes over a live stream ends it,
        and the place of that stream is about to become free: as many again may do so at once."""
        most = self._max_live_requests * (2 if takes_over else 1)
        if self._num_places >= most:
            raise Overloaded(
                f"{self._num_places} requests are being served, the most this router takes; try again",
                retry_after_s=self._rate.retry_after_s(),
            )
        self._num_places += 1

    def leave(self, now_s: float) -> None:
        self._num_places -= 1
        self._rate.note_end(now_s)

    def admit(self, request_id: str, *, is_resumed: bool = False) -> None:
        """Of a request that has its place. Every admitted id must be released. Raises DuplicateRequest."""
        if self._live[request_id] and not is_resumed:
            raise DuplicateRequest(f"request id {request_id!r} belongs to a live request; choose another, or none")
        self._live[request_id] += 1

    def release(self, request_id: str) -> None:
        self._live[request_id] -= 1
        if not self._live[request_id]:
            del self._live[request_id]


@dataclass(frozen=True, slots=True)
class WorkerBacklog:
    """What is ahead of a newcomer at one worker."""

    num_tokens: int  # of prompts that wait there or are being computed
    tokens_per_s: float | None  # None: too little was measured
    full_for_s: float = 0.0  # it said that its queue is full, and when to come back; 0: it takes more

    @property
    def wait_s(self) -> float:
        """Until a newcomer's turn; 0 where nobody can tell."""
        return self.num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0


def early_refusal(
    prefills: Sequence[WorkerBacklog], decodes: Sequence[WorkerBacklog], time_left_s: float
) -> Overloaded | None:
    """Whether a new request would be in vain, before a worker hears of it: every queue of a pool is full, or its turn
    would come after its deadline wherever it waits. Without workers there is nothing to say: it waits for one."""
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
