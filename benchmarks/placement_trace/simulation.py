"""Routers and prefill workers under a simulated clock, without processes.

The policies, the backlogs and the prefix indexes are those of real routers; the accounts of outstanding work and the
fits of service times are those of real workers. A worker computes one prompt at a time, in chunks, in the order of
arrival, and keeps blocks in a cache of bounded size. Every message takes `NETWORK_S`. The decode worker costs nothing,
so only times to first token are compared.
"""

import heapq
import itertools
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from benchmarks.placement_trace.trace import BLOCK_TOKENS, Request
from cluster.messages import CacheEvents, MemberId
from cluster.outstanding_work import OthersWork, OutstandingWork, PromptWork
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes, StepWork, TimedStep, attended_tokens
from engine.timing.service_time_fit import ServiceTimeFit
from router.policies.candidates import RequestFacts, WorkerLoad
from router.policies.placement import Placement
from router.policies.prediction.speeds import Speeds
from router.policies.prediction.work_ahead import PromptBacklog, WorkAhead
from router.policies.prefix_index import PrefixIndex

NUM_WORKERS = 8
CACHE_BLOCKS = 6_000  # of each worker
NETWORK_S = 0.005
HEARTBEAT_S = 1.0
REPORT_INTERVAL_S = 0.05  # of worker/watch.py
HEARTBEATS_ONLY = math.inf  # as an interval: no report between two heartbeats
_EVENTS_INTERVAL_S = 0.2
_CHUNK = 512
_DECODE = MemberId("decode", "1")
_NOT_COMPUTING = ServiceTimes(PrefillTimes(0.0, 1e6, 0.0, 0.0), DecodeTimes(0.0, 0.0, 0.0, 0.0))


class Chooser(Protocol):
    """The part of a placement policy that the simulation uses."""

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None: ...


@dataclass(slots=True, eq=False)
class Job:
    request: Request
    index: int  # of the request in the trace
    router: "Router"
    number: int  # in the backlog of its router
    work: PromptWork  # that its router expects
    num_new: int = 0
    num_done: int = 0


class Worker:
    """One worker. `fit` begins with steps that took exactly as long as they should."""

    def __init__(self, number: int, token_s: float, on_change: Callable[[MemberId], None]) -> None:
        self.number = number
        self.member = MemberId(f"p{number}", "1")
        self.token_s = token_s
        self.outstanding = OutstandingWork(on_change)
        self.queue: deque[Job] = deque()
        self.running: Job | None = None
        self.fit = ServiceTimeFit()
        sizes = itertools.product((16, 128, _CHUNK), (0, 1024))
        prompts = [TimedStep(StepWork(new, attended_tokens(new, context)), new * token_s) for new, context in sizes]
        self.fit.start([*prompts, *(TimedStep(StepWork(batch=batch), 0.01 * batch) for batch in (1, 4))])
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._next_event = 0

    def start(self) -> bool:
        """Begin the next prompt. Return False if there is none, or one is being computed."""
        if self.running is not None or not self.queue:
            return False
        job = self.running = self.queue.popleft()
        cached = list(itertools.takewhile(self._cache.__contains__, job.request.blocks))
        for block in cached:
            self._cache.move_to_end(block)
        job.num_new = max(1, job.request.num_tokens - BLOCK_TOKENS * len(cached))
        return True

    def next_step(self) -> TimedStep:
        """Return the next step of the running prompt."""
        assert self.running is not None
        job = self.running
        num_new = min(_CHUNK, job.num_new - job.num_done)
        context = job.request.num_tokens - job.num_new + job.num_done
        return TimedStep(StepWork(num_new, attended_tokens(num_new, context)), num_new * self.token_s)

    def complete(self, step: TimedStep) -> Job | None:
        """Record a step. Return the running prompt if it ends with it."""
        assert self.running is not None
        job = self.running
        self.fit.add(step)
        job.num_done += step.work.num_new
        if job.num_done < job.num_new:
            return None
        self.running = None
        return job

    def store(self, request: Request) -> CacheEvents:
        """Cache the blocks of a prompt. Returns the changes of the cache."""
        stored = [block for block in request.blocks if block not in self._cache]
        self._cache.update(dict.fromkeys(request.blocks))
        removed = [self._cache.popitem(last=False)[0] for _ in range(len(self._cache) - CACHE_BLOCKS)]
        self._next_event += 1
        return CacheEvents(self._next_event - 1, self._next_event, tuple(stored), tuple(removed))


