"""Whether the workers should keep their roles, help each other, or each serve whole requests. Pure.

A placement that looks at one request at a time cannot see that another arrangement of all workers would serve the
present traffic better. So the recent requests are replayed over the workers' own service times: once with prompts and
decoding on workers of their roles, and once with every worker alone. Where one of the two keeps clearly more latency
targets, it is the arrangement; between them workers help each other where a request gains enough (router/policies/
slo_aware.py). A replay takes a few hundred to some thousand steps of arithmetic, a few of them with each placement, so
that none delays the streams that its router serves meanwhile, and at most 1.5 % of the time. Of a large cluster a few
workers of each role are replayed with their share of the requests, so it learns as soon as a small one.

Workers of both roles get a role here where that keeps more targets: as many as the recent prompts need compute prompts,
the others decode. It is a preference as that of an operator, and each router draws the same line between the workers,
in the order of their ids.
"""

import heapq
import math
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress, count
from operator import attrgetter
from statistics import fmean

from cluster.messages import MemberId, Role
from cluster.outstanding_work import PromptWork
from cluster.service_times import TARGET_SHARE, StepWork
from router.policies.candidates import SloTargets, WorkerLoad
from router.policies.forecast import AGE_SHARE, LEAST_STEP_S, Steps

_NUM_REPLAYED = 8  # workers of a larger cluster that are replayed, if that leaves one of each role
_NUM_PAST = 128  # requests that are replayed, for up to four workers
_NUM_PAST_PER_WORKER = 32
_LEAST_PAST = 16
# Steps of a replay, which take about 15 us each: at most so many with one placement, and in a second.
_STEPS_PER_PLACEMENT, _STEPS_PER_S = 32.0, 1000.0
_CLEAR, _STILL_CLEAR = 0.3, 0.15  # differences of the shares of requests that keep their targets
_LEAD = 0.05  # the same, from which workers of both roles share the work by roles; they do until it is negative
_HYSTERESIS = 0.25  # workers by which too many or too few may compute prompts before their number changes
_NEGLIGIBLE = 1e-6  # tokens


