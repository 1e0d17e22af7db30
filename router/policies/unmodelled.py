"""The times of requests that predictions from service times leave out, learned from this router's own requests. Pure;
the time is an argument.

Every first token also waits for messages, threads and the router itself, and every token for what runs beside the
worker on its machine and for prompts that arrive later. One worker's recent requests show how much that is: their
median difference is added to the next prediction, and their median factor multiplies it. So single requests that waited
for something unusual change nothing, and a change of the worker is followed within a few requests.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

_NUM_REQUESTS = 21  # of which the median is taken
_LEAST_REQUESTS = 3  # fewer count for nothing
_MAX_AGE_S = 120.0  # of a request: a worker that was avoided since then gets work again
_MAX_TTFT_S = 1.0
_MIN_FACTOR, _MAX_FACTOR = 0.5, 4.0


@dataclass(frozen=True, slots=True)
class Unmodelled:
    """The corrections of the modelled times of a request at one worker."""

    here_s: float = 0.0  # to the time to first token, if the worker also decodes the request
    export_s: float = 0.0  # the same if another worker decodes it
    itl_factor: float = 1.0  # of the time between tokens, if this worker decodes them


NOTHING_UNMODELLED = Unmodelled()


class UnmodelledTimes:
    """Learns what is unmodelled at one worker."""

    def __init__(self) -> None:
        self._ttft_s = {is_export: _RecentMedian(0.0) for is_export in (False, True)}
        self._itl_factor = _RecentMedian(1.0)

    def record_ttft(self, modelled_s: float, real_s: float, now_s: float, *, is_export: bool) -> None:
        """Record the time to first token of a request whose prompt this worker computed."""
        self._ttft_s[is_export].add(real_s - modelled_s, now_s)

    def record_itl(self, modelled_s: float, real_s: float, now_s: float) -> None:
        """Record the mean time between the tokens of a request that this worker decoded."""
        if modelled_s > 0:
            self._itl_factor.add(real_s / modelled_s, now_s)

    def at(self, now_s: float) -> Unmodelled:
        here_s, export_s = (min(max(self._ttft_s[key].at(now_s), 0.0), _MAX_TTFT_S) for key in (False, True))
        return Unmodelled(here_s, export_s, min(max(self._itl_factor.at(now_s), _MIN_FACTOR), _MAX_FACTOR))


@dataclass(frozen=True, slots=True)
class ModelledRequest:
    """A request that was sent to workers with these modelled times. Its real times teach its workers' models."""

    ttft_s: float
    itl_s: float
    sent_s: float
    computes: UnmodelledTimes  # of the worker that computes its prompt
    decodes: UnmodelledTimes  # of the worker that decodes it; the same if it does both

    def record_first_token(self, now_s: float) -> None:
        is_export = self.computes is not self.decodes
        self.computes.record_ttft(self.ttft_s, now_s - self.sent_s, now_s, is_export=is_export)

    def record_end(self, itl_s: float, now_s: float) -> None:
        """Record the mean time between its tokens."""
        self.decodes.record_itl(self.itl_s, itl_s, now_s)


class _RecentMedian:
    """The median of recent values; `default` while there are only a few."""

    def __init__(self, default: float) -> None:
        self._default = default
        self._values: deque[tuple[float, float]] = deque(maxlen=_NUM_REQUESTS)  # the time and the value

    def add(self, value: float, now_s: float) -> None:
        self._values.append((now_s, value))

    def at(self, now_s: float) -> float:
        while self._values and self._values[0][0] < now_s - _MAX_AGE_S:
            self._values.popleft()
        return median(value for _, value in self._values) if len(self._values) >= _LEAST_REQUESTS else self._default
