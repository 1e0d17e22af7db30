"""Placement policies on a trace, without processes: eight prefill workers of fixed speed under a simulated clock.

The policies, the backlog of each worker and the prefix index are the router's own. A worker computes one prompt at a
time in the order of arrival and keeps blocks in a cache of bounded size. It reports changes of the cache after 0.2 s
and every second its speed, a moving mean over its prompts. The decode worker costs nothing, so only times to first
token are compared.

The trace is the extract of Mooncake's conversation trace, which is not part of this repository: `--trace FILE`. Its
arrivals lie on a grid of 3 s and are spread within it. `--write` writes the page in benchmarks/results.
"""

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cluster.messages import CacheEvents, MemberId
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes
from router.policies.candidates import NO_TARGETS, RequestFacts, WorkerLoad
from router.policies.placement import LeastLoaded, Placement, PlacementReason, Policy, PrefixAware
from router.policies.prefix_index import PrefixIndex
from router.policies.slo_aware import SloAware
from router.policies.work_ahead import PromptBacklog, PromptWork, WorkAhead

NUM_WORKERS = 8
UTILISATION = 0.7  # of all workers, were every block of the trace computed once and never evicted
BLOCK_TOKENS = 512  # of the trace
CACHE_BLOCKS = 6_000  # of each worker
_GRID_S = 3.0  # of the trace's timestamps
_CHUNK = 512
_EVENTS_DELAY_S = 0.2
_HEARTBEAT_S = 1.0
_SEEDS = range(5)
_DECODE = MemberId("decode", "1")
_NEW_SHARE = 0.3  # of the newest prompt in a worker's estimate of its own speed


@dataclass(frozen=True, slots=True)
class Request:
    arrival_s: float
    num_tokens: int
    blocks: tuple[bytes, ...]  # one hash per block of the prompt


def read_trace(path: Path, seed: int) -> list[Request]:
    """Read the trace in the order of arrival, arrivals spread within the grid."""
    draws = random.Random(seed)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    requests = [
        Request(
            row["timestamp"] / 1000 + draws.random() * _GRID_S,
            row["input_length"],
            tuple(number.to_bytes(16, "big") for number in row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]),
        )
        for row in rows
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


def without_sharing(requests: Sequence[Request]) -> list[Request]:
    """Return the same requests with blocks of their own."""
    numbers = itertools.count(1 << 64)
    return [replace(one, blocks=tuple(next(numbers).to_bytes(16, "big") for _ in one.blocks)) for one in requests]


def token_s(requests: Sequence[Request]) -> float:
    """Return the seconds per token at which the workers are busy for `UTILISATION` of the time if each block is
    computed once."""
    seen: set[bytes] = set()
    num_computed = 0
    for request in requests:
        num_computed += request.num_tokens - BLOCK_TOKENS * sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    return UTILISATION * NUM_WORKERS * (requests[-1].arrival_s - requests[0].arrival_s) / num_computed


@dataclass(slots=True)
class Job:
    request: Request
    index: int  # of the request in the trace
    number: int  # in the backlog
    num_new: int = 0
    time_s: float = 0.0


@dataclass(slots=True)
class Worker:
    """One worker, and what the router knows of it. Only the simulation writes it."""

    member: MemberId
    token_s: float
    reported_token_s: float
    measured_token_s: float
    backlog: PromptBacklog = field(default_factory=PromptBacklog)
    queue: deque[Job] = field(default_factory=deque)
    running: Job | None = None
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    next_event: int = 0

    def start(self) -> Job | None:
        """Begin the next prompt if none is being computed."""
        if self.running is not None or not self.queue:
            return None
        job = self.running = self.queue.popleft()
        cached = list(itertools.takewhile(self.cache.__contains__, job.request.blocks))
        for block in cached:
            self.cache.move_to_end(block)
        job.num_new = max(1, job.request.num_tokens - BLOCK_TOKENS * len(cached))
        job.time_s = job.num_new * self.token_s
        return job

    def finish(self) -> tuple[Job, CacheEvents]:
        """End the prompt being computed. Returns the changes of the cache."""
        assert self.running is not None
        job, self.running = self.running, None
        stored = [block for block in job.request.blocks if block not in self.cache]
        self.cache.update(dict.fromkeys(job.request.blocks))
        removed = [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - CACHE_BLOCKS)]
        self.measured_token_s += _NEW_SHARE * (job.time_s / job.num_new - self.measured_token_s)
        self.next_event += 1
        return job, CacheEvents(self.next_event - 1, self.next_event, tuple(stored), tuple(removed))

    def load(self, now_s: float) -> WorkerLoad:
        times = ServiceTimes(PrefillTimes(0.0, self.reported_token_s, 0.0, 0.0), DecodeTimes(0.0, 0.0, 0.0, 0.0))
        num_prompts = len(self.queue) + (self.running is not None)
        work = WorkAhead(times, self.backlog.queue(now_s), max_chunk=_CHUNK)
        return WorkerLoad(self.member, "a", assigned=num_prompts, work=work)