@dataclass(slots=True)
class _View:
    """One worker as one router sees it."""

    member: MemberId
    times: ServiceTimes | None
    backlog: PromptBacklog = field(default_factory=PromptBacklog)
    assigned: int = 0

    def load(self, times: ServiceTimes, now_s: float) -> WorkerLoad:
        work = WorkAhead(times, self.backlog.queue(now_s), max_chunk=_CHUNK)
        return WorkerLoad(self.member, "a", self.assigned, self.backlog.others.num_sequences, work=work)


class Router:
    def __init__(self, number: int, policy: Chooser, workers: Sequence[Worker]) -> None:
        self.member = MemberId(f"router-{number}", "1")
        self.views = [_View(worker.member, worker.fit.times) for worker in workers]
        self.index = PrefixIndex()
        self._speeds = Speeds()
        self._policy = policy
        self._decode = WorkerLoad(_DECODE, "a", 0, work=WorkAhead(_NOT_COMPUTING))
        for worker in workers:
            self.index.apply(worker.member, CacheEvents(0, 0, (), cleared=True), max_blocks=CACHE_BLOCKS)

    def place(self, request: Request, index: int, now_s: float) -> tuple[int, Job]:
        """Choose a worker. Returns its number and the job for it, which counts as sent."""
        num_blocks = self.index.leading_blocks(request.blocks)
        cached = {member: min(length * BLOCK_TOKENS, request.num_tokens - 1) for member, length in num_blocks.items()}
        facts = RequestFacts(request.num_tokens, 1, 1, cached_tokens=cached)
        reported = {view.member: view.times for view in self.views if view.times is not None}
        believed = self._speeds.believed(reported, now_s)
        loads = [view.load(believed[view.member], now_s) for view in self.views]
        placement = self._policy.choose(loads, [self._decode], facts)
        assert placement is not None
        chosen = next(n for n, view in enumerate(self.views) if view.member == placement.prefill)
        view = self.views[chosen]
        work = PromptWork.of(request.num_tokens, cached.get(view.member, 0))
        view.assigned += 1
        return chosen, Job(request, index, self, view.backlog.add_prompt(work, now_s), work)

    def receive_first_token(self, job: Job, number: int, now_s: float) -> None:
        view = self.views[number]
        view.assigned -= 1
        view.backlog.record_computed(job.number, now_s)
        self.index.note_routed(job.request.blocks, view.member)

    def receive_cache_events(self, number: int, events: CacheEvents, _: float) -> None:
        assert self.index.apply(self.views[number].member, events, max_blocks=CACHE_BLOCKS)

    def receive_report(self, number: int, report: OthersWork, now_s: float) -> None:
        self.views[number].backlog.record_report(report, now_s)

    def receive_speed(self, number: int, times: ServiceTimes | None, _: float) -> None:
        self.views[number].times = times


class _Reports:
    """Sends one worker's reports: one to each router whose fellows have changed something, at most one per interval."""

    def __init__(self, routers: Sequence[Router], interval_s: float) -> None:
        self._routers = routers
        self._interval_s = interval_s
        self._due: set[MemberId] = set()
        self._last_s = -math.inf
        self._is_scheduled = False

    def change(self, router: MemberId, now_s: float) -> float | None:
        """Record that the work of a router has changed. Return when to send, if that is not scheduled yet."""
        self._due |= {other.member for other in self._routers} - {router}
        if self._is_scheduled or not self._due or self._interval_s == HEARTBEATS_ONLY:
            return None
        self._is_scheduled = True
        return max(now_s, self._last_s + self._interval_s)

    def take_due(self, now_s: float) -> list[Router]:
        self._last_s, self._is_scheduled = now_s, False
        due = [router for router in self._routers if router.member in self._due]
        self._due.clear()
        return due


