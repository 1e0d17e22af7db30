"""Placement in simulated time: `auto` over workers of the roles prefill and decode, and over as many of both roles,
beside fixed roles and colocated workers; and how well `auto` predicted its requests. Two workers serve the lengths and
loads of `make bench-placement`, larger clusters some of them.

    python -m benchmarks.placement_simulated [--requests N] [--write]

Scheduler and policies are the real ones. Steps take the time of fixed service times with 5 % of noise, so the figures
show what the decisions and the forecasts are worth, without the noise of a machine. It takes a quarter of an hour.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean

from benchmarks.placement.capacity import CapacitySearch, keeps_up, num_requests
from benchmarks.placement.figures.samples import Slo
from benchmarks.placement.plan import OUTPUT_TOKENS, PROMPT_TOKENS, REFERENCE, SHARES
from benchmarks.placement.simulation import Served, Setting, Simulation
from benchmarks.placement.workload import Workload, even_arrivals, poisson_arrivals
from cli.load import Arrival, percentile
from cluster.messages import Role
from cluster.service_times import DecodeTimes, HandOffTimes, MixedTimes, PrefillTimes, ServiceTimes, StepLimit
from router.policies.candidates import SloTargets
from router.policies.placement import PrefixAware
from router.policies.slo_aware import SloAware

# About SmolLM2-135M's shape in bfloat16 on one thread of a CPU.
TIMES = ServiceTimes(
    PrefillTimes(0.004, 0.00052, 2.4e-7, 0.0),
    DecodeTimes(0.0082, 0.0007, 1.2e-6, 0.0),
    MixedTimes(1.03, 0.0),
    HandOffTimes(0.006, 0.0),
)
SETTING = Setting(TIMES, kv_bytes_per_token=23040.0, link_bytes_per_s=1e9, message_s=0.002, gap_s=0.0003)
_NOISE = 0.05
_MOST_TRIED = 400  # requests of one try of the search for the capacity
_STATIC = ("by role", "colocated")
_ARMS = (*_STATIC, "auto", "auto, role both")
_LARGE = (8, 16, 32, 64)  # workers
_LARGE_POINTS = (
    (REFERENCE, 0.6),
    (REFERENCE, 0.9),
    (Workload(512, 128), 0.6),
    (Workload(64, 128), 0.6),
    (Workload(2048, 16), 0.6),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One point: the shares of requests within the SLO by arm, and the errors of `auto`'s predictions."""

    name: str
    attainment: dict[str, float]
    ttft_errors: list[float]
    itl_errors: list[float]


def _serve(arm: str, num_workers: int, arrivals: Sequence[Arrival], slo: Slo | None, seed: str = "") -> list[Served]:
    """Serve these requests; without a seed steps have no noise. `slo`: of `auto`."""
    everyone, roles = range(num_workers), (Role.PREFILL, Role.DECODE)
    pools = [everyone[0::2], everyone[1::2]]
    if arm in _STATIC:
        workers = [_worker(i, roles[i % 2], 0.0, seed) for i in everyone]
        return Simulation(PrefixAware(), workers, *(pools if arm == "by role" else ((), everyone))).run(arrivals)
    assert slo is not None, "auto needs targets"
    policy = SloAware(SloTargets(slo.ttft_s, slo.tpot_s), Random(seed).random)
    if arm == "auto":
        workers = [_worker(i, roles[i % 2], slo.tpot_s, seed) for i in everyone]
        return Simulation(policy, workers, *pools).run(arrivals)
    workers = [_worker(i, Role.BOTH, slo.tpot_s, seed) for i in everyone]
    return Simulation(policy, workers, everyone, everyone).run(arrivals)


def _worker(number: int, role: Role, target_s: float, seed: str) -> Setting:
    draws = Random(f"{number} {seed}")
    noise = (lambda: max(0.7, draws.lognormvariate(0.0, _NOISE))) if seed else lambda: 1.0
    return replace(SETTING, role=role, step_limit=StepLimit(target_s), noise=noise)


def _quiet(workload: Workload) -> Slo:
    (served,) = _serve("colocated", 2, [Arrival(0.0, workload.prompt_tokens, workload.output_tokens)], None)
    return Slo(served.ttft_s, served.itl_s)


def _capacity_rps(arm: str, workload: Workload, quiet: Slo) -> float:
    """Return the capacity of two workers."""
    quiet_s = quiet.ttft_s + quiet.tpot_s * (workload.output_tokens - 1)
    search = CapacitySearch(1 / quiet_s)
    while not search.is_ended:
        rate_rps = search.rate_rps
        count = min(_MOST_TRIED, num_requests(rate_rps, quiet_s))
        records = [served.record for served in _serve(arm, 2, even_arrivals(workload, rate_rps, count), None)]
        search.add(kept_up=keeps_up(records, rate_rps, quiet_s))
    return search.capacity_rps