class AtRandom:
    """The baseline without any knowledge."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws

    def choose(self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], _: RequestFacts) -> Placement:
        return Placement(self._draws.choice(prefills).member, decodes[0].member, PlacementReason.TIE)


@dataclass(frozen=True, slots=True)
class Outcome:
    ttfts_s: tuple[float, ...]
    workers: tuple[int, ...]  # by request: the number of the worker that computed it
    arrivals_s: tuple[float, ...]
    num_cached: int  # tokens
    num_tokens: int

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.ttfts_s)


class Simulation:
    """One run of a policy over a trace."""

    def __init__(self, policy: "Policy | AtRandom", seconds_per_token: float) -> None:
        self._policy = policy
        self._index = PrefixIndex()
        self._workers = [
            Worker(MemberId(f"p{number}", "1"), seconds_per_token, seconds_per_token, seconds_per_token)
            for number in range(NUM_WORKERS)
        ]
        for worker in self._workers:
            self._index.apply(worker.member, CacheEvents(0, 0, (), cleared=True), max_blocks=CACHE_BLOCKS)
        unused = ServiceTimes(PrefillTimes(0.0, 1e6, 0.0, 0.0), DecodeTimes(0.0, 0.0, 0.0, 0.0))  # computes no prompt
        self._decode = WorkerLoad(_DECODE, "a", 0, work=WorkAhead(unused))
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._ttfts_s: dict[int, float] = {}
        self._chosen: dict[int, int] = {}
        self._num_cached = 0

    def run(self, requests: Sequence[Request], *, slow_at_s: float | None = None) -> Outcome:
        """Serve all requests. `slow_at_s`: from then on the first worker needs twice as long."""
        for number, request in enumerate(requests):
            self._at(request.arrival_s, partial(self._arrive, number, request))
        last_s = requests[-1].arrival_s
        for beat in range(int(last_s / _HEARTBEAT_S) + 1):
            self._at(beat * _HEARTBEAT_S, self._beat)
        if slow_at_s is not None:
            self._at(slow_at_s, self._slow_down)
        while self._heap:
            now_s, _, act = heapq.heappop(self._heap)
            act(now_s)
        numbers = range(len(requests))
        return Outcome(
            ttfts_s=tuple(self._ttfts_s[number] for number in numbers),
            workers=tuple(self._chosen[number] for number in numbers),
            arrivals_s=tuple(request.arrival_s for request in requests),
            num_cached=self._num_cached,
            num_tokens=sum(request.num_tokens for request in requests),
        )

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), act))

    def _arrive(self, number: int, request: Request, now_s: float) -> None:
        num_blocks = self._index.leading_blocks(request.blocks)
        cached = {member: min(length * BLOCK_TOKENS, request.num_tokens - 1) for member, length in num_blocks.items()}
        facts = RequestFacts(request.num_tokens, 1, 1, cached_tokens=cached)
        placement = self._policy.choose([worker.load(now_s) for worker in self._workers], [self._decode], facts)
        assert placement is not None and placement.prefill is not None
        chosen = next(n for n, worker in enumerate(self._workers) if worker.member == placement.prefill)
        worker = self._workers[chosen]
        work = PromptWork.of(request.num_tokens, cached.get(worker.member, 0))
        worker.queue.append(Job(request, number, worker.backlog.add_prompt(work, now_s)))
        self._chosen[number] = chosen
        self._start(worker, now_s)

    def _start(self, worker: Worker, now_s: float) -> None:
        job = worker.start()
        if job is not None:
            self._num_cached += job.request.num_tokens - job.num_new
            self._at(now_s + job.time_s, partial(self._finish, worker))

    def _finish(self, worker: Worker, now_s: float) -> None:
        job, events = worker.finish()
        self._ttfts_s[job.index] = now_s - job.request.arrival_s
        worker.backlog.record_computed(job.number, now_s)
        self._index.note_routed(job.request.blocks, worker.member)
        self._at(now_s + _EVENTS_DELAY_S, partial(self._report, worker, events))
        self._start(worker, now_s)

    def _report(self, worker: Worker, events: CacheEvents, _: float) -> None:
        assert self._index.apply(worker.member, events, max_blocks=CACHE_BLOCKS)

    def _beat(self, _: float) -> None:
        for worker in self._workers:
            worker.reported_token_s = worker.measured_token_s

    def _slow_down(self, _: float) -> None:
        self._workers[0].token_s *= 2


def policies(seed: int) -> dict[str, "Policy | AtRandom"]:
    draws = random.Random(seed)
    return {
        "random": AtRandom(draws),
        "least-loaded": LeastLoaded(),
        "prefix-aware": PrefixAware(),
        "auto": SloAware(NO_TARGETS, draws.random),
    }


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace, over all seeds."""

    name: str
    means_s: tuple[float, ...]  # mean time to first token, one per seed
    p99_s: float
    cached_share: float

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.means_s)