@dataclass(frozen=True, slots=True)
class Placed:
    """One request: when it arrived, the worker that computed it, and its time to first token."""

    arrival_s: float
    num_tokens: int
    worker: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    placed: tuple[Placed, ...]
    num_cached: int  # tokens

    @property
    def mean_s(self) -> float:
        return statistics.fmean(one.ttft_s for one in self.placed)

    @property
    def cached_share(self) -> float:
        return self.num_cached / sum(one.num_tokens for one in self.placed)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One worker that needs twice as long from `at_s` on."""

    worker: int
    at_s: float


class Simulation:
    """One run over a trace. Every request goes to one of the routers at random; each has a policy of its own."""

    def __init__(
        self,
        policies: Sequence[Chooser],
        token_s: float,
        *,
        draws: random.Random,
        report_interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self._draws = draws
        self._workers = [Worker(n, token_s, partial(self._on_change, n)) for n in range(NUM_WORKERS)]
        self._routers = [Router(number, policy, self._workers) for number, policy in enumerate(policies)]
        self._reports = [_Reports(self._routers, report_interval_s) for _ in self._workers]
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._placed: dict[int, Placed] = {}
        self._num_cached = 0

    def run(self, requests: Sequence[Request], slowdown: Slowdown | None = None) -> Outcome:
        """Serve all requests."""
        for index, request in enumerate(requests):
            self._at(request.arrival_s, partial(self._arrive, index, request))
        begin_s, end_s = requests[0].arrival_s, requests[-1].arrival_s
        for beat in range(int((end_s - begin_s) / HEARTBEAT_S) + 1):
            self._at(begin_s + beat * HEARTBEAT_S, self._beat)
        if slowdown is not None:
            self._at(slowdown.at_s, partial(self._slow_down, self._workers[slowdown.worker]))
        while self._heap:
            self._now_s, _, act = heapq.heappop(self._heap)
            act(self._now_s)
        return Outcome(tuple(self._placed[index] for index in range(len(requests))), self._num_cached)

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), act))

    def _arrive(self, index: int, request: Request, now_s: float) -> None:
        number, job = self._draws.choice(self._routers).place(request, index, now_s)
        self._at(now_s + NETWORK_S, partial(self._queue, self._workers[number], job))

    def _queue(self, worker: Worker, job: Job, now_s: float) -> None:
        worker.outstanding.add_export(job.index, job.router.member, job.work, 1, now_s)
        worker.queue.append(job)
        self._start(worker, now_s)

    def _start(self, worker: Worker, now_s: float) -> None:
        if worker.start():
            assert worker.running is not None
            self._num_cached += worker.running.request.num_tokens - worker.running.num_new
            self._step(worker, now_s)

    def _step(self, worker: Worker, now_s: float) -> None:
        step = worker.next_step()
        self._at(now_s + step.seconds, partial(self._end_step, worker, step))

    def _end_step(self, worker: Worker, step: TimedStep, now_s: float) -> None:
        job = worker.complete(step)
        if job is None:
            self._step(worker, now_s)
            return
        worker.outstanding.remove_export(job.index, now_s)
        request, ttft_s = job.request, now_s + NETWORK_S - job.request.arrival_s
        self._placed[job.index] = Placed(request.arrival_s, request.num_tokens, worker.number, ttft_s)
        self._at(now_s + NETWORK_S, partial(job.router.receive_first_token, job, worker.number))
        events = worker.store(request)
        for router in self._routers:
            received_s = now_s + _EVENTS_INTERVAL_S + NETWORK_S
            self._at(received_s, partial(router.receive_cache_events, worker.number, events))
        self._start(worker, now_s)

    def _beat(self, now_s: float) -> None:
        for worker in self._workers:
            self._report(worker, self._routers, now_s)
            for router in self._routers:
                self._at(now_s + NETWORK_S, partial(router.receive_speed, worker.number, worker.fit.times))

    def _on_change(self, number: int, router: MemberId) -> None:
        at_s = self._reports[number].change(router, self._now_s)
        if at_s is not None:
            self._at(at_s, partial(self._report_changes, self._workers[number]))

    def _report_changes(self, worker: Worker, now_s: float) -> None:
        self._report(worker, self._reports[worker.number].take_due(now_s), now_s)

    def _report(self, worker: Worker, routers: Sequence[Router], now_s: float) -> None:
        reports = worker.outstanding.reports([router.member for router in routers], now_s)
        for router in routers:
            self._at(now_s + NETWORK_S, partial(router.receive_report, worker.number, reports[router.member]))

    def _slow_down(self, worker: Worker, _: float) -> None:
        worker.token_s *= 2
