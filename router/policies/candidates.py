"""The workers that may serve a request: their loads, the facts about the request, and which workers can form a pair.
Pure.

A pair is a prefill worker and a decode worker that can exchange KV and hold the request (cluster/request_size.py), or
one worker alone. Of a large cluster the most promising workers are compared, so that a placement takes about as long
as in a small one.
"""

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.member import Capacity
from cluster.messages import NO_TENANT, LinkSpeed, MemberId, Role, TenantShare
from cluster.outstanding_work import PromptWork
from cluster.request_size import RequestSize, decode_shortage, handoff_shortage, prefill_shortage
from cluster.service_times import StepWork
from router.policies.prediction.forecast import PRECISION
from router.policies.prediction.unmodelled import NOTHING_UNMODELLED, Unmodelled
from router.policies.prediction.work_ahead import WorkAhead

# Up to these numbers of pairs and of single workers, all are compared. A prediction takes 10 us, with long queues 100.
_MAX_PAIRS, _MAX_ALONE = 36, 8
# Above them, this many workers of each role and KV format are compared. Over 600 random fleets of 24 to 64
# workers, 6 of each found a candidate as good as the best one in all but 4, and 8 of each in all but one.
_NUM_PROMISING = 6
_EQUAL_S = 0.001  # estimates that differ by less than this, or by less than `PRECISION`, are about equal


@dataclass(frozen=True, slots=True)
class SloTargets:
    """The times within which a request should be served; infinite: no target."""

    ttft_s: float = math.inf
    itl_s: float = math.inf  # on average, from its first token to its last one

    @staticmethod
    def of_ms(ttft_ms: float, itl_ms: float) -> "SloTargets":
        """Return targets given in milliseconds; 0: none."""
        return SloTargets(ttft_ms / 1000 or math.inf, itl_ms / 1000 or math.inf)

    @staticmethod
    def of_request(ttft_s: float | None, itl_s: float | None) -> "SloTargets":
        """Return the targets of a request; None: none."""
        return SloTargets(math.inf if ttft_s is None else ttft_s, math.inf if itl_s is None else itl_s)

    def preferring(self, other: "SloTargets") -> "SloTargets":
        """Return the targets of `other` where it has any."""
        return SloTargets(
            other.ttft_s if other.ttft_s < math.inf else self.ttft_s,
            other.itl_s if other.itl_s < math.inf else self.itl_s,
        )

    def missed(self, ttft_s: float, itl_s: float) -> int:
        """Return how many of the targets a request with these times misses."""
        return (ttft_s > self.ttft_s) + (itl_s > self.itl_s)


