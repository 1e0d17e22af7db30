"""Replays recent requests over the workers' own service times, in one of two arrangements, and returns how many of them
keep their latency targets. Pure.

The rules are those of the workers' scheduler: every running sequence decodes one token per step, and prompts beside
running sequences get the time that `StepLimit` allows. Steps that are about equal count as one. Functions here yield
after each of them, so that the caller can spread a replay.
"""

import heapq
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from random import Random
from statistics import fmean
from typing import NamedTuple

from cluster.outstanding_work import PromptWork
from cluster.service_times import StepWork
from router.policies.candidates import SloTargets, WorkerLoad
from router.policies.prediction.forecast import AGE_SHARE, Steps

_NEGLIGIBLE = 1e-6  # tokens


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A request that was placed. Times in seconds."""

    placed_s: float
    prompt: PromptWork
    num_prompt_tokens: int
    num_output: float  # of each choice
    targets: SloTargets
    num_choices: int = 1


Traffic = Sequence[tuple[float, PastRequest]]  # requests, and when each is placed, in seconds from the first one


def traffic(past: Sequence[PastRequest], scale: float, share: float, number: int) -> Traffic:
    """Return `number` requests at the rate at which one of `scale` parts of the cluster gets them from all routers.
    `share`: of this router, which sees only its own requests, and how much work of the others the workers have.

    They are every `scale`-th of the past ones. Where those are fewer, the ones between them follow, and then all again,
    as if the traffic went on like that: a cluster that is empty at first shows only later what it cannot keep up with.
    """
    found, turn_s = list[tuple[float, PastRequest]](), 0.0
    span_s = share * (past[-1].placed_s - past[0].placed_s) * len(past) / max(1, len(past) - 1)
    for turn in count():
        first = turn % scale
        for i in range(math.ceil((len(past) - first) / scale)):
            if len(found) == number:
                return found
            request = past[int(first + i * scale)]
            found.append((turn_s + share * (request.placed_s - past[0].placed_s), request))
        turn_s += span_s
    return found


def random_traffic(past: Sequence[PastRequest], every_s: float, number: int) -> Traffic:
    """Return `number` requests, the past ones in turn, at random times: one every `every_s` on average. The times are
    the same in each call."""
    draws, now_s, found = Random(0), 0.0, list[tuple[float, PastRequest]]()
    for i in range(number):
        found.append((now_s, past[i % len(past)]))
        now_s += draws.expovariate(1 / every_s)
    return found


_Kept = Generator[None, None, float]  # returns the share of the requests that keep their targets
_Served = Generator[None, None, "Sequence[_Live]"]


def kept_by_role(traffic: Traffic, computing: Sequence[WorkerLoad], decoding: Sequence[WorkerLoad]) -> _Kept:
    """Replay these requests with prompts and decoding on different workers."""
    prefills, decodes = (list(map(_Replayed, each)) for each in (computing, decoding))
    for placed_s, request in traffic:
        yield from _serve(_Live(request, placed_s, placed_s, request.prompt.num_new, 1), prefills)
    computed = sorted((yield from _all_served(prefills)), key=attrgetter("first_s"))
    decoded = [_Live(live.request, live.placed_s, live.first_s, 0.0, live.request.num_output) for live in computed]
    for live in decoded:
        yield from _serve(live, decodes)
    yield from _all_served(decodes)
    return fmean(first.is_kept(later.itl_s) for first, later in zip(computed, decoded, strict=True))


def kept_alone(traffic: Traffic, everyone: Sequence[WorkerLoad]) -> _Kept:
    """Replay these requests with each of them at one worker."""
    workers = list(map(_Replayed, everyone))
    for placed_s, request in traffic:
        yield from _serve(_Live(request, placed_s, placed_s, request.prompt.num_new, request.num_output), workers)
    return fmean(live.is_kept(live.itl_s) for live in (yield from _all_served(workers)))


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


class _EqualSteps(NamedTuple):
    """The next steps of a worker, which are about equal."""

    number: float
    step_s: float
    num_running: int  # sequences in each
    prompt_tokens: float  # that each computes of the first prompt


class _Replayed:
    """One worker of a replay, which computes its prompts in their order beside the sequences that it decodes."""

    def __init__(self, load: WorkerLoad) -> None:
        assert load.work is not None, "workers without speeds cannot be replayed"
        self._work = load.work
        self._steps = Steps(load.work)
        self._now_s = 0.0
        self._next: _EqualSteps | None = None  # None: to be planned, if there is work
        self._prompts: deque[_Live] = deque()
        self._running: list[tuple[float, int, _Live]] = []  # by the number of tokens after which they end
        self.num_live, self._num_running = 0, 0  # sequences that are here, that run: choices count one by one
        self._num_tokens, self._context = 0.0, 0.0  # that each of them generates; of all in all
        self._order = count()
        self._served: list[_Live] = []

    def add(self, live: _Live) -> None:
        """Take a request that comes at `live.here_s`, up to which the worker was moved forward. The step that runs then
        ends first."""
        if self._next is not None and self._now_s < live.here_s:
            self._take(self._next, min(self._next.number, math.ceil((live.here_s - self._now_s) / self._next.step_s)))
        self._now_s, self._next = max(self._now_s, live.here_s), None
        self.num_live += live.request.num_choices
        if live.prompt_left:
            self._prompts.append(live)
        else:
            self._start(live)

    def move(self, until_s: float) -> Generator[None, None, None]:
        """Take all equal steps that end before this time. Yields after each of them."""
        while self._prompts or self._running:
            equal = self._next = self._next or self._plan()
            if self._now_s + equal.number * equal.step_s >= until_s:
                break
            self._take(equal, equal.number)
            yield

    def finish(self) -> "_Served":
        """Serve all requests to their ends, and return all that were served here."""
        yield from self.move(math.inf)
        return self._served

    def _plan(self) -> _EqualSteps:
        """Return the steps that are about equal from now on. Sequences above the largest batch take turns."""
        num_running = min(self._num_running, self._work.max_running)
        share = num_running / self._num_running if self._running else 1.0
        beside, tokens, number = self._steps.beside(num_running, round(self._context * share)), 0.0, math.inf
        step_s = beside.quiet_s
        if self._running:
            number = max(1.0, (self._running[0][0] - self._num_tokens) / share)
        if self._prompts:
            prompt = self._prompts[0]
            waited_s, alone_s = self._now_s - prompt.here_s, self._alone_s(prompt)
            tokens = self._steps.chunk_tokens(beside, prompt.prompt_left, prompt.context, waited_s, alone_s)
            number = min(number, max(1.0, prompt.prompt_left // tokens))
            if num_running and self._work.step_limit is not None:
                step_s = self._steps.seconds(beside, tokens, prompt.context)
                grown_s = waited_s + self._work.step_limit.patience_s(alone_s)
                number = min(number, max(1.0, AGE_SHARE * grown_s / step_s))
            step_s = self._steps.seconds(beside, tokens, prompt.context + number * tokens / 2)
        return _EqualSteps(number, step_s, num_running, tokens)

    def _take(self, equal: _EqualSteps, number: float) -> None:
        """Advance by `number` of these steps."""
        self._next = None
        self._now_s += number * equal.step_s
        self._num_tokens += number * equal.num_running / max(1, self._num_running)
        self._context += number * equal.num_running
        while self._running and self._running[0][0] <= self._num_tokens + _NEGLIGIBLE:
            self._end(heapq.heappop(self._running)[2])
        if equal.prompt_tokens:
            self._prompts[0].prompt_left -= number * equal.prompt_tokens
            if self._prompts[0].prompt_left < 1:
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
        self.num_live -= live.request.num_choices
        if live.num_output > 1:
            self._num_running -= live.request.num_choices
            self._context -= live.request.num_choices * (live.request.num_prompt_tokens + live.num_output - 1)
        self._served.append(live)


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
