"""Whether the workers should keep their roles, help each other, or each serve whole requests. Pure.

A placement that looks at one request at a time cannot see that another arrangement of all workers would serve the
present traffic better. So the recent requests are replayed over the workers' own service times: once with prompts and
decoding on workers of their roles, and once with every worker alone. Where one of the two keeps clearly more latency
targets, it is the arrangement; between them workers help each other where a request gains enough (router/policies/
slo_aware.py). A replay takes a few thousand steps of arithmetic and is made in small parts, one with each placement.
"""

import heapq
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from cluster.messages import Role
from cluster.outstanding_work import PromptWork
from cluster.service_times import NO_STEP_TARGET, StepWork
from router.policies.candidates import SloTargets, WorkerLoad

_NUM_PAST = 128  # requests that are replayed, for up to four workers
_NUM_PAST_PER_WORKER = 32
_LEAST_PAST = 16
_PER_PLACEMENT = 8  # requests of a replay that are simulated with each placement
_CLEAR, _STILL_CLEAR = 0.3, 0.15  # differences of the shares of requests that keep their targets
_AGE_SHARE = 0.3  # steps are equal until the age of the oldest prompt and its patience have grown by this share
_LEAST_STEP_S = 1e-9  # a worker may report service times of 0
_LEAST_TOKENS = 16  # that the scheduler computes of the first prompt in each step


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

    def placed(self, request: PastRequest, workers: Sequence[WorkerLoad]) -> bool:
        """Record a request, and go on with the replay. `workers`: all that may be chosen; their speeds are known.
        Returns whether the arrangement has changed."""
        if (size := max(_NUM_PAST, _NUM_PAST_PER_WORKER * len(workers))) != self._past.maxlen:
            self._past = deque(self._past, maxlen=size)
        self._past.append(request)
        self._own += 1 + sum(load.assigned for load in workers) - self._own / size
        self._others += sum(load.others for load in workers) - self._others / size
        before = self.current
        if self._replay is None and len(self._past) >= _LEAST_PAST:
            self._replay = self._compare(self._traffic(), workers)
        for _ in range(_PER_PLACEMENT):
            if self._replay is not None and next(self._replay, self) is self:
                self._replay = None
        return self.current is not before

    def _traffic(self) -> list[PastRequest]:
        """Return the past requests at the rate of all routers: a router sees its own requests only, and how much work
        of the others the workers have."""
        first_s, share = self._past[0].placed_s, self._own / (self._own + self._others)
        return [replace(each, placed_s=share * (each.placed_s - first_s)) for each in self._past]

    def _compare(self, past: Sequence[PastRequest], workers: Sequence[WorkerLoad]) -> Generator[None, None, None]:
        """Replay the requests with both arrangements and choose. Yields after each request."""
        prefills = [_Replayed(load) for load in workers if load.role is Role.PREFILL]
        decodes = [_Replayed(load) for load in workers if load.role is Role.DECODE]
        if not prefills or not decodes or len(prefills) + len(decodes) < len(workers):
            self.current = Arrangement.MIXED  # a worker of both roles does in either arrangement what it does now
            return
        by_role_kept = yield from _kept_by_role(past, prefills, decodes)
        alone_kept = yield from _kept_alone(past, [_Replayed(load) for load in workers])
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


@dataclass(slots=True, eq=False)
class _Live:
    """A request at one worker."""

    request: PastRequest
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

    @property
    def itl_s(self) -> float:
        return (self.ended_s - self.first_s) / max(1.0, self.request.num_output - 1)


