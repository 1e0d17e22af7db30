"""Explanations of placements beside the measured times: of live requests, and of the last ones that ended. An ended
request is also a line of the log: where its time went, on which workers, and why it was retried.

Memory is bounded: `MAX_EXPLAINED` ended requests, `MAX_KEPT` older ones that failed, were retried or were slow,
`MAX_ATTEMPTS` attempts of each, and the candidates that a placement keeps. At most `_MOST_PER_S` lines a second are
about requests that ended well; failed ones are always logged. No line has a prompt or an output. Owns no request and
decides nothing.
"""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import dropwhile, islice, takewhile
from typing import NamedTuple

from cluster.errors import Cancelled, DeadlineExceeded
from router.policies.effect import Comparison, DisaggregationEffect
from router.policies.placement import Placement
from router.requests import Ledger

_LOG = logging.getLogger("tandem.router.pipeline")
MAX_EXPLAINED = 1000
MAX_KEPT = 250
MAX_UNPLACED = 100  # requests that were refused before any worker was chosen
MAX_SPANS = 64  # of one request: the first ones and the last ones
_SLOW_SHARE = 0.02  # of the last requests
_JUDGED_EVERY = 100  # requests: how slow is slow
MAX_ATTEMPTS = 8  # of one request: the first one and the last ones
MAX_FOUND = 10  # requests of one label: the newest ones
_MOST_PER_S = 50  # lines of the log
_GAVE_UP = (Cancelled.reason, DeadlineExceeded.reason)
_ANSWER_PREFIXES = ("cmpl-", "chatcmpl-", "msg_")  # of the ids of HTTP answers


def is_named(name: str, request_id: str, label: str, trace_id: str) -> bool:
    """Return whether `name` is a request's id, label or trace id, or the id of its HTTP answer.

    The label of each of several prompts in one HTTP request has a number appended, and the name without it finds all of
    them."""
    plain = next((name.removeprefix(prefix) for prefix in _ANSWER_PREFIXES if name.startswith(prefix)), name)
    shared, _, number = label.rpartition("-")
    return bool(plain) and (
        name in (request_id, label, trace_id) or plain == label or (number.isdigit() and plain == shared)
    )


@dataclass(frozen=True, slots=True)
class PlacedAttempt:
    """The placement of one attempt of a request, or of a hedge."""

    placement: Placement
    at_s: float  # when it was placed, by the router's monotonic clock
    is_batch: bool = False  # it is of the batch class, which waits for all other work
    failure: str = ""  # why it failed, was overtaken or continued elsewhere, as the ledger lists it


class PlacementLog:
    """The placements of one request, in their order. Its account owns it."""

    def __init__(self) -> None:
        self._attempts: list[PlacedAttempt] = []

    @property
    def attempts(self) -> tuple[PlacedAttempt, ...]:
        return tuple(self._attempts)

    def add(self, placement: Placement, at_s: float, *, is_batch: bool = False) -> None:
        if len(self._attempts) == MAX_ATTEMPTS:
            del self._attempts[1]
        self._attempts.append(PlacedAttempt(placement, at_s, is_batch))

    def record_failure(self, placement: Placement, reason: str) -> None:
        """Record why the attempt with this placement ended early, or did not continue at its workers; after the reasons
        that it has already."""
        self._attempts = [
            replace(attempt, failure=", ".join(filter(None, (attempt.failure, reason))))
            if attempt.placement is placement
            else attempt
            for attempt in self._attempts
        ]


