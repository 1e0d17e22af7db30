"""Chooses the workers of a request from the loads of all workers. Pure.

A policy sees only pairs that can exchange KV and hold the request (router/policies/candidates.py). `SloAware` predicts
times (router/policies/slo_aware.py); the policies here compare loads.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from cluster.messages import LinkSpeed, MemberId, Role
from router.policies.arrangement import Arrangement
from router.policies.candidates import Pair, RequestFacts, WorkerLoad, pairs
from router.policies.prediction.latency import Predict, Prediction, predict_all

# A pair is slow when it needs this much longer for the prompt's KV than the fastest known pair. Smaller differences
# between measurements must not keep equal pairs from taking turns.
SLOW_FACTOR = 2.0
SLOW_MARGIN_S = 0.005

# Of this many placements that avoid slow pairs, one uses a slow pair, so that it is measured again; but never a pair on
# which the client would wait longer by the margin.
SECOND_LOOK_EVERY = 64
SECOND_LOOK_MARGIN_S = 1.0

# Candidates of a request that are kept to explain its placement.
MAX_CONSIDERED = 16


class PlacementReason(StrEnum):
    """The criterion that decided between the candidates of a request."""

    ONLY_CANDIDATE = "only_candidate"
    LOWEST_LOAD = "lowest_load"  # the policy compares loads
    CACHED_PREFIX = "cached_prefix"  # loads are equal up to one request; the prompt's beginning is cached there
    TURN = "turn"  # the policy does not compare
    SLO = "slo"  # because of all others more requests are expected to miss a latency target
    TTFT = "ttft"  # the shortest predicted time to first token
    TOKEN_DELAY = "token_delay"  # TTFT is equal; later tokens come earliest, those of running sequences included
    KV_BYTES = "kv_bytes"  # the same, and the least KV is moved
    TIE = "tie"  # equal in everything: drawn
    UNKNOWN_SPEED = "unknown_speed"  # a worker has not reported its speed: decided as by prefix-aware
    EXPLORED = "explored"  # the second-best candidate, drawn to measure what the best one would have saved


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to serve a request: the loads that policies compare, and its prediction."""

    prefill: MemberId | None  # None: the decode worker computes the prompt
    decode: MemberId
    depth: int  # sequences ahead of the request at these workers
    num_cached: int  # tokens of the prompt that the worker that computes it has cached
    prediction: Prediction | None = None  # None: the policy does not predict, or a worker has not reported its speed
    num_violations: int = 0  # latency targets that it is predicted to miss
    expected_misses: float = 0.0  # of requests, the present one and others, that it makes miss a target

    @property
    def is_pair(self) -> bool:
        return self.prefill is not None

    @property
    def members(self) -> tuple[MemberId | None, MemberId]:
        return self.prefill, self.decode


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen workers. `prefill` None: the decode worker computes the prompt."""

    prefill: MemberId | None
    decode: MemberId
    reason: PlacementReason
    is_fallback: bool = False  # there was no pair to choose, nor a worker of both roles
    considered: tuple[Candidate, ...] = ()  # from the best to the worst, at most `MAX_CONSIDERED`
    num_candidates: int = 0  # that were compared
    alternative: Candidate | None = None  # the chosen one and this one were drawn from; None: nothing was explored
    propensity: float = 1.0  # of that draw: the probability with which the chosen one was drawn

    @property
    def chosen(self) -> Candidate | None:
        """Return the candidate that was chosen; None only if no candidate was kept."""
        return next((each for each in self.considered if each.members == (self.prefill, self.decode)), None)


def is_fallback(found: Sequence[Pair]) -> bool:
    """Return whether no candidate is a pair or a worker of both roles."""
    return all(prefill is None and decode.role is not Role.BOTH for prefill, decode in found)


def shortlist(ordered: Sequence[Candidate], chosen: Candidate) -> tuple[Candidate, ...]:
    """Return the first of these candidates, with the chosen one and the best one of each kind (pair, or worker alone)
    always among them: `MAX_CONSIDERED` in all."""
    best = [next((each for each in ordered if each.is_pair is is_pair), chosen) for is_pair in (True, False)]
    kept = {id(each) for each in (chosen, *best)}
    for each in ordered:
        if len(kept) == MAX_CONSIDERED:
            break
        kept.add(id(each))
    return tuple(each for each in ordered if id(each) in kept)


class Policy(Protocol):
    @property
    def predict(self) -> Predict:
        """Return a function like `predict_all`, which does not repeat the predictions that `choose` needs too."""
        ...

    def ways(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Sequence[Pair]:
        """Return every pair, and every decode worker alone, from which `choose` chooses."""
        ...

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        """Return the chosen workers; None if no worker can hold the request. If no pair is possible, a decode worker
        alone is chosen."""
        ...

    def placed(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts, now_s: float
    ) -> Arrangement | None:
        """Learn from a new request that was placed. Returns the arrangement of the workers if it has changed."""
        ...


class _LearnsNothing:
    def placed(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts, now_s: float
    ) -> Arrangement | None:
        return None


class _OfPairs(_LearnsNothing):
    """Compares pairs by their load. Of equal pairs it avoids those known to transfer KV slowly; the rest take turns."""

    predict = staticmethod(predict_all)

    def __init__(self) -> None:
        self._turns = _Turns()
        self._speeds = _Speeds()

    def ways(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Sequence[Pair]:
        return pairs(prefills, decodes, request)


class LeastLoaded(_OfPairs):
    """Chooses the pair with the lowest load."""

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        found = _Found(prefills, decodes, request)
        best = self._speeds.without_slow(found.cheapest(found.depths), request.num_prompt_tokens)
        return self._turns.choose(best, found, PlacementReason.LOWEST_LOAD)


class Importers:
    """Chooses the worker that imports KV which another one has: the least loaded one, whatever its role. Each owner has
    one of its own: turns are taken among those that were asked for."""

    def __init__(self) -> None:
        self._policy = LeastLoaded()

    def choose(self, exporter: WorkerLoad, decodes: Sequence[WorkerLoad], request: RequestFacts) -> MemberId | None:
        """Return None if no worker can import the KV now."""
        importers = [replace(load, role=None) for load in decodes]  # one of both roles would count as a way alone too
        placement = self._policy.choose([exporter], importers, request)
        return placement.decode if placement is not None and placement.prefill is not None else None


class PrefixAware(_OfPairs):
    """Chooses the pair with the lowest cost: its load, plus the share of the prompt that its prefill worker has not
    cached. A cached prefix therefore weighs less than one place in the queue."""

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        found = _Found(prefills, decodes, request)
        cheapest = found.cheapest([depth + share for depth, share in zip(found.depths, found.shares(), strict=True)])
        best = self._speeds.without_slow(cheapest, request.num_prompt_tokens)
        is_for_prefix = any(_share_to_compute(pair, request) < 1 for pair in best)
        reason = PlacementReason.CACHED_PREFIX if is_for_prefix else PlacementReason.LOWEST_LOAD
        return self._turns.choose(best, found, reason)


class RoundRobin(_LearnsNothing):
    """Lets all workers take turns, whatever their load."""

    predict = staticmethod(predict_all)

    def __init__(self) -> None:
        self._turns = _Turns()

    def ways(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Sequence[Pair]:
        return pairs(prefills, decodes, request)

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        found = _Found(prefills, decodes, request)
        return self._turns.choose(found.pairs, found, PlacementReason.TURN)


class _Found:
    """The pairs from which a request's is chosen, and what is compared of each. A large cluster has thousands of them,
    so that what depends on one worker is computed once for each worker."""

    def __init__(self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> None:
        self.request = request
        self.members = frozenset(load.member for load in (*prefills, *decodes))
        self.pairs = pairs(prefills, decodes, request)
        self.depths = list(map(_depth, self.pairs))

    def shares(self) -> list[float]:
        """Return for each pair the share of the prompt that is not cached."""
        if not self.request.cached_tokens:
            return [1.0] * len(self.pairs)
        known: dict[int, float] = {}  # by the identity of the computing worker's load
        for pair in self.pairs:
            if id(computing := _computing(pair)) not in known:
                known[id(computing)] = _share_to_compute(pair, self.request)
        return [known[id(_computing(pair))] for pair in self.pairs]

    def cheapest(self, costs: Sequence[float]) -> list[Pair]:
        """Return the pairs with the lowest of these costs, which are one for each pair."""
        least = min(costs, default=0.0)
        return [pair for pair, cost in zip(self.pairs, costs, strict=True) if cost == least]

    def by_load(self, chosen: Pair) -> tuple[Candidate, ...]:
        """Return the chosen pair, and then those with the lowest load."""
        lightest = heapq.nsmallest(MAX_CONSIDERED, range(len(self.pairs)), key=self.depths.__getitem__)
        others = [pair for pair in (self.pairs[i] for i in lightest) if pair is not chosen]
        ordered = (chosen, *others[: MAX_CONSIDERED - 1])
        return tuple(candidate_of(prefill, decode, self.request) for prefill, decode in ordered)


class _Turns:
    """Remembers when each worker and each pair was last chosen, so that equals take turns: first the workers that
    compute the prompt, then the pairs of one of them. So every pair is used, and workers of a pool equally often."""

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[MemberId | tuple[MemberId | None, MemberId], int] = {}
        self._members: frozenset[MemberId] = frozenset()

    def choose(self, best: Sequence[Pair], found: _Found, reason: PlacementReason) -> Placement | None:
        """Return the pair of `best` whose turn it is. Workers that have left are forgotten."""
        if not best:
            return None
        if found.members != self._members:
            self._forget_all_but(found.members)
        prefill, decode = chosen = min(self._first_computing(best), key=self._rank)
        self._turn += 1
        self._last_turn |= {known: self._turn for known in (*_members(chosen), _members(chosen)) if known is not None}
        return Placement(
            prefill=prefill.member if prefill is not None else None,
            decode=decode.member,
            reason=reason if len(found.pairs) > 1 else PlacementReason.ONLY_CANDIDATE,
            is_fallback=is_fallback(found.pairs),
            considered=found.by_load(chosen),
            num_candidates=len(found.pairs),
        )

    def _forget_all_but(self, members: frozenset[MemberId]) -> None:
        self._members = members
        self._last_turn = {
            known: turn
            for known, turn in self._last_turn.items()
            if members.issuperset({known} if isinstance(known, MemberId) else {*known} - {None})
        }

    def _first_computing(self, best: Sequence[Pair]) -> Sequence[Pair]:
        """Return the pairs of the workers whose turn it is to compute a prompt."""
        loads = {id(load): load for load in map(_computing, best)}
        turns = {name: self._last_turn.get(load.member, 0) for name, load in loads.items()}
        least = min(turns.values())
        return [pair for pair in best if turns[id(_computing(pair))] == least]

    def _rank(self, pair: Pair) -> tuple[int, int, str]:
        members = prefill, decode = _members(pair)
        return self._last_turn.get(members, 0), self._last_turn.get(decode, 0), f"{prefill} {decode}"


class _Speeds:
    """Avoids pairs that are known to be slow. Every `SECOND_LOOK_EVERY` placements, one slow pair is tried again."""

    def __init__(self) -> None:
        self._num_skipped = 0  # placements since the last second look
        self._looked_at: dict[tuple[MemberId, MemberId], int] = {}
        self._num_looks = 0

    def without_slow(self, pairs: Sequence[Pair], num_prompt_tokens: int) -> Sequence[Pair]:
        """Return the pairs that are not known to be slow. A pair without a measurement stays, or it would never be
        measured."""
        times_s = _transfer_times(pairs, num_prompt_tokens)
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

    def _second_look(self, slow: Sequence[Pair]) -> Pair:
        pair = min(slow, key=lambda pair: self._looked_at.get(_names(pair), 0))
        self._num_skipped, self._num_looks = 0, self._num_looks + 1
        present = set(map(_names, slow))
        self._looked_at = {names: look for names, look in self._looked_at.items() if names in present}
        self._looked_at[_names(pair)] = self._num_looks
        return pair


def candidate_of(
    prefill: WorkerLoad | None,
    decode: WorkerLoad,
    request: RequestFacts,
    prediction: Prediction | None = None,
    num_violations: int = 0,
    expected_misses: float = 0.0,
) -> Candidate:
    """Return a candidate; without a prediction where the policy does not predict."""
    computing = prefill if prefill is not None else decode
    cached = min(request.cached_tokens.get(computing.member, 0), request.num_prompt_tokens - 1)
    member = prefill.member if prefill is not None else None
    depth = _depth((prefill, decode))
    return Candidate(member, decode.member, depth, cached, prediction, num_violations, expected_misses)


def _members(pair: Pair) -> tuple[MemberId | None, MemberId]:
    prefill, decode = pair
    return prefill.member if prefill is not None else None, decode.member


def _computing(pair: Pair) -> WorkerLoad:
    """Return the worker that computes the prompt."""
    prefill, decode = pair
    return decode if prefill is None else prefill


def _depth(pair: Pair) -> int:
    prefill, decode = pair
    return decode.depth if prefill is None else prefill.depth + decode.depth


def _share_to_compute(pair: Pair, request: RequestFacts) -> float:
    """Return the share of the prompt that the worker that computes it has not cached."""
    prefill, decode = pair
    cached = request.cached_tokens.get((prefill or decode).member, 0) if prefill or decode.role is Role.BOTH else 0
    return max(0.0, 1 - cached / request.num_prompt_tokens)


def _names(pair: Pair) -> tuple[MemberId, MemberId]:
    prefill, decode = pair
    assert prefill is not None, "there is nothing to transfer"
    return prefill.member, decode.member


def _transfer_times(pairs: Sequence[Pair], num_prompt_tokens: int) -> list[float | None]:
    """Return how long the KV of a prompt takes between the workers of each pair; None: it is not known."""
    links: dict[int, dict[MemberId, LinkSpeed]] = {}  # by the identity of the importing worker's load
    for _, decode in pairs:
        if id(decode) not in links:
            links[id(decode)] = {link.exporter: link for link in reversed(decode.links)}  # each one's first counts
    times_s = list[float | None]()
    for prefill, decode in pairs:
        link = links[id(decode)].get(prefill.member) if prefill is not None else None
        times_s.append(None if link is None else link.transfer_s(num_prompt_tokens * decode.kv_bytes_per_token))
    return times_s
