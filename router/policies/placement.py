"""Chooses the workers of a request from the loads of all workers. Pure.

A policy sees only pairs that can exchange KV and hold the request (cluster/request_size.py).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.member import Capacity
from cluster.messages import LinkSpeed, MemberId
from cluster.request_size import RequestSize, decode_shortage, handoff_shortage, prefill_shortage

# A pair is slow when it needs this much longer for the prompt's KV than the fastest known pair. Smaller differences
# between measurements must not keep equal pairs from taking turns.
SLOW_FACTOR = 2.0
SLOW_MARGIN_S = 0.005

# Of this many placements that avoid slow pairs, one uses a slow pair, so that it is measured again; but never a pair on
# which the client would wait longer by the margin.
SECOND_LOOK_EVERY = 64
SECOND_LOOK_MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of one worker that may be chosen, as the router knows it now."""

    member: MemberId
    kv_format: str  # workers with equal values can exchange KV
    assigned: int  # sequences that this router has there, queued or running
    waiting: int = 0  # the worker's own figures, from its last heartbeat, over all routers
    running: int = 0
    free_blocks: int = 0
    links: tuple[LinkSpeed, ...] = ()  # of a decode worker: how fast it reads each exporter; each one's first counts
    kv_bytes_per_token: float = 0.0
    capacity: Capacity | None = None  # None: not known, and taken as large enough

    @property
    def depth(self) -> int:
        """The number of sequences ahead of a new one. Heartbeats lag and this router's own count does not, so the
        larger counts."""
        return max(self.assigned, self.waiting + self.running)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What placement has to know about a request."""

    num_prompt_tokens: int  # to prefill, with those that an earlier attempt drew
    max_tokens: int  # that are still missing
    num_choices: int
    avoid: frozenset[MemberId] = frozenset()  # failed this request before: last choice
    cached_tokens: Mapping[MemberId, int] = field(default_factory=dict)  # of the prompt, by prefill worker
    excluded_pairs: Collection[tuple[MemberId, MemberId]] = (
        frozenset()
    )  # prefill and decode workers not to be paired now
    num_committed: int = 0  # of num_prompt_tokens, those that an earlier attempt drew
    too_small: Collection[MemberId] = frozenset()  # workers that have refused this request for its size

    @property
    def size(self) -> RequestSize:
        num_prompt, num_output = self.num_prompt_tokens - self.num_committed, self.num_committed + self.max_tokens
        return RequestSize(num_prompt, num_output, self.num_committed, self.num_choices)

    def fits_prefill(self, load: WorkerLoad) -> bool:
        return self._fits(load, prefill_shortage)

    def fits_decode(self, load: WorkerLoad) -> bool:
        """Return whether the worker can prefill the prompt and run every choice to its end."""
        return self._fits(load, decode_shortage)

    def fits_import(self, load: WorkerLoad) -> bool:
        """Return whether the worker can import from a prefill worker. If only one token is missing, nothing is
        imported."""
        return not self.size.needs_decode or self.fits_handoff(load)

    def fits_handoff(self, load: WorkerLoad) -> bool:
        """Return whether the worker can import the tokens known so far and run every choice to its end."""
        return self.fits_decode(load) and self._fits(load, handoff_shortage)

    def _fits(self, load: WorkerLoad, shortage: Callable[[Capacity, RequestSize], str]) -> bool:
        if load.member in self.too_small:
            return False
        return load.capacity is None or not shortage(load.capacity, self.size)


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen workers. `prefill` None: the decode worker prefills the prompt."""

    prefill: MemberId | None
    decode: MemberId


class Policy(Protocol):
    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        """Return the chosen workers; None if no worker can hold the request. If no pair is possible, a decode worker
        alone is chosen."""
        ...


class LeastLoaded:
    """Chooses the pair with the lowest load. Of equal pairs it avoids those known to transfer KV slowly; the rest take
    turns."""

    def __init__(self) -> None:
        self._turns = _Turns()
        self._speeds = _Speeds()

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        pairs = _pairs(prefills, decodes, request)
        least = min(map(_depth, pairs), default=0)
        lightest = [pair for pair in pairs if _depth(pair) == least]
        return self._turns.choose(self._speeds.without_slow(lightest, request.num_prompt_tokens), pairs)


class PrefixAware:
    """Chooses the pair with the lowest cost: its load, plus the share of the prompt that its prefill worker has not
    cached. A cached prefix therefore weighs less than one place in the queue. Ties are resolved as by LeastLoaded."""

    def __init__(self) -> None:
        self._turns = _Turns()
        self._speeds = _Speeds()

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        pairs = _pairs(prefills, decodes, request)
        costs = [_depth(pair) + _share_to_compute(pair, request) for pair in pairs]
        cheapest = [pair for pair, cost in zip(pairs, costs, strict=True) if cost == min(costs)]
        return self._turns.choose(self._speeds.without_slow(cheapest, request.num_prompt_tokens), pairs)


