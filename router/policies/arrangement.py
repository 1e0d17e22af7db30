"""Whether the workers should keep their roles, help each other, or each serve whole requests. Pure.

A placement that looks at one request at a time cannot see that another arrangement of all workers would serve the
present traffic better. So the recent requests are replayed over the workers' own service times: once with prompts and
decoding on workers of their roles, and once with every worker alone. Where one of the two keeps clearly more latency
targets, it is the arrangement; between them workers help each other where a request gains enough (router/policies/
slo_aware.py). A replay takes a few hundred to some thousand steps of arithmetic, a few of them with each placement, so
that none delays the streams that its router serves meanwhile, and at most 1.5 % of the time.
"""

import heapq
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from operator import attrgetter
from statistics import fmean

from cluster.messages import Role
from cluster.outstanding_work import PromptWork
from cluster.service_times import StepWork
from router.policies.candidates import SloTargets, WorkerLoad
from router.policies.forecast import AGE_SHARE, LEAST_STEP_S, Steps

_NUM_PAST = 128  # requests that are replayed, for up to four workers
_NUM_PAST_PER_WORKER = 32
_LEAST_PAST = 16
# Steps of a replay, which take about 15 us each: at most so many with one placement, and in a second.
_STEPS_PER_PLACEMENT, _STEPS_PER_S = 32.0, 1000.0
_CLEAR, _STILL_CLEAR = 0.3, 0.15  # differences of the shares of requests that keep their targets
_NEGLIGIBLE = 1e-6  # tokens


class Arrangement(StrEnum):
    BY_ROLE = "by_role"  # prompts and decoding on workers of their roles
    MIXED = "mixed"  # by role, and workers help where a request gains enough
    ALONE = "alone"  # every worker serves whole requests


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A request that was placed. Its choices count as one sequence. Times in seconds."""

    placed_s: float
    prompt: PromptWork
    num_prompt_tokens: int
    num_output: float
    targets: SloTargets


class Arrangements:
    """Learns the arrangement from the requests that are placed."""

    def __init__(self) -> None:
        self.current = Arrangement.MIXED
        self._past: deque[PastRequest] = deque(maxlen=_NUM_PAST)
        self._own, self._others = 0.0, 0.0  # sequences at the workers, summed over recent placements
        self._replay: Generator[None, None, None] | None = None
        self._num_steps = _STEPS_PER_PLACEMENT  # that may be taken now

    def placed(self, request: PastRequest, workers: Sequence[WorkerLoad]) -> bool:
        """Record a request, and go on with the replay. `workers`: all that may be chosen; their speeds are known.
        Returns whether the arrangement has changed."""
        if (size := max(_NUM_PAST, _NUM_PAST_PER_WORKER * len(workers))) != self._past.maxlen:
            self._past = deque(self._past, maxlen=size)
        elapsed_s = request.placed_s - self._past[-1].placed_s if self._past else 0.0
        self._num_steps = min(_STEPS_PER_PLACEMENT, self._num_steps + _STEPS_PER_S * elapsed_s)
        self._past.append(request)
        self._own += 1 + sum(load.assigned for load in workers) - self._own / size
        self._others += sum(load.others for load in workers) - self._others / size
        before = self.current
        if self._replay is None and len(self._past) >= _LEAST_PAST:
            self._replay = self._compare(_Traffic(tuple(self._past), self._own / (self._own + self._others)), workers)
        while self._replay is not None and self._num_steps >= 1:
            self._num_steps -= 1
            if next(self._replay, self) is self:
                self._replay = None
        return self.current is not before

    def _compare(self, traffic: "_Traffic", workers: Sequence[WorkerLoad]) -> Generator[None, None, None]:
        """Replay the requests with both arrangements and choose. Yields after each step."""
        prefills = [_Replayed(load) for load in workers if load.role is Role.PREFILL]
        decodes = [_Replayed(load) for load in workers if load.role is Role.DECODE]
        if not prefills or not decodes or len(prefills) + len(decodes) < len(workers):
            self.current = Arrangement.MIXED  # a worker of both roles does in either arrangement what it does now
            return
        by_role_kept = yield from _kept_by_role(traffic, prefills, decodes)
        alone_kept = yield from _kept_alone(traffic, [_Replayed(load) for load in workers])
        self.current = _better(by_role_kept, alone_kept, self.current)


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
        self._num_tokens, self._context = 0.0, 0.0  # that each of them generates; of all in all
        self._order = count()
        self._served: list[_Live] = []

    @property
    def num_live(self) -> int:
        return len(self._prompts) + len(self._running)

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
        num_running = min(len(self._running), self._work.max_running)
        share = num_running / len(self._running) if self._running else 1.0
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
        self._context += live.request.num_prompt_tokens
        heapq.heappush(self._running, (self._num_tokens + live.num_output - 1, next(self._order), live))

    def _end(self, live: _Live) -> None:
        live.ended_s = self._now_s
        if live.num_output > 1:
            self._context -= live.request.num_prompt_tokens + live.num_output - 1
        self._served.append(live)


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