def compare(path: Path, change: Callable[[Sequence[Request]], Sequence[Request]]) -> list[Row]:
    """Run every policy on the changed trace with every seed."""
    outcomes: dict[str, list[Outcome]] = {}
    for seed in _SEEDS:
        requests = change(read_trace(path, seed))
        for name, policy in policies(seed).items():
            outcomes.setdefault(name, []).append(Simulation(policy, token_s(requests)).run(requests))
    return [
        Row(
            name,
            tuple(outcome.mean_s for outcome in found),
            statistics.fmean(statistics.quantiles(outcome.ttfts_s, n=100)[98] for outcome in found),
            statistics.fmean(outcome.num_cached / outcome.num_tokens for outcome in found),
        )
        for name, found in outcomes.items()
    ]


def shares_of_slow_worker(path: Path) -> list[tuple[float, float, float]]:
    """Return, per seed, the share of the prompts that the first worker gets in the minute before it becomes twice as
    slow, in the ten seconds after that, and from then on for a minute."""
    shares: list[tuple[float, float, float]] = []
    for seed in _SEEDS:
        requests = without_sharing(read_trace(path, seed))
        slow_at_s = requests[-1].arrival_s / 2
        policy = policies(seed)["auto"]
        outcome = Simulation(policy, token_s(requests)).run(requests, slow_at_s=slow_at_s)
        bounds = ((-60.0, 0.0), (0.0, 10.0), (10.0, 70.0))
        before, soon, later = (_share(outcome, slow_at_s + begin_s, slow_at_s + end_s) for begin_s, end_s in bounds)
        shares.append((before, soon, later))
    return shares


def _share(outcome: Outcome, start_s: float, end_s: float) -> float:
    placed = zip(outcome.arrivals_s, outcome.workers, strict=True)
    found = [worker for arrival_s, worker in placed if start_s <= arrival_s < end_s]
    return found.count(0) / max(1, len(found))


def page(path: Path) -> str:
    """Return the page of results. It takes about half a minute."""
    sections = [_INTRODUCTION]
    for title, change in (("The trace", list), ("The same without shared blocks", without_sharing)):
        sections.append(f"## {title}\n\n{_table(compare(path, change))}")
    before, soon, later = map(statistics.fmean, zip(*shares_of_slow_worker(path), strict=True))
    sections.append(
        "## A worker that becomes twice as slow\n\n"
        f"In the middle of the run without shared blocks, under `auto`: its share of the prompts is {before:.1%} in the"
        f"\nminute before, {soon:.1%} in the ten seconds after, and {later:.1%} in the minute after those. With equal"
        f"\nspeeds it would be {1 / NUM_WORKERS:.1%}, in proportion to speed {0.5 / (NUM_WORKERS - 0.5):.1%}."
    )
    return "\n\n".join(sections) + "\n"


_INTRODUCTION = f"""# Placement on a trace

`python -m benchmarks.placement_trace --trace FILE --write`: {NUM_WORKERS} simulated prefill workers of fixed
speed, busy for {UTILISATION:.0%} of the time if every block were computed once; the first 2,000 requests of Mooncake's
conversation trace (FAST 2025), arrivals spread within its grid of 3 s; {len(_SEEDS)} seeds. All times are simulated."""


def _table(rows: Sequence[Row]) -> str:
    means = {row.name: row.mean_s for row in rows}
    lines = ["| policy | mean TTFT | over the seeds | p99 | cached tokens |", "|---|---|---|---|---|"]
    for row in rows:
        spread = f"{min(row.means_s):.2f} to {max(row.means_s):.2f} s"
        lines.append(f"| `{row.name}` | {row.mean_s:.2f} s | {spread} | {row.p99_s:.1f} s | {row.cached_share:.1%} |")
    ratios = [f"{means['auto'] / mean_s:.2f} x that of `{name}`" for name, mean_s in means.items() if name != "auto"]
    return "\n".join([*lines, "", f"The mean of `auto` is {', '.join(ratios)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="the extract of Mooncake's conversation trace")
    parser.add_argument("--write", action="store_true", help="write the page in benchmarks/results")
    arguments = parser.parse_args()
    text = page(arguments.trace)
    print(text)
    if arguments.write:
        (Path(__file__).parent / "results" / "placement_trace.md").write_text(text)


if __name__ == "__main__":
    main()
