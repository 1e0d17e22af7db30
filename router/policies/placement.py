"""Which workers serve a request. Pure: loads in, a pair out.

A policy sees pairs that can work together and hold the request (cluster/request_size.py), and nothing else; the cost
model will be one more of them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.member import Capacity
from cluster.messages import MemberId, PairFigure
from cluster.request_size import RequestSize, decode_shortage, handoff_shortage, prefill_shortage

# A pair counts as slow when the prompt's KV would take it so much longer than the fastest known one: figures are
# measurements, and small differences between them must not keep equals from taking turns.
SLOW_FACTOR = 2.0
SLOW_MARGIN_S = 0.005

# One of so many placements that pass over slow pairs goes to one of them, or nobody would ever measure it again; never
# one whose client would wait so much longer.
SECOND_LOOK_EVERY = 64
SECOND_LOOK_MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker that may be chosen, as the router knows it now."""

    member: MemberId
    pairing: str  # workers with equal values can exchange KV
    assigned: int  # sequences that this router has there, queued or running
    waiting: int = 0  # the worker's own figures, from its last heartbeat, over all routers
    running: int = 0
    free_blocks: int = 0
    pairs: tuple[PairFigure, ...] = ()  # of a decode worker: how fast it reads each exporter; each one's first counts
    kv_bytes_per_token: float = 0.0
    capacity: Capacity | None = None  # None: not known, and taken as large enough

    @property
    def depth(self) -> int:
        """What is ahead of a newcomer. Heartbeats lag, this router's own count does not: the larger one counts."""
        return max(self.assigned, self.waiting + self.running)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    num_prompt_tokens: int  # to prefill, with those that an earlier attempt drew
    max_tokens: int  # that are still missing
    num_choices: int
    avoid: frozenset[MemberId] = frozenset()  # failed this request before: last choice
    cached_tokens: Mapping[MemberId, int] = field(default_factory=dict)  # of the prompt, by prefill worker
    passed_over: Collection[tuple[MemberId, MemberId]] = frozenset()  # prefill and decode workers not to be paired now
    num_committed: int = 0  # of num_prompt_tokens, those that an earlier attempt drew
    too_small: Collection[MemberId] = frozenset()  # workers that have refused this request for its size

    @property
    def size(self) -> RequestSize:
        num_prompt, num_output = self.num_prompt_tokens - self.num_committed, self.num_committed + self.max_tokens
        return RequestSize(num_prompt, num_output, self.num_committed, self.num_choices)

    def fits_prefill(self, load: WorkerLoad) -> bool:
        return self._fits(load, prefill_shortage)

    def fits_decode(self, load: WorkerLoad) -> bool:
        """It can prefill the prompt and run every choice to its end."""
        return self._fits(load, decode_shortage)

    def fits_import(self, load: WorkerLoad) -> bool:
        """It can take over from a prefill worker. Where one token is missing there is nothing to take over."""
        return not self.size.needs_decode or self.fits_handoff(load)

    def fits_handoff(self, load: WorkerLoad) -> bool:
        """It can import the tokens known so far and run every choice to its end."""
        return self.fits_decode(load) and self._fits(load, handoff_shortage)

    def _fits(self, load: WorkerLoad, shortage: Callable[[Capacity, RequestSize], str]) -> bool:
        if load.member in self.too_small:
            return False
        return load.capacity is None or not shortage(load.capacity, self.size)


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: the prompt is prefilled on the decode worker."""

    prefill: MemberId | None
    decode: MemberId


class Policy(Protocol):
    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        """None: no worker can hold the request. Without a prefill worker that it may be paired with, a decode worker
        does both."""
        ...


class LeastLoaded:
    """The pair whose workers have the least ahead; of equals, none that is known to be slow to move the prompt's KV;
    what is left takes turns."""

    def __init__(self) -> None:
        self._turns = _Turns()
        self._speeds = _Speeds()

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        pairs = _pairs(prefills, decodes, request)
        least = min(map(_depth, pairs), default=0)
        lightest = [pair for pair in pairs if _depth(pair) == least]
        return self._turns.take(self._speeds.without_slow(lightest, request.num_prompt_tokens), pairs)


class PrefixAware:
    """The pair that has the least ahead of the prompt, where what is ahead counts as prompts like this one, and of the
    prompt itself only the share that its prefill worker has not cached: a beginning that is found outweighs less than
    one place in the queue. Else as LeastLoaded."""

    def __init__(self) -> None:
        self._turns = _Turns()
        self._speeds = _Speeds()

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        pairs = _pairs(prefills, decodes, request)
        costs = [_depth(pair) + _share_to_compute(pair, request) for pair in pairs]
        cheapest = [pair for pair, cost in zip(pairs, costs, strict=True) if cost == min(costs)]
        return self._turns.take(self._speeds.without_slow(cheapest, request.num_prompt_tokens), pairs)


class RoundRobin:
    """Every worker in its turn, whatever it has to do."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        pairs = _pairs(prefills, decodes, request)
        return self._turns.take(pairs, pairs)