class Span(NamedTuple):
    """One phase of a request, with its beginning and its duration."""

    phase: str
    start_s: float  # from the request's arrival
    duration_s: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one request: its placements, and its measured times."""

    request_id: str
    label: str
    outcome: str  # ok, or the reason of an error; empty: it is live
    began_s: float  # when it arrived, by the router's monotonic clock
    num_prompt_tokens: int
    num_tokens: int  # that its client was given, over all choices
    first_token_s: float | None  # when its client was given the first one, by the same clock; None: not yet
    itl_s: float | None  # the mean time between its tokens; None: it has fewer than two
    attempts: tuple[PlacedAttempt, ...]
    ledger: Ledger | None = None
    spans: tuple[Span, ...] = ()  # its phases in their order, at most MAX_SPANS
    trace_id: str = ""  # empty: the router makes no spans
    workers: tuple[str, str] = "", ""  # that serve it, or served it last: prefill, decode; empty: none
    number: int = 0  # of an ended request, from 1 on


class Explanations:
    """The explanations of the last requests that ended at this router, and the effect of disaggregation in them."""

    def __init__(self) -> None:
        self._ended: deque[Explanation] = deque()  # the oldest first
        self._kept: deque[Explanation] = deque(maxlen=MAX_KEPT)  # older ones
        self._unplaced: deque[Explanation] = deque(maxlen=MAX_UNPLACED)
        self._slow_s = (float("inf"), float("inf"))  # time to first token, time between tokens
        self._effect = DisaggregationEffect()
        self.newest = 0  # number of the last request that was added

    def __len__(self) -> int:
        return len(self._kept) + len(self._ended)

    def add(self, ended: Explanation) -> None:
        """Keep a request that has ended. `find` omits a request that was never placed."""
        self.newest += 1
        ended = replace(ended, number=self.newest)
        if not ended.attempts:
            self._unplaced.append(ended)
            return
        if len(self._ended) == MAX_EXPLAINED:
            oldest = self._ended.popleft()
            if self._is_notable(oldest):
                self._kept.append(oldest)
        self._ended.append(ended)
        if self.newest % _JUDGED_EVERY == 0:
            self._slow_s = _slowest(self._ended)
        first = ended.attempts[0]
        if first.is_batch:  # its time to first token depends on others' work, whichever workers it has
            return
        self._effect.add(first.placement, _waited_s(ended, first.at_s))

    def find(self, name: str, live: Iterable[Explanation] = ()) -> list[Explanation]:
        """Return the requests with this id or label, the newest first: at most `MAX_FOUND`. `live`: requests that have
        not ended, which come before all others."""
        ended = *reversed(self._ended), *reversed(self._kept)
        known = [*sorted(live, key=lambda each: each.began_s, reverse=True), *ended]
        return [each for each in known if is_named(name, each.request_id, each.label, each.trace_id)][:MAX_FOUND]

    def since(self, number: int, most: int, *, until: int) -> list[Explanation]:
        """Return the requests that ended after the one with this number up to that with the number `until`, the oldest
        first: at most `most`, of which a quarter may be older ones that failed, were retried or were slow."""
        places = self._kept, self._unplaced, self._ended
        newer = [each for kept in places for each in _newer(kept, number, most, until)]
        newer.sort(key=lambda each: each.number)
        if len(newer) <= most:
            return newer
        notable = [each for each in newer[: -(most - most // 4)] if self._is_notable(each)][-(most // 4) :]
        return notable + newer[-(most - len(notable)) :]

    def _is_notable(self, ended: Explanation) -> bool:
        """Return whether the request failed, was retried, or was among the slowest."""
        if ended.outcome not in ("ok", "cancelled") or any(attempt.failure for attempt in ended.attempts):
            return True
        ttft_s = 0.0 if ended.first_token_s is None else ended.first_token_s - ended.began_s
        return ttft_s > self._slow_s[0] or (ended.itl_s or 0.0) > self._slow_s[1]

    def comparison(self) -> Comparison:
        """Return the effect of disaggregation, estimated from the last requests."""
        return self._effect.compare()


def _waited_s(ended: Explanation, placed_s: float) -> float | None:
    """Return for how long the client waited for its first token, or until it gave up: without the requests that were
    given up, workers whose first tokens are late would look quick. None: the request failed, however soon."""
    if ended.first_token_s is not None:
        return ended.first_token_s - placed_s
    if ended.outcome in _GAVE_UP and ended.ledger is not None:
        return ended.began_s + ended.ledger.wall_s - placed_s
    return None


def _newer(kept: deque[Explanation], number: int, most: int, until: int) -> list[Explanation]:
    """Return the last requests up to `until` that are newer than a number, without a walk through all: at most twice
    `most`."""
    newest = islice(dropwhile(lambda each: each.number > until, reversed(kept)), 2 * most)
    return list(takewhile(lambda each: each.number > number, newest))


def _slowest(ended: Iterable[Explanation]) -> tuple[float, float]:
    """Return the times to first token and between tokens that `_SLOW_SHARE` of these requests exceed."""
    ttfts_s, itls_s = [], []
    for each in ended:
        if each.first_token_s is not None:
            ttfts_s.append(each.first_token_s - each.began_s)
        if each.itl_s is not None:
            itls_s.append(each.itl_s)
    return _exceeded(ttfts_s), _exceeded(itls_s)


def _exceeded(values: list[float]) -> float:
    return sorted(values)[int(len(values) * (1 - _SLOW_SHARE))] if values else float("inf")


class RequestLog:
    """The lines of ended requests. A line has the number of those that were left out since the last one."""

    def __init__(self) -> None:
        self._second = 0  # in which the last line was written
        self._num_lines = 0  # of this second, of requests that ended well
        self._num_left_out = 0  # since the last line

    def write(self, ended: Explanation, now_s: float) -> None:
        """Log a request that has ended. `now_s`: by any monotonic clock."""
        if not _LOG.isEnabledFor(logging.INFO):
            return
        if int(now_s) != self._second:
            self._second, self._num_lines = int(now_s), 0
        if ended.outcome == "ok":
            if self._num_lines >= _MOST_PER_S:
                self._num_left_out += 1
                return
            self._num_lines += 1
        fields = ended_fields(ended)
        if self._num_left_out:
            fields["lines_left_out"] = self._num_left_out
            self._num_left_out = 0
        _LOG.info("the request ended", extra=fields)


def ended_fields(ended: Explanation) -> dict[str, object]:
    """Return the fields of the log line of an ended request, without those that it has no value for. Times are
    milliseconds.
    """
    ledger = ended.ledger
    assert ledger is not None, "an explanation of an account has its ledger"
    fields: dict[str, object] = {
        "request_id": ended.request_id,
        "label": ended.label,
        "outcome": ended.outcome,
        "prompt_tokens": ended.num_prompt_tokens,
        "tokens": ended.num_tokens,
        "ttft_ms": _ms(ledger.ttft_s) if ended.first_token_s is not None else None,
        "itl_ms": _ms(ended.itl_s) if ended.itl_s is not None else None,
        "wall_ms": _ms(ledger.wall_s),
        "phases_ms": " ".join(f"{phase.name}:{_ms(phase.duration_s):g}" for phase in ledger.phases),
        "attempts": len(ended.attempts),
        "workers": " ".join(ledger.members),
        "transport": ledger.transport,
        "reasons": " ".join(ledger.reasons),
        "trace_id": ended.trace_id,
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
