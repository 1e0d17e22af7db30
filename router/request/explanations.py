"""Why requests were placed as they were, and what really happened: of live requests, and of the last ones that ended.

Memory is bounded: `MAX_EXPLAINED` ended requests, `MAX_ATTEMPTS` attempts of each, and the candidates that a placement
keeps. Owns no request and decides nothing.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from router.policies.effect import Comparison, DisaggregationEffect
from router.policies.placement import Placement

MAX_EXPLAINED = 1000
MAX_ATTEMPTS = 8  # of one request: the first one and the last ones
MAX_FOUND = 10  # requests of one label: the newest ones


def is_named(name: str, request_id: str, label: str) -> bool:
    """Return whether `name` is a request's id or label, or the id of its HTTP answer. The label of each of several
    prompts in one HTTP request has a number appended, and the name without it finds all of them."""
    plain = name.removeprefix("chat").removeprefix("cmpl-") if name.startswith(("cmpl-", "chatcmpl-")) else name
    shared, _, number = label.rpartition("-")
    return bool(plain) and (name in (request_id, label) or plain == label or (number.isdigit() and plain == shared))


@dataclass(frozen=True, slots=True)
class PlacedAttempt:
    """One attempt to serve a request, or a hedge."""

    placement: Placement
    at_s: float  # when it was placed, by the router's monotonic clock
    is_batch: bool = False  # it is of the batch class, which waits for all other work
    failure: str = ""  # why it failed or was overtaken, as the ledger lists it


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
        """Record why the attempt with this placement ended early."""
        self._attempts = [
            replace(attempt, failure=reason) if attempt.placement is placement else attempt
            for attempt in self._attempts
        ]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One request: its placements, and its real times."""

    request_id: str
    label: str
    outcome: str  # ok, or the reason of an error; empty: it is live
    began_s: float  # when it arrived, by the router's monotonic clock
    num_prompt_tokens: int
    num_tokens: int  # that its client was given, over all choices
    first_token_s: float | None  # when its client was given the first one, by the same clock; None: not yet
    itl_s: float | None  # the mean time between its tokens; None: it has fewer than two
    attempts: tuple[PlacedAttempt, ...]


class Explanations:
    """The explanations of the last requests that ended at this router, and what they tell about disaggregation."""

    def __init__(self) -> None:
        self._ended: deque[Explanation] = deque(maxlen=MAX_EXPLAINED)  # the oldest first
        self._effect = DisaggregationEffect()

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, ended: Explanation) -> None:
        """Keep a request that has ended. One that was never placed has nothing to explain and is not kept."""
        if not ended.attempts:
            return
        self._ended.append(ended)
        first = ended.attempts[0]
        if first.is_batch:  # its time to first token depends on others' work, whichever workers it has
            return
        waited_s = None if ended.first_token_s is None else ended.first_token_s - first.at_s
        self._effect.add(first.placement, waited_s)

    def find(self, name: str, live: Iterable[Explanation] = ()) -> list[Explanation]:
        """Return the requests with this id or label, the newest first: at most `MAX_FOUND`. `live`: requests that have
        not ended, which come before all others."""
        known = [*sorted(live, key=lambda each: each.began_s, reverse=True), *reversed(self._ended)]
        return [each for each in known if is_named(name, each.request_id, each.label)][:MAX_FOUND]

    def comparison(self) -> Comparison:
        """Return what disaggregation changes, by the last requests."""
        return self._effect.compare()