def policy(name: str) -> Policy:
    """The policy that `--placement` names."""
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

    def take(self, best: Sequence[_Pair], pairs: Sequence[_Pair]) -> Placement | None:
        """Of the best, the one whose turn it is. Workers that are in none of the pairs are forgotten."""
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
    """Passes over pairs that are known to be slow, except now and then, each in its turn."""

    def __init__(self) -> None:
        self._num_passed_over = 0  # placements since the last second look
        self._looked_at: dict[tuple[MemberId, MemberId], int] = {}
        self._num_looks = 0

    def without_slow(self, pairs: Sequence[_Pair], num_prompt_tokens: int) -> Sequence[_Pair]:
        """A pair that nobody has measured yet stays: else nobody ever would."""
        times_s = [_transfer_s(pair, num_prompt_tokens) for pair in pairs]
        known_s = [time_s for time_s in times_s if time_s is not None]
        limit_s = min(known_s, default=0.0) * SLOW_FACTOR + SLOW_MARGIN_S
        quick = [pair for pair, time_s in zip(pairs, times_s, strict=True) if time_s is None or time_s <= limit_s]
        self._num_passed_over += len(quick) < len(pairs)
        if self._num_passed_over < SECOND_LOOK_EVERY:
            return quick
        bearable_s = min(known_s) + SECOND_LOOK_MARGIN_S
        slow = zip(pairs, times_s, strict=True)
        bearable = [pair for pair, time_s in slow if time_s is not None and limit_s < time_s <= bearable_s]
        return [self._second_look(bearable)] if bearable else quick

    def _second_look(self, slow: Sequence[_Pair]) -> _Pair:
        pair = min(slow, key=lambda pair: self._looked_at.get(_names(pair), 0))
        self._num_passed_over, self._num_looks = 0, self._num_looks + 1
        present = set(map(_names, slow))
        self._looked_at = {names: look for names, look in self._looked_at.items() if names in present}
        self._looked_at[_names(pair)] = self._num_looks
        return pair


def _pairs(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> list[_Pair]:
    """All that can hold the request, can work together and are not passed over; workers to avoid only where there are
    no others. Where there is no such pair, decode workers by themselves: hand-offs between the others have just failed
    and would fail again, or one of the two is too small."""
    prefills = list(filter(request.fits_prefill, prefills))
    importers = list(filter(request.fits_import, decodes))
    preferred = _rather(prefills, request.avoid), _rather(importers, request.avoid)
    pairs = _disaggregated(*preferred, request) or _disaggregated(prefills, importers, request)
    alone = _rather(list(filter(request.fits_decode, decodes)), request.avoid)
    return [*pairs] or [(None, decode) for decode in alone]


def has_large_pair(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> bool:
    """Whether two of them could serve the request by a hand-off, passed over or not."""
    anywhere = replace(request, passed_over=frozenset())
    return any(prefill is not None for prefill, _ in _pairs(prefills, decodes, anywhere))


def is_servable(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> bool:
    """Whether some of them could serve the request, by a hand-off or without."""
    return bool(_pairs(prefills, decodes, replace(request, passed_over=frozenset())))


def _disaggregated(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> list[_Pair]:
    fitting = [(p, d) for d in decodes for p in prefills if p.pairing == d.pairing]
    return [(p, d) for p, d in fitting if (p.member, d.member) not in request.passed_over]


def _depth(pair: _Pair) -> int:
    return sum(load.depth for load in pair if load is not None)


def _share_to_compute(pair: _Pair, request: RequestFacts) -> float:
    """Of the prompt, by its prefill worker."""
    prefill, _ = pair
    cached = request.cached_tokens.get(prefill.member, 0) if prefill is not None else 0
    return max(0.0, 1 - cached / request.num_prompt_tokens)


def _names(pair: _Pair) -> tuple[MemberId, MemberId]:
    prefill, decode = pair
    assert prefill is not None, "there is nothing to transfer"
    return prefill.member, decode.member


def _transfer_s(pair: _Pair, num_prompt_tokens: int) -> float | None:
    """None: no figure, or nothing to transfer."""
    prefill, decode = pair
    if prefill is None:
        return None
    figure = next((figure for figure in decode.pairs if figure.exporter == prefill.member), None)
    return figure.transfer_s(num_prompt_tokens * decode.kv_bytes_per_token) if figure is not None else None


def _rather(loads: Sequence[WorkerLoad], avoid: Iterable[MemberId]) -> Sequence[WorkerLoad]:
    return [load for load in loads if load.member not in avoid] or loads
