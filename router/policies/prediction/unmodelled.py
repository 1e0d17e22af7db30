"""Learns from a router's own requests the delays that a forecast leaves out. Pure.

Every first token also waits for messages, threads and the router itself, and every token for other processes of the
worker's machine and for more or fewer sequences and prompts than were expected. The median difference of a worker's
recent requests is added to the next prediction, and their median factor multiplies it: single outliers change nothing,
nor does a single pause that delays many requests, and a change of the worker is followed within a few requests.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

_NUM_REQUESTS = 21  # of which the median is taken
_LEAST_REQUESTS = 3  # fewer count for nothing
_MAX_AGE_S = 120.0  # of a request: a worker that was avoided since then gets work again
_MAX_TTFT_S = 1.0
_MIN_FACTOR, _MAX_FACTOR = 0.5, 4.0
_PAUSE_S = 0.5  # between two tokens: a longer one is a pause of the worker, if it also exceeds `_MAX_FACTOR`


@dataclass(frozen=True, slots=True)
class Unmodelled:
    """The corrections of the modelled times of a request at one worker."""

    here_s: float = 0.0  # to the time to first token, if the worker also decodes the request
    export_s: float = 0.0  # the same if another worker decodes it
    itl_factor: float = 1.0  # of the time between tokens, if this worker decodes them


NOTHING_UNMODELLED = Unmodelled()


class UnmodelledTimes:
    """Estimates the delays at one worker that the forecast does not model."""

    def __init__(self) -> None:
        self._ttft_s = {is_export: _RecentMedian(0.0) for is_export in (False, True)}
        self._itl_factor = _RecentMedian(1.0)
        self.late_ttft, self.late_itl = _Late(), _Late()

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


@dataclass(slots=True)
class DecodeSpan:
    """The times between the tokens of a sequence, as a router received them."""

    num_intervals: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.num_intervals += 1
        self.total_s += seconds
        if seconds > self.longest_s:
            self.longest_s = seconds

    @property
    def itl_s(self) -> float:
        """Return the mean. There must be at least one."""
        return self.total_s / self.num_intervals


@dataclass(frozen=True, slots=True)
class ModelledRequest:
    """A request that was sent to workers with these modelled times. Its measured times update its workers' models."""

    ttft_s: float
    itl_s: float
    sent_s: float
    computes: UnmodelledTimes  # of the worker that computes its prompt
    decodes: UnmodelledTimes  # of the worker that decodes it; the same if it does both

    def record_first_token(self, now_s: float) -> None:
        is_export, real_s = self.computes is not self.decodes, now_s - self.sent_s
        if real_s - self.ttft_s <= _MAX_TTFT_S or self.computes.late_ttft.counts(self.sent_s, now_s):
            self.computes.record_ttft(self.ttft_s, real_s, now_s, is_export=is_export)

    def record_end(self, decode: DecodeSpan, now_s: float) -> None:
        """Record the mean time between its tokens, without one pause: it delays all sequences of the worker at once, so
        that most of the requests that count would have it, and says nothing about the next ones."""
        itl_s = decode.itl_s
        if decode.num_intervals > 1 and decode.longest_s > max(_PAUSE_S, _MAX_FACTOR * self.itl_s):
            itl_s = (decode.total_s - decode.longest_s) / (decode.num_intervals - 1)
        if itl_s <= _MAX_FACTOR * self.itl_s or self.decodes.late_itl.counts(self.sent_s, now_s):
            self.decodes.record_itl(self.itl_s, itl_s, now_s)


@dataclass(slots=True)
class _Late:
    """The requests whose times exceed every correction. A pause delays all requests that wait: they count as one."""

    _latest_s: float = -math.inf  # when the latest one that counts was measured

    def counts(self, sent_s: float, now_s: float) -> bool:
        """Return whether such a request counts: it was sent after the latest one that did was measured."""
        if is_another := sent_s >= self._latest_s:
            self._latest_s = now_s
        return is_another


class _RecentMedian:
    """The median of recent values; `default` while there are only a few."""

    def __init__(self, default: float) -> None:
        self._default = default
        self._values: deque[tuple[float, float]] = deque(maxlen=_NUM_REQUESTS)  # the time and the value
        self._median: float | None = default  # None: it must be computed again

    def add(self, value: float, now_s: float) -> None:
        self._values.append((now_s, value))
        self._median = None

    def at(self, now_s: float) -> float:
        while self._values and self._values[0][0] < now_s - _MAX_AGE_S:
            self._values.popleft()
            self._median = None
        if self._median is None:
            values = [value for _, value in self._values]
            self._median = median(values) if len(values) >= _LEAST_REQUESTS else self._default
        return self._median