NO_TARGETS = SloTargets()


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of one worker that may be chosen, as the router knows it now."""

    member: MemberId
    kv_format: str  # workers with equal values can exchange KV
    assigned: int  # sequences that this router has there, queued or running
    others: int = 0  # sequences that other routers have there, as of the worker's last report
    free_blocks: int | None = None  # None: not known
    links: tuple[LinkSpeed, ...] = ()  # of a decode worker: how fast it reads each exporter; each one's first counts
    kv_bytes_per_token: float = 0.0
    capacity: Capacity | None = None  # None: not known, and taken as large enough
    full_for_s: Mapping[str, float] = field(default_factory=dict)  # how long its queue is full, by label of the tenant
    work: WorkAhead | None = None  # for predictions; None: the worker has not reported its speed
    unmodelled: Unmodelled = NOTHING_UNMODELLED
    grammar_engine: str = ""  # empty: it applies no grammars
    role: Role | None = None  # the work that its operator prefers it to do; None: any

    @property
    def depth(self) -> int:
        """Return the number of sequences ahead of a new one."""
        return self.assigned + self.others


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The facts about a request that placement uses."""

    num_prompt_tokens: int  # to prefill, with those that an earlier attempt drew
    max_tokens: int  # that are still missing
    num_choices: int
    avoid: frozenset[MemberId] = frozenset()  # failed this request before: last choice
    cached_tokens: Mapping[MemberId, int] = field(default_factory=dict)  # of the prompt, by worker
    excluded_pairs: Collection[tuple[MemberId, MemberId]] = (
        frozenset()
    )  # prefill and decode workers not to be paired now
    num_committed: int = 0  # of num_prompt_tokens, those that an earlier attempt drew
    too_small: Collection[MemberId] = frozenset()  # workers that have refused this request for its size
    expected_output: float = 1.0  # tokens of `max_tokens` that it is expected to generate, the first one included
    targets: SloTargets = NO_TARGETS  # of this request
    grammar_engine: str = ""  # that a worker must have; empty: the request has no grammar
    tenant: TenantShare = NO_TENANT
    is_batch: bool = False  # of the batch class, which workers serve after all others
    size: RequestSize = field(init=False, compare=False)  # of the fields above: each worker is asked whether it fits

    def __post_init__(self) -> None:
        num_prompt, num_output = self.num_prompt_tokens - self.num_committed, self.num_committed + self.max_tokens
        size = RequestSize(num_prompt, num_output, self.num_committed, self.num_choices)
        object.__setattr__(self, "size", size)

    def has_grammar_engine(self, load: WorkerLoad) -> bool:
        """Return whether the worker applies the request's grammar as the router that checked it, if it has one."""
        return self.grammar_engine in ("", load.grammar_engine)

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
        if load.member in self.too_small or not self.has_grammar_engine(load):
            return False
        return load.capacity is None or not shortage(load.capacity, self.size)


Pair = tuple[WorkerLoad | None, WorkerLoad]