class Arrangement(StrEnum):
    BY_ROLE = "by_role"  # prompts and decoding on workers of their roles
    MIXED = "mixed"  # by role, and workers help where a request gains enough
    ALONE = "alone"  # every worker serves whole requests


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A request that was placed. Times in seconds."""

    placed_s: float
    prompt: PromptWork
    num_prompt_tokens: int
    num_output: float  # of each choice
    targets: SloTargets
    num_choices: int = 1


class Arrangements:
    """Learns the arrangement from the requests that are placed."""

    def __init__(self) -> None:
        self.current = Arrangement.MIXED
        self._past: deque[PastRequest] = deque(maxlen=_NUM_PAST)
        self._own, self._others = 0.0, 0.0  # sequences at the workers, summed over recent placements
        self._replay: Generator[None, None, None] | None = None
        self._num_steps = _STEPS_PER_PLACEMENT  # that may be taken now
        self._num_computing = 0  # workers that compute prompts, those of the role included
        self._roles: Mapping[MemberId, Role] = {}  # that workers of both roles have where they share the work by roles
        self._shares_by_role = False

    def placed(self, request: PastRequest, workers: Sequence[WorkerLoad]) -> bool:
        """Record a request, and go on with the replay. `workers`: all that may be chosen; their speeds are known.
        Returns whether the arrangement has changed."""
        elapsed_s = request.placed_s - self._past[-1].placed_s if self._past else 0.0
        self._num_steps = min(_STEPS_PER_PLACEMENT, self._num_steps + _STEPS_PER_S * elapsed_s)
        self._past.append(request)
        size = self._past.maxlen or 1
        self._own += request.num_choices + sum(load.assigned for load in workers) - self._own / size
        self._others += sum(load.others for load in workers) - self._others / size
        before = self.current
        if self._replay is None and len(self._past) >= _LEAST_PAST:
            self._share_roles(workers)
            self._replay = self._compare(workers)
        while self._replay is not None and self._num_steps >= 1:
            self._num_steps -= 1
            if next(self._replay, self) is self:
                self._replay = None
        return self.current is not before

    def role_of(self, load: WorkerLoad) -> Role | None:
        """Return the worker's role: whether a worker of both roles has only one of them is decided here."""
        is_shared = self._shares_by_role and load.role is Role.BOTH
        return self._roles.get(load.member, load.role) if is_shared else load.role

    @property
    def _share(self) -> float:
        """Return the share of this router in the work of all routers."""
        return self._own / (self._own + self._others)

    def _share_roles(self, workers: Sequence[WorkerLoad]) -> None:
        """Decide which workers of both roles compute prompts: the first ones in the order of their ids."""
        both = sorted((load.member for load in workers if load.role is Role.BOTH), key=attrgetter("id", "incarnation"))
        num_fixed = sum(load.role is Role.PREFILL for load in workers)
        least, most = max(1, num_fixed), min(len(workers) - 1, num_fixed + len(both))
        if not both or most < least:
            self._roles = {}
            return
        seconds = max(LEAST_STEP_S, self._share * (self._past[-1].placed_s - self._past[0].placed_s))
        median = sorted(workers, key=_prompt_s)[len(workers) // 2]
        wanted = _num_for_prompts(self._past, seconds, median, len(workers))
        if not self._num_computing - _HYSTERESIS <= wanted < self._num_computing + 1 + _HYSTERESIS:
            self._num_computing = math.floor(wanted)
        self._num_computing = min(max(least, self._num_computing), most)
        computing = both[: self._num_computing - num_fixed]
        self._roles = dict.fromkeys(both, Role.DECODE) | dict.fromkeys(computing, Role.PREFILL)

    def _compare(self, workers: Sequence[WorkerLoad]) -> Generator[None, None, None]:
        """Replay the requests with both arrangements and choose. Yields after each step."""
        roles = [self._roles.get(load.member, load.role) for load in workers]
        pools = [[*compress(workers, [each is role for each in roles])] for role in (Role.PREFILL, Role.DECODE)]
        if not all(pools) or sum(map(len, pools)) < len(workers):
            self.current, self._shares_by_role = Arrangement.MIXED, False
            return
        scale = _scale(*map(len, pools))
        prefills, decodes = (_every(scale, pool) for pool in pools)
        num_past = max(_NUM_PAST, _NUM_PAST_PER_WORKER * (len(prefills) + len(decodes)))
        self._past = deque(self._past, maxlen=math.ceil(scale * num_past))
        if len(self._past) < scale * _LEAST_PAST:
            return
        traffic = _Traffic.of(self._past, scale, self._share)
        by_role_kept = yield from _kept_by_role(traffic, _replayed(prefills), _replayed(decodes))
        alone_kept = yield from _kept_alone(traffic, _replayed([*prefills, *decodes]))
        self.current = _better(by_role_kept, alone_kept, self.current)
        self._shares_by_role = by_role_kept - alone_kept >= (0.0 if self._shares_by_role else _LEAD)


def _scale(num_prefills: int, num_decodes: int) -> float:
    """Return how many workers one of a replay stands for."""
    fewest, number = min(num_prefills, num_decodes), num_prefills + num_decodes
    return max(1.0, fewest / max(1, _NUM_REPLAYED * fewest // number))


def _every(scale: float, workers: Sequence[WorkerLoad]) -> Sequence[WorkerLoad]:
    """Return one of so many of these workers, evenly from the fastest to the slowest."""
    if scale <= 1:
        return workers
    ordered = sorted(workers, key=_prompt_s)
    number = round(len(workers) / scale)
    return [ordered[int((i + 0.5) * len(ordered) / number)] for i in range(number)]


def _prompt_s(load: WorkerLoad) -> float:
    assert load.work is not None, "workers without speeds cannot be compared"
    return load.work.times.prefill_s(load.work.max_chunk)


def _num_for_prompts(past: Sequence[PastRequest], seconds: float, load: WorkerLoad, num_workers: int) -> float:
    """Return how many of these workers, which are like `load`, should compute the prompts of requests that arrive
    within `seconds`, if they may be busy for `TARGET_SHARE` of the time, and the others decode in batches as large as
    that share of the target for the time between tokens allows. Workers that are not needed are shared by the roots of
    the needs (square-root staffing): the smaller a pool is, the larger is the part of it that it needs for requests
    that come together."""
    assert load.work is not None, "workers without speeds cannot be compared"
    times, max_running = load.work.times, load.work.max_running
    tokens = sum(one.num_choices * max(0.0, one.num_output - 1) for one in past)
    length = fmean(one.num_prompt_tokens + one.num_output / 2 for one in past)
    target_s = fmean(one.targets.itl_s for one in past)
    added_s = max(times.decode.per_sequence_s + times.decode.per_context_token_s * length, LEAST_STEP_S)
    batch = max(1.0, min(max_running, (TARGET_SHARE * target_s - times.decode.step_s) / added_s))
    decoding = tokens * (times.decode.step_s / batch + added_s) / seconds
    computing_s = sum(times.prefill.seconds(math.ceil(one.prompt.num_new), one.prompt.attended) for one in past)
    computing = max(computing_s, LEAST_STEP_S) / TARGET_SHARE / seconds
    if (spare := num_workers - computing - decoding) <= 0:
        return num_workers * computing / (computing + decoding)
    return computing + spare * math.sqrt(computing) / (math.sqrt(computing) + math.sqrt(decoding))


def _better(by_role_kept: float, alone_kept: float, current: Arrangement) -> Arrangement:
    """Return the arrangement for these shares of requests that keep their targets. The present one is kept longer."""
    for arrangement, gain in (
        (Arrangement.BY_ROLE, by_role_kept - alone_kept),
        (Arrangement.ALONE, alone_kept - by_role_kept),
    ):
        if gain >= (_STILL_CLEAR if arrangement is current else _CLEAR):
            return arrangement
    return Arrangement.MIXED


@dataclass(frozen=True, slots=True)
class _Traffic:
    """The requests of a replay, at the rate of all routers: a router sees only its own requests, and how much work of
    the others the workers have."""

    past: Sequence[PastRequest]
    share: float  # of this router

    @staticmethod
    def of(past: Sequence[PastRequest], scale: float, share: float) -> "_Traffic":
        """Return every `scale`-th of these requests."""
        return _Traffic([past[int(i * scale)] for i in range(int(len(past) / scale))], share)

    def placed_s(self, request: PastRequest) -> float:
        return self.share * (request.placed_s - self.past[0].placed_s)


@dataclass(slots=True, eq=False)
class _Live:
    """A request at one worker."""

    request: PastRequest
    placed_s: float
    here_s: float  # when it came to this worker
    prompt_left: float  # tokens to compute here
    num_output: float  # tokens to generate here
    first_s: float = 0.0  # when its prompt was computed
    ended_s: float = 0.0

    @property
    def context(self) -> float:
        """Return how many tokens precede those that are computed next."""
        prompt = self.request.prompt
        return prompt.attended / prompt.num_new + prompt.num_new / 2 - self.prompt_left

    def is_kept(self, itl_s: float) -> bool:
        return not self.request.targets.missed(self.first_s - self.placed_s, itl_s)

    @property
    def itl_s(self) -> float:
        return (self.ended_s - self.first_s) / max(1.0, self.request.num_output - 1)


class _Replayed:
    """One worker of a replay, which computes its prompts in their order beside the sequences that it decodes."""

    def __init__(self, load: WorkerLoad) -> None:
        assert load.work is not None, "workers without speeds cannot be replayed"
        self._work = load.work
        self._steps = Steps(load.work)
        self._now_s = 0.0
        self._prompts: deque[_Live] = deque()
        self._running: list[tuple[float, int, _Live]] = []  # by the number of tokens after which they end
        self._num_running = 0  # sequences: choices count one by one
        self._num_tokens, self._context = 0.0, 0.0  # that each of them generates; of all in all
        self._order = count()
        self._served: list[_Live] = []

    @property
    def num_live(self) -> int:
        """Return the number of sequences that are here."""
        return sum(live.request.num_choices for live in self._prompts) + self._num_running

    def add(self, live: _Live) -> None:
        """Take a request that comes at `live.here_s`, up to which the worker was moved forward."""
        self._now_s = max(self._now_s, live.here_s)
        if live.prompt_left:
            self._prompts.append(live)
        else:
            self._start(live)

    def move(self, until_s: float) -> Generator[None, None, None]:
        """Move forward to this time, or to the end of the step that then runs. Yields after each step."""
        while self._now_s < until_s and (self._prompts or self._running):
            self._take_steps(until_s)
            yield

    def finish(self) -> "_Served":
        """Serve all requests to their ends, and return all that were served here."""
        yield from self.move(math.inf)
        return self._served

    def _take_steps(self, until_s: float) -> None:
        """Take some equal steps, which count as one. Sequences above the largest batch take turns."""
        num_running = min(self._num_running, self._work.max_running)
        share = num_running / self._num_running if self._running else 1.0
        context = round(self._context * share)
        beside, prompt, most = self._steps.beside(num_running, context), None, 0.0
        step_s = beside.quiet_s
        if self._prompts:
            prompt = self._prompts[0]
            waited_s, alone_s = self._now_s - prompt.here_s, self._alone_s(prompt)
            most = self._steps.chunk_tokens(beside, prompt.prompt_left, prompt.context, waited_s, alone_s)
            step_s = self._steps.seconds(beside, most, prompt.context)
        number = max(1.0, math.ceil((until_s - self._now_s) / step_s)) if until_s < math.inf else math.inf
        if prompt is not None:
            number = min(number, max(1.0, prompt.prompt_left // most))
            if num_running and self._work.step_limit is not None:
                grown_s = waited_s + self._work.step_limit.patience_s(alone_s)
                number = min(number, max(1.0, AGE_SHARE * grown_s / step_s))
        if self._running:
            number = min(number, max(1.0, (self._running[0][0] - self._num_tokens) / share))
        if prompt is not None:
            step_s = self._steps.seconds(beside, most, prompt.context + number * most / 2)
        self._now_s += number * step_s
        self._num_tokens += number * share
        self._context += number * num_running
        while self._running and self._running[0][0] <= self._num_tokens + _NEGLIGIBLE:
            self._end(heapq.heappop(self._running)[2])
        if prompt is not None:
            prompt.prompt_left -= number * most
            if prompt.prompt_left < 1:
                self._start(self._prompts.popleft())

    def _alone_s(self, prompt: _Live) -> float:
        work = prompt.request.prompt
        return self._work.times.seconds(StepWork(math.ceil(work.num_new), work.attended))

    def _start(self, live: _Live) -> None:
        """Let a sequence decode whose prompt is computed."""
        live.first_s = self._now_s
        if live.num_output <= 1:
            self._end(live)
            return
        self._num_running += live.request.num_choices
        self._context += live.request.num_choices * live.request.num_prompt_tokens
        heapq.heappush(self._running, (self._num_tokens + live.num_output - 1, next(self._order), live))

    def _end(self, live: _Live) -> None:
        live.ended_s = self._now_s
        if live.num_output > 1:
            self._num_running -= live.request.num_choices
            self._context -= live.request.num_choices * (live.request.num_prompt_tokens + live.num_output - 1)
        self._served.append(live)


def _replayed(workers: Sequence[WorkerLoad]) -> Sequence[_Replayed]:
    return [_Replayed(load) for load in workers]


_Kept = Generator[None, None, float]  # returns the share of the requests that keep their targets
_Served = Generator[None, None, Sequence[_Live]]


def _kept_by_role(traffic: _Traffic, prefills: Sequence[_Replayed], decodes: Sequence[_Replayed]) -> _Kept:
    for request in traffic.past:
        placed_s = traffic.placed_s(request)
        yield from _serve(_Live(request, placed_s, placed_s, request.prompt.num_new, 1), prefills)
    computed = sorted((yield from _all_served(prefills)), key=attrgetter("first_s"))
    for live in computed:
        decoding = _Live(live.request, live.placed_s, live.first_s, 0.0, live.request.num_output)
        yield from _serve(decoding, decodes)
    decoded = {id(live.request): live for live in (yield from _all_served(decodes))}
    return fmean(live.is_kept(decoded[id(live.request)].itl_s) for live in computed)


def _kept_alone(traffic: _Traffic, workers: Sequence[_Replayed]) -> _Kept:
    for request in traffic.past:
        placed_s = traffic.placed_s(request)
        yield from _serve(_Live(request, placed_s, placed_s, request.prompt.num_new, request.num_output), workers)
    return fmean(live.is_kept(live.itl_s) for live in (yield from _all_served(workers)))


def _serve(live: _Live, workers: Sequence[_Replayed]) -> Generator[None, None, None]:
    """Give a request to the worker with the fewest ones, as of the time at which it comes."""
    for worker in workers:
        yield from worker.move(live.here_s)
    min(workers, key=attrgetter("num_live")).add(live)
    yield


def _all_served(workers: Sequence[_Replayed]) -> _Served:
    found: list[_Live] = []
    for worker in workers:
        found += yield from worker.finish()
    return found