class RoundRobin:
    """Lets all workers take turns, whatever their load."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        pairs = _pairs(prefills, decodes, request)
        return self._turns.choose(pairs, pairs)


def policy(name: str) -> Policy:
    """Return the policy that `--placement` names."""
    policies: dict[str, type[PrefixAware] | type[LeastLoaded] | type[RoundRobin]] = {
        "prefix-aware": PrefixAware,
        "least-loaded": LeastLoaded,
        "round-robin": RoundRobin,
    }
    return policies[name]()


_Pair = tuple[WorkerLoad | None, WorkerLoad]


class _Turns:
    """Remembers when each worker was last chosen, so that equals take turns."""

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[MemberId, int] = {}

    def choose(self, best: Sequence[_Pair], pairs: Sequence[_Pair]) -> Placement | None:
        """Return the pair of `best` that was chosen least recently. Workers in none of `pairs` are forgotten."""
        if not best:
            return None
        prefill, decode = min(best, key=self._rank)
        self._turn += 1
        present = {load.member for pair in pairs for load in pair if load is not None}
        self._last_turn = {member: turn for member, turn in self._last_turn.items() if member in present}
        for load in (prefill, decode):
            if load is not None:
                self._last_turn[load.member] = self._turn
        return Placement(prefill.member if prefill is not None else None, decode.member)

    def _rank(self, pair: _Pair) -> tuple[int, str]:
        loads = [load for load in pair if load is not None]
        turns = sum(self._last_turn.get(load.member, 0) for load in loads)
        return turns, " ".join(str(load.member) for load in loads)


class _Speeds:
    """Avoids pairs that are known to be slow. Every `SECOND_LOOK_EVERY` placements, one slow pair is tried again."""

    def __init__(self) -> None:
        self._num_skipped = 0  # placements since the last second look
        self._looked_at: dict[tuple[MemberId, MemberId], int] = {}
        self._num_looks = 0

    def without_slow(self, pairs: Sequence[_Pair], num_prompt_tokens: int) -> Sequence[_Pair]:
        """Return the pairs that are not known to be slow. A pair without a measurement stays, or it would never be
        measured."""
        times_s = [_transfer_s(pair, num_prompt_tokens) for pair in pairs]
        known_s = [time_s for time_s in times_s if time_s is not None]
        limit_s = min(known_s, default=0.0) * SLOW_FACTOR + SLOW_MARGIN_S
        quick = [pair for pair, time_s in zip(pairs, times_s, strict=True) if time_s is None or time_s <= limit_s]
        self._num_skipped += len(quick) < len(pairs)
        if self._num_skipped < SECOND_LOOK_EVERY:
            return quick
        bearable_s = min(known_s) + SECOND_LOOK_MARGIN_S
        slow = zip(pairs, times_s, strict=True)
        bearable = [pair for pair, time_s in slow if time_s is not None and limit_s < time_s <= bearable_s]
        return [self._second_look(bearable)] if bearable else quick

    def _second_look(self, slow: Sequence[_Pair]) -> _Pair:
        pair = min(slow, key=lambda pair: self._looked_at.get(_names(pair), 0))
        self._num_skipped, self._num_looks = 0, self._num_looks + 1
        present = set(map(_names, slow))
        self._looked_at = {names: look for names, look in self._looked_at.items() if names in present}
        self._looked_at[_names(pair)] = self._num_looks
        return pair


def _pairs(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> list[_Pair]:
    """Return all pairs that can hold the request, can exchange KV and are not excluded. Workers to avoid are used only
    if there are no others. If no pair is left, return decode workers alone: hand-offs have just failed and would fail
    again, or a worker of each pair is too small."""
    prefills = list(filter(request.fits_prefill, prefills))
    importers = list(filter(request.fits_import, decodes))
    preferred = _preferring_others(prefills, request.avoid), _preferring_others(importers, request.avoid)
    pairs = _disaggregated(*preferred, request) or _disaggregated(prefills, importers, request)
    alone = _preferring_others(list(filter(request.fits_decode, decodes)), request.avoid)
    return [*pairs] or [(None, decode) for decode in alone]


def has_large_pair(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> bool:
    """Return whether two workers could serve the request by a hand-off, excluded or not."""
    anywhere = replace(request, excluded_pairs=frozenset())
    return any(prefill is not None for prefill, _ in _pairs(prefills, decodes, anywhere))


def is_servable(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> bool:
    """Return whether some workers could serve the request, by a hand-off or without one."""
    return bool(_pairs(prefills, decodes, replace(request, excluded_pairs=frozenset())))


def _disaggregated(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> list[_Pair]:
    fitting = [(p, d) for d in decodes for p in prefills if p.kv_format == d.kv_format]
    return [(p, d) for p, d in fitting if (p.member, d.member) not in request.excluded_pairs]


def _depth(pair: _Pair) -> int:
    return sum(load.depth for load in pair if load is not None)


def _share_to_compute(pair: _Pair, request: RequestFacts) -> float:
    """Return the share of the prompt that the prefill worker has to compute."""
    prefill, _ = pair
    cached = request.cached_tokens.get(prefill.member, 0) if prefill is not None else 0
    return max(0.0, 1 - cached / request.num_prompt_tokens)


def _names(pair: _Pair) -> tuple[MemberId, MemberId]:
    prefill, decode = pair
    assert prefill is not None, "there is nothing to transfer"
    return prefill.member, decode.member


def _transfer_s(pair: _Pair, num_prompt_tokens: int) -> float | None:
    """Return the estimated transfer time; None if it is not known or nothing is transferred."""
    prefill, decode = pair
    if prefill is None:
        return None
    link = next((link for link in decode.links if link.exporter == prefill.member), None)
    return link.transfer_s(num_prompt_tokens * decode.kv_bytes_per_token) if link is not None else None


def _preferring_others(loads: Sequence[WorkerLoad], avoid: Iterable[MemberId]) -> Sequence[WorkerLoad]:
    return [load for load in loads if load.member not in avoid] or loads
