"""Placement policies on a trace, without processes: eight prefill workers of fixed speed under a simulated clock.

Compares policies, one router with several, and the share of a worker before and after it becomes twice as slow. The
trace is the extract of Mooncake's conversation trace, which is not part of this repository: `--trace FILE`. `--write`
writes the page in benchmarks/results.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.placement_trace.simulation import (
    HEARTBEATS_ONLY,
    NUM_WORKERS,
    REPORT_INTERVAL_S,
    Chooser,
    Outcome,
    Placed,
    Simulation,
    Slowdown,
)
from benchmarks.placement_trace.trace import Request, read_trace, token_s, without_sharing
from router.policies.candidates import NO_TARGETS, RequestFacts, WorkerLoad
from router.policies.placement import LeastLoaded, Placement, PlacementReason, PrefixAware
from router.policies.slo_aware import SloAware

UTILISATION = 0.7  # of all workers, were every block of the trace computed once and never evicted
SEEDS = range(5)
_NUM_ROUTERS = (4, 8)
_SLOW_EVERY_S = 34.0  # each seed has a run for every such time of the trace
_WINDOW_S = (-100.0, 75.0)  # of the trace around a slowdown
_INTERVALS_S = ((-60, 0), (0, 2), (2, 5), (5, 10), (0, 10), (10, 70))


class AtRandom:
    """The baseline without any knowledge."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws

    def choose(self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], _: RequestFacts) -> Placement:
        return Placement(self._draws.choice(prefills).member, decodes[0].member, PlacementReason.TIE)


def _least_loaded(_: random.Random) -> Chooser:
    return LeastLoaded()


def _prefix_aware(_: random.Random) -> Chooser:
    return PrefixAware()


def _auto(draws: random.Random) -> Chooser:
    return SloAware(NO_TARGETS, draws.random)