class _Replayed:
    """One worker of a replay, which computes its prompts in their order beside the sequences that it decodes."""

    def __init__(self, load: WorkerLoad) -> None:
        assert load.work is not None, "workers without speeds cannot be replayed"
        self._work = load.work
        self._limit = load.work.step_limit or NO_STEP_TARGET
        self._now_s = 0.0
        self._prompts: deque[_Live] = deque()
        self._running: list[tuple[float, int, _Live]] = []  # by the number of steps after which they end
        self._num_steps, self._context = 0.0, 0.0
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

    def move(self, until_s: float) -> None:
        """Move forward to this time, or to the end of the step that then runs."""
        while self._now_s < until_s and (self._prompts or self._running):
            self._take_steps(until_s)

    def finish(self) -> Sequence[_Live]:
        """Serve all requests to their ends, and return all that were served here."""
        self.move(math.inf)
        return self._served

    def _take_steps(self, until_s: float) -> None:
        """Take some equal steps."""
        num_running = min(len(self._running), self._work.max_running)
        context = round(self._context / max(1, len(self._running)) * num_running)
        prompt = self._prompts[0] if self._prompts else None
        most = self._chunk(prompt, num_running, context) if prompt is not None else 0.0
        step_s = self._step_s(most, prompt.context if prompt is not None else 0.0, num_running, context)
        number = max(1.0, math.ceil((until_s - self._now_s) / step_s)) if until_s < math.inf else math.inf
        if prompt is not None:
            number = min(number, max(1.0, prompt.prompt_left // most))
            if num_running:
                number = min(number, max(1.0, _AGE_SHARE * self._grown_s(prompt) / step_s))
        if self._running:
            number = min(number, max(1.0, self._running[0][0] - self._num_steps))
        if prompt is not None:
            step_s = self._step_s(most, prompt.context + number * most / 2, num_running, context)
        self._now_s += number * step_s
        self._num_steps += number
        self._context += number * num_running
        while self._running and self._running[0][0] <= self._num_steps:
            self._end(heapq.heappop(self._running)[2])
        if prompt is not None:
            prompt.prompt_left -= number * most
            if prompt.prompt_left < 1:
                self._start(self._prompts.popleft())

    def _step_s(self, num_new: float, prompt_context: float, num_running: int, context: int) -> float:
        work = StepWork(math.ceil(num_new), num_new * prompt_context, num_running, context)
        return max(_LEAST_STEP_S, self._work.times.seconds(work))

    def _chunk(self, prompt: _Live, num_running: int, context: int) -> float:
        """Return how many tokens of the first prompt the next step computes."""
        work = self._work
        most = max(1.0, min(prompt.prompt_left, work.max_chunk - num_running))
        if not num_running:
            return most
        quiet_s = work.times.decode.seconds(num_running, context)
        limit_s = self._limit.seconds(quiet_s, self._now_s - prompt.here_s, self._alone_s(prompt))
        added_s = work.times.prompts_within_s(limit_s, num_running, context)
        return min(most, max(work.times.prefill.tokens_within(added_s, prompt.context, math.ceil(most)), _LEAST_TOKENS))

    def _grown_s(self, prompt: _Live) -> float:
        return self._now_s - prompt.here_s + self._limit.patience_s(self._alone_s(prompt))

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
        heapq.heappush(self._running, (self._num_steps + live.num_output - 1, id(live), live))

    def _end(self, live: _Live) -> None:
        live.ended_s = self._now_s
        if live.num_output > 1:
            self._context -= live.request.num_prompt_tokens + live.num_output - 1
        self._served.append(live)


_Kept = Generator[None, None, float]  # returns the share of the requests that keep their targets


def _kept_by_role(past: Sequence[PastRequest], prefills: Sequence[_Replayed], decodes: Sequence[_Replayed]) -> _Kept:
    for request in past:
        _serve(_Live(request, request.placed_s, request.prompt.num_new, 1), prefills)
        yield
    computed = sorted((live for worker in prefills for live in worker.finish()), key=lambda live: live.first_s)
    for live in computed:
        _serve(_Live(live.request, live.first_s, 0.0, live.request.num_output), decodes)
        yield
    decoded = {id(live.request): live for worker in decodes for live in worker.finish()}
    return fmean(_is_kept(live.request, live.first_s, decoded[id(live.request)].itl_s) for live in computed)


def _kept_alone(past: Sequence[PastRequest], workers: Sequence[_Replayed]) -> _Kept:
    for request in past:
        _serve(_Live(request, request.placed_s, request.prompt.num_new, request.num_output), workers)
        yield
    served = [live for worker in workers for live in worker.finish()]
    return fmean(_is_kept(live.request, live.first_s, live.itl_s) for live in served)


def _serve(live: _Live, workers: Sequence[_Replayed]) -> None:
    """Give a request to the worker with the fewest ones, as of the time at which it comes."""
    for worker in workers:
        worker.move(live.here_s)
    min(workers, key=lambda worker: worker.num_live).add(live)


def _is_kept(request: PastRequest, first_s: float, itl_s: float) -> bool:
    return not request.targets.missed(first_s - request.placed_s, itl_s)