def rows(count: int) -> list[Row]:
    """Measure all points of two workers with so many requests each."""
    workloads = [REFERENCE, *(Workload(prompt, output) for prompt in PROMPT_TOKENS for output in OUTPUT_TOKENS)]
    return [_row(workload, share, 2, count) for workload in workloads for share in SHARES]


def large_rows(num_workers: int, count: int) -> list[Row]:
    """Measure the points of a larger cluster with so many requests for every two workers."""
    return [_row(workload, share, num_workers, count * num_workers // 2) for workload, share in _LARGE_POINTS]


def _row(workload: Workload, share: float, num_workers: int, count: int) -> Row:
    quiet = _quiet(workload)
    slo, name = Slo(3 * quiet.ttft_s, 2 * quiet.tpot_s), f"{workload.name} at {share:g}"
    rate_rps = share * num_workers / 2 * _best_capacity_rps(workload)
    arrivals = poisson_arrivals(workload, rate_rps, count, Random(f"{name} {num_workers}"))
    served = {arm: _serve(arm, num_workers, arrivals, slo, name) for arm in _ARMS}
    attainment = {arm: _attainment(each, slo) for arm, each in served.items()}
    return Row(name, attainment, _errors(served["auto"], "ttft_s"), _errors(served["auto"], "itl_s"))


@cache
def _best_capacity_rps(workload: Workload) -> float:
    return max(_capacity_rps(arm, workload, _quiet(workload)) for arm in _STATIC)


def _attainment(served: Sequence[Served], slo: Slo) -> float:
    return fmean(each.ttft_s <= slo.ttft_s and each.itl_s <= slo.tpot_s for each in served)


def _errors(served: Sequence[Served], field: str) -> list[float]:
    pairs = [(getattr(each.prediction, field), getattr(each, field)) for each in served]
    return [abs(predicted - real) / real for predicted, real in pairs]


def page(found: Sequence[Row], large: Mapping[int, Sequence[Row]], count: int, large_count: int) -> str:
    """Return the page. `large`: the rows of larger clusters by their number of workers."""
    lines = [
        "# Placement in simulated time",
        "",
        f"`python -m benchmarks.placement_simulated --requests {count} --write`: two workers with the speed of one CPU",
        "thread at SmolLM2-135M's shape, real scheduler and policies, simulated steps with 5 % of noise. Loads are",
        "shares of the better static arm's capacity. Shown are the requests within the SLO (3 x quiet TTFT, 2 x quiet",
        "TPOT), and the errors of `auto`'s predictions, median / p90. `auto` runs over a prefill and a decode worker,",
        "or over two workers of both roles. Bold: the better static arm keeps more. `auto` has to learn at each point",
        "which arrangement of the workers is better.",
        "",
        "| prompt/output | " + " | ".join(_ARMS) + " | TTFT error | ITL error |",
        "|" + "---|" * (len(_ARMS) + 3),
    ]
    for row in found:
        errors = [
            f"{percentile(each, 0.5):.0%} / {percentile(each, 0.9):.0%}" for each in (row.ttft_errors, row.itl_errors)
        ]
        lines.append("| " + " | ".join([row.name, *_cells(row), *errors]) + " |")
    means = [f"{fmean(row.attainment[arm] for row in found):.0%}" for arm in _ARMS]
    lines += ["| mean | " + " | ".join(means) + " | | |", "", "## Larger clusters", ""]
    lines += [
        f"The same with {large_count} requests for every two workers, and the same load of each. Half of the workers",
        "have each role, except with `role both`: there `auto` decides how many do which work. The requests from which",
        "`auto` learns count too.",
        "",
        "| workers | prompt/output | " + " | ".join(_ARMS) + " |",
        "|" + "---|" * (len(_ARMS) + 2),
    ]
    for num_workers, of_size in large.items():
        lines += [f"| {num_workers} | " + " | ".join([row.name, *_cells(row)]) + " |" for row in of_size]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    """Return the shares by arm; bold, where `auto` keeps fewer than the better static arm."""
    best = max(row.attainment[arm] for arm in _STATIC)
    shares = [(f"{share:.0%}", arm not in _STATIC and share < best) for arm, share in row.attainment.items()]
    return [f"**{text}**" if is_less else text for text, is_less in shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="requests per arm and point")
    parser.add_argument("--write", action="store_true", help="write the page in benchmarks/results")
    arguments = parser.parse_args()
    count, large_count = arguments.requests, max(1, arguments.requests // 6)
    large = {num_workers: large_rows(num_workers, large_count) for num_workers in _LARGE}
    text = page(rows(count), large, count, large_count)
    print(text)
    if arguments.write:
        (Path(__file__).parent / "results" / "placement_simulated.md").write_text(text)


if __name__ == "__main__":
    main()