POLICIES: dict[str, Callable[[random.Random], Chooser]] = {
    "random": AtRandom,
    "least-loaded": _least_loaded,
    "prefix-aware": _prefix_aware,
    "auto": _auto,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One policy, or one number of routers, on one trace over all seeds."""

    name: str
    outcomes: tuple[Outcome, ...]  # one per seed

    @property
    def mean_s(self) -> float:
        return statistics.fmean(outcome.mean_s for outcome in self.outcomes)

    @property
    def cells(self) -> str:
        means_s = [outcome.mean_s for outcome in self.outcomes]
        ttfts_s = [[one.ttft_s for one in outcome.placed] for outcome in self.outcomes]
        p99_s = statistics.fmean(statistics.quantiles(times_s, n=100)[98] for times_s in ttfts_s)
        cached = statistics.fmean(outcome.cached_share for outcome in self.outcomes)
        spread = f"{min(means_s):.2f} to {max(means_s):.2f} s"
        return f"| {self.name} | {self.mean_s:.2f} s | {spread} | {p99_s:.1f} s | {cached:.1%} |"


@dataclass(frozen=True, slots=True)
class Run:
    """One run over one trace."""

    requests: Sequence[Request]
    seed: int
    policy: Callable[[random.Random], Chooser] = _auto
    num_routers: int = 1
    report_interval_s: float = REPORT_INTERVAL_S
    slowdown: Slowdown | None = None
    token_s: float | None = None  # None: that of these requests

    def outcome(self) -> Outcome:
        policies = [self.policy(random.Random(100 * self.seed + number)) for number in range(self.num_routers)]
        speed_s = self.token_s if self.token_s is not None else _token_s(self.requests)
        draws = random.Random(self.seed)
        simulation = Simulation(policies, speed_s, draws=draws, report_interval_s=self.report_interval_s)
        return simulation.run(self.requests, self.slowdown)


Runs = Callable[[Sequence[Run]], tuple[Outcome, ...]]  # performs runs, in parallel processes
Traces = Sequence[Sequence[Request]]  # one per seed


def _token_s(requests: Sequence[Request]) -> float:
    return token_s(requests, num_workers=NUM_WORKERS, utilisation=UTILISATION)


def compare_policies(traces: Traces, perform: Runs) -> list[Row]:
    """Run every policy on the trace of every seed."""
    return [
        Row(f"`{name}`", perform([Run(requests, seed, policy) for seed, requests in enumerate(traces)]))
        for name, policy in POLICIES.items()
    ]


def compare_routers(traces: Traces, one: Row, perform: Runs) -> list[Row]:
    """Run `auto` with several routers; `one`: with one."""
    rows = [Row("1", one.outcomes)]
    for number in _NUM_ROUTERS:
        runs = [Run(requests, seed, num_routers=number) for seed, requests in enumerate(traces)]
        rows.append(Row(str(number), perform(runs)))
    seldom = [
        Run(requests, seed, num_routers=4, report_interval_s=HEARTBEATS_ONLY) for seed, requests in enumerate(traces)
    ]
    return [*rows, Row("4, reports only with heartbeats", perform(seldom))]


@dataclass(frozen=True, slots=True)
class Share:
    """The slow worker's share of prompts and tokens in one interval, over all runs."""

    of_prompts: float
    of_tokens: float


def shares_of_slow_worker(traces: Traces, perform: Runs) -> list[Share]:
    """Return the slow worker's share in every interval of `_INTERVALS_S`, over runs with many times of the trace."""
    runs: list[tuple[Run, Slowdown]] = []
    for seed, requests in enumerate(traces):
        at_s = -_WINDOW_S[0] + _SLOW_EVERY_S
        while at_s + _WINDOW_S[1] < requests[-1].arrival_s:
            near = [one for one in requests if _WINDOW_S[0] <= one.arrival_s - at_s < _WINDOW_S[1]]
            slowdown = Slowdown(int(at_s) % NUM_WORKERS, at_s)
            runs.append((Run(near, seed, slowdown=slowdown, token_s=_token_s(requests)), slowdown))
            at_s += _SLOW_EVERY_S
    outcomes = perform([run for run, _ in runs])
    slowed = [(slowdown, outcome.placed) for (_, slowdown), outcome in zip(runs, outcomes, strict=True)]
    return [_share(slowed, *interval_s) for interval_s in _INTERVALS_S]


def _share(runs: Sequence[tuple[Slowdown, Sequence[Placed]]], begin_s: float, end_s: float) -> Share:
    found = [
        (one, one.worker == slow.worker)
        for slow, placed in runs
        for one in placed
        if begin_s <= one.arrival_s - slow.at_s < end_s
    ]
    num_tokens = sum(one.num_tokens for one, _ in found)
    return Share(
        sum(is_slow for _, is_slow in found) / max(1, len(found)),
        sum(one.num_tokens for one, is_slow in found if is_slow) / max(1, num_tokens),
    )


def page(path: Path, perform: Runs) -> str:
    """Return the page of results. It takes about seven minutes of one core."""
    traces = [read_trace(path, seed) for seed in SEEDS]
    unshared = [without_sharing(requests) for requests in traces]
    policies = compare_policies(traces, perform)
    sections = [
        _INTRODUCTION,
        f"## The trace\n\n{_policy_table(policies)}",
        f"## The same without shared blocks\n\n{_policy_table(compare_policies(unshared, perform))}",
        f"## Several routers\n\n{_ROUTERS}\n\n{_router_table(compare_routers(traces, policies[-1], perform))}",
        "## A worker that becomes twice as slow",
        f"{_SLOW}\n\n{_share_table(shares_of_slow_worker(unshared, perform))}",
    ]
    return "\n\n".join(sections) + "\n"


_INTRODUCTION = f"""# Placement on a trace

`python -m benchmarks.placement_trace --trace FILE --write`: {NUM_WORKERS} simulated prefill workers of fixed
speed, busy for {UTILISATION:.0%} of the time if every block were computed once; the first 2,000 requests of Mooncake's
conversation trace (FAST 2025), arrivals spread within its grid of 3 s; {len(SEEDS)} seeds. All times are simulated.
Workers fit their service times to their steps and report them every second. Every message takes 5 ms."""

_ROUTERS = f"""The trace under `auto`, each request at one of the routers at random. A worker reports the work of
the others at most every {REPORT_INTERVAL_S * 1000:.0f} ms after a change, and with every heartbeat. It reports cached
blocks 0.2 s after they are stored."""

_SLOW = f"""Without shared blocks, under `auto`, one router. One run for every {_SLOW_EVERY_S:.0f} s of the trace of
each seed, at which a worker becomes slow. What it gets of the prompts, and of their tokens, that arrive in each
interval:"""
_COLUMNS = "| mean TTFT | over the seeds | p99 | cached tokens |\n|---|---|---|---|---|"


def _policy_table(rows: Sequence[Row]) -> str:
    auto = rows[-1]
    ratios = ", ".join(f"{auto.mean_s / row.mean_s:.2f} x that of {row.name}" for row in rows[:-1])
    return "\n".join([f"| policy {_COLUMNS}", *(row.cells for row in rows), "", f"The mean of `auto` is {ratios}."])


def _router_table(rows: Sequence[Row]) -> str:
    ratios = ", ".join(f"{row.mean_s / rows[0].mean_s:.3f} x ({row.name})" for row in rows[1:])
    head = f"| routers {_COLUMNS}"
    return "\n".join([head, *(row.cells for row in rows), "", f"The mean as a multiple of that with one: {ratios}."])


def _share_table(shares: Sequence[Share]) -> str:
    lines = ["| seconds | prompts | tokens |", "|---|---|---|"]
    for (begin_s, end_s), share in zip(_INTERVALS_S, shares, strict=True):
        lines.append(f"| {begin_s} to {end_s} | {share.of_prompts:.1%} | {share.of_tokens:.1%} |")
    fair = (
        f"With equal speeds it would be {1 / NUM_WORKERS:.1%}, in proportion to speed {0.5 / (NUM_WORKERS - 0.5):.1%}."
    )
    return "\n".join(
        [*lines, "", f"{fair} Short prompts still go to the\nslow worker while it is idle and the others are not."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="the extract of Mooncake's conversation trace")
    parser.add_argument("--write", action="store_true", help="write the page in benchmarks/results")
    arguments = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        text = page(arguments.trace, lambda runs: tuple(pool.map(Run.outcome, runs)))
    print(text)
    if arguments.write:
        (Path(__file__).parents[1] / "results" / "placement_trace.md").write_text(text)


if __name__ == "__main__":
    main()