def pairs(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> list[Pair]:
    """Return all pairs that can hold the request, can exchange KV and are not excluded. Workers to avoid are used only
    if there are no others. A worker of both roles alone counts as a pair, and two of them are none: either one does the
    same work without a hand-off. If nothing is left, return decode workers alone: hand-offs have just failed and would
    fail again, or a worker of each pair is too small."""
    found = _with_role(_handoffs(prefills, decodes, request))
    of_both = [decode for decode in decodes if decode.role is Role.BOTH and decode.member not in request.avoid]
    alone = _alone(of_both, request)
    if not found and not alone:
        found = _with_role(_handoffs(prefills, decodes, request, may_avoid=False))
    return [*found, *alone] or _alone(decodes, request)


def candidates(
    prefills: Sequence[WorkerLoad],
    decodes: Sequence[WorkerLoad],
    request: RequestFacts,
    helpers: Sequence[WorkerLoad] = (),
) -> list[Pair]:
    """Return the ways to serve the request: by a hand-off, and by each decode worker alone that can hold it. A way
    with a worker to avoid, or whose queue is full, is returned only if there is no other. Of more than `_MAX_PAIRS`
    pairs or `_MAX_ALONE` workers alone, only the most promising are returned.

    `helpers`: workers of another role that may serve the request alone too. Pairs keep their roles: a pair of workers
    against their roles would cost a hand-off and disturb two workers where one of them alone disturbs one."""
    handoffs = _handoffs(prefills, decodes, request, few=True)
    handoffs = handoffs or _handoffs(prefills, decodes, request, may_avoid=False, few=True)
    alone = [load for _, load in _alone([*decodes, *helpers], request)]
    if len(alone) > _MAX_ALONE:
        alone = _promising_alone(alone, request)
    found = [*handoffs, *((None, load) for load in alone)]
    found = [pair for pair in found if not _members(pair) & request.avoid] or found
    return [pair for pair in found if has_room(pair, request)] or found


def has_pair(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> bool:
    """Return whether two workers could serve the request by a hand-off."""
    return any(prefill is not None for prefill, _ in pairs(prefills, decodes, request))


def has_large_pair(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> bool:
    """Return whether two workers could serve the request by a hand-off, excluded or not."""
    return has_pair(prefills, decodes, replace(request, excluded_pairs=frozenset()))


def is_servable(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> bool:
    """Return whether some workers could serve the request, by a hand-off or without one."""
    return bool(pairs(prefills, decodes, replace(request, excluded_pairs=frozenset())))


def _handoffs(
    prefills: Sequence[WorkerLoad],
    decodes: Sequence[WorkerLoad],
    request: RequestFacts,
    *,
    may_avoid: bool = True,
    few: bool = False,
) -> list[Pair]:
    """Return every two workers that can serve the request by a hand-off. `may_avoid`: leave out the workers to avoid
    where a role has others. `few`: of more than `_MAX_PAIRS`, only the most promising."""
    prefills = list(filter(request.fits_prefill, prefills))
    decodes = list(filter(request.fits_import, decodes))
    if may_avoid:
        prefills, decodes = _preferring_others(prefills, request.avoid), _preferring_others(decodes, request.avoid)
    if few and len(prefills) * len(decodes) > _MAX_PAIRS:
        computing = _most_promising(prefills, lambda load: rough_first_token_s(load, request, is_export=True))
        exporters = {load.member for load in computing}
        decoding = _most_promising(
            decodes, lambda load: _decode_s(load, request) + _nearest_s(exporters, load, request)
        )
        if found := _matching(computing, decoding, request):
            return found
    return _matching(prefills, decodes, request)


def _matching(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts) -> list[Pair]:
    """Return every two of these workers between which the request's KV may move."""
    fitting = [(p, d) for d in decodes for p in prefills if p.kv_format == d.kv_format]
    both = {load.member for load in prefills}.intersection(load.member for load in decodes)
    excluded = {*request.excluded_pairs, *((member, member) for member in both)}
    return [(p, d) for p, d in fitting if not excluded or (p.member, d.member) not in excluded]


def has_room(pair: Pair, request: RequestFacts) -> bool:
    """Return whether no queue of these workers is reported full for the request's tenant."""
    return all(load.full_for_s.get(request.tenant.label, 0.0) <= 0 for load in pair if load is not None)


def promising(ways: Sequence[Pair], request: RequestFacts) -> Sequence[Pair]:
    """Return these ways; of more than `_MAX_PAIRS`, those of the most promising workers."""
    if len(ways) <= _MAX_PAIRS:
        return ways
    is_export = any(prefill is not None for prefill, _ in ways)
    all_computing = [*{(prefill or decode).member: prefill or decode for prefill, decode in ways}.values()]
    all_decoding = [*{decode.member: decode for _, decode in ways}.values()]
    first = _most_promising(all_computing, lambda load: rough_first_token_s(load, request, is_export=is_export))
    computing = {load.member for load in first}
    decoding = {load.member for load in _most_promising(all_decoding, lambda load: _decode_s(load, request))}
    return [(p, d) for p, d in ways if (p or d).member in computing and d.member in decoding] or ways


def _promising_alone(loads: Sequence[WorkerLoad], request: RequestFacts) -> list[WorkerLoad]:
    """Return the most promising workers alone: half of them by their first token, and half by all tokens."""

    def first_s(load: WorkerLoad) -> float:
        return rough_first_token_s(load, request, is_export=False)

    first = _most_promising(loads, first_s, _NUM_PROMISING // 2)
    chosen = {load.member for load in first}
    others = [load for load in loads if load.member not in chosen]
    return first + _most_promising(others, lambda load: first_s(load) + _decode_s(load, request), _NUM_PROMISING // 2)


def _most_promising(
    loads: Sequence[WorkerLoad], seconds: Callable[[WorkerLoad], float], number: int = _NUM_PROMISING
) -> list[WorkerLoad]:
    """Return the `number` workers of each KV format with the smallest estimates, of about equal ones the first; all if
    a worker's speed is unknown."""
    if any(load.work is None for load in loads):
        return list(loads)
    by_format: dict[str, list[WorkerLoad]] = {}
    for load in loads:
        by_format.setdefault(load.kv_format, []).append(load)
    return [load for each in by_format.values() for load in _smallest(each, list(map(seconds, each)), number)]


def _smallest(loads: Sequence[WorkerLoad], seconds: Sequence[float], number: int) -> Sequence[WorkerLoad]:
    """Return the `number` workers with the smallest of these estimates, of about equal ones the first."""
    if len(loads) <= number:
        return loads
    limit_s = heapq.nsmallest(number, seconds)[-1]
    equal_s = max(PRECISION * limit_s, _EQUAL_S)
    better = [load for load, each in zip(loads, seconds, strict=True) if each < limit_s - equal_s]
    equal = [load for load, each in zip(loads, seconds, strict=True) if abs(each - limit_s) <= equal_s]
    return [*better, *equal[: number - len(better)]]


def rough_first_token_s(load: WorkerLoad, request: RequestFacts, *, is_export: bool) -> float:
    """Estimate in how many seconds the first token comes from this worker, without a forecast of its steps.
    `is_export`: another worker decodes the request."""
    work = load.work
    assert work is not None, "a worker of unknown speed was estimated"
    ahead = work.prompts.before(request.tenant, work.max_chunk, is_batch=request.is_batch)
    own = PromptWork.of(request.num_prompt_tokens, request.cached_tokens.get(load.member, 0))
    prompts = ahead.work + own
    busy_s = work.times.seconds(StepWork(math.ceil(prompts.num_new), prompts.attended))
    first_s = work.times.seconds(StepWork(math.ceil(ahead.first.num_new), ahead.first.attended))
    left_s = busy_s - min(ahead.elapsed_s, first_s)
    if (number := work.batch.num_running) and work.step_limit is not None:
        quiet_s = work.times.step_s(number, round(number * _length(work)))
        limit_s = work.step_limit.seconds(quiet_s, 0.0, busy_s)
        left_s /= max(0.5, 1 - quiet_s / limit_s) if limit_s > 0 else 1.0  # prompts that wait get half of the time
    return left_s + (load.unmodelled.export_s if is_export else load.unmodelled.here_s)


def _decode_s(load: WorkerLoad, request: RequestFacts) -> float:
    """Estimate how long the worker will take for the tokens after the first one, without a forecast of its steps."""
    work = load.work
    assert work is not None, "a worker of unknown speed was estimated"
    number = work.batch.num_sequences + request.num_choices
    running = min(number, work.max_running)
    step_s = work.times.step_s(running, round(running * _length(work))) * load.unmodelled.itl_factor
    num_waits = max(0.0, number / work.max_running - 1)
    return (request.expected_output + num_waits * work.batch.left) * step_s


def _nearest_s(exporters: Collection[MemberId], decode: WorkerLoad, request: RequestFacts) -> float:
    """Estimate the shortest hand-off from one of these workers; 0 if none is known."""
    num_bytes = request.num_prompt_tokens * decode.kv_bytes_per_token
    return min((link.transfer_s(num_bytes) for link in decode.links if link.exporter in exporters), default=0.0)


def _length(work: WorkAhead) -> float:
    """Return the mean length of the worker's sequences."""
    return work.batch.context / max(1, work.batch.num_sequences)


def _with_role(handoffs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs in which at least one worker prefers one role."""
    both = Role.BOTH
    return [(p, d) for p, d in handoffs if d.role is not both or (p is not None and p.role is not both)]


def _alone(decodes: Sequence[WorkerLoad], request: RequestFacts) -> list[Pair]:
    return [(None, decode) for decode in _preferring_others(list(filter(request.fits_decode, decodes)), request.avoid)]


def _members(pair: Pair) -> set[MemberId]:
    return {load.member for load in pair if load is not None}


def transfer_s(prefill: WorkerLoad, decode: WorkerLoad, num_bytes: float) -> float | None:
    """Return the estimated seconds to move these bytes of KV; None if the speed is not known."""
    link = next((link for link in decode.links if link.exporter == prefill.member), None)
    return link.transfer_s(num_bytes) if link is not None else None


def _preferring_others(loads: list[WorkerLoad], avoid: Collection[MemberId]) -> list[WorkerLoad]:
    return [load for load in loads if load.member not in avoid] or loads
