"""Placement in simulated time: `auto` over workers of the roles prefill and decode, and over as many of both roles,
beside fixed roles and colocated workers; and how well `auto` predicted its requests. Two workers serve the lengths and
loads of `make bench-placement`, larger clusters some of them.

    python -m benchmarks.placement_simulated [--requests N] [--seeds N] [--largest WORKERS] [--kept FILE] [--write]

Scheduler and policies are the real ones. Steps take the time of fixed service times with 5 % of noise, so the figures
show what the decisions and the forecasts are worth, without the noise of a machine. All of it takes about half an
hour with 300 requests and five seeds. With `--kept` a restarted run measures only the points that it lacks.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import fmean

from benchmarks.placement.capacity import CapacitySearch, keeps_up, num_requests
from benchmarks.placement.figures.samples import Slo
from benchmarks.placement.plan import OUTPUT_TOKENS, PROMPT_TOKENS, REFERENCE, SHARES
from benchmarks.placement.simulated_rows import KeptRows, Row, loaded_code
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


def rows(count: int, num_seeds: int, kept: KeptRows) -> list[Row]:
    """Return all points of two workers with so many requests for each seed."""
    workloads = [REFERENCE, *(Workload(prompt, output) for prompt in PROMPT_TOKENS for output in OUTPUT_TOKENS)]
    return [_kept_row(kept, workload, share, 2, count, num_seeds) for workload in workloads for share in SHARES]


def large_rows(num_workers: int, count: int, num_seeds: int, kept: KeptRows) -> list[Row]:
    """Return the points of a larger cluster with so many requests for every two workers and each seed."""
    number = count * num_workers // 2
    return [_kept_row(kept, workload, share, num_workers, number, num_seeds) for workload, share in _LARGE_POINTS]


def _kept_row(kept: KeptRows, workload: Workload, share: float, num_workers: int, count: int, num_seeds: int) -> Row:
    point = f"{workload.name} at {share:g}, {num_workers} workers, {count} requests, {num_seeds} seeds"
    return kept.measured(point, partial(_row, workload, share, num_workers, count, num_seeds))


def _row(workload: Workload, share: float, num_workers: int, count: int, num_seeds: int) -> Row:
    quiet = _quiet(workload)
    slo, name = Slo(3 * quiet.ttft_s, 2 * quiet.tpot_s), f"{workload.name} at {share:g}"
    rate_rps = share * num_workers / 2 * _best_capacity_rps(workload)
    row = Row(name, {arm: [] for arm in _ARMS}, [], [])
    for seed in range(num_seeds):
        arrivals = poisson_arrivals(workload, rate_rps, count, Random(f"{name} {num_workers} {seed}"))
        for arm in _ARMS:
            served = _serve(arm, num_workers, arrivals, slo, f"{name} {seed}")
            row.attainment[arm].append(_attainment(served, slo))
            if arm == "auto":
                row.ttft_errors.extend(_errors(served, "ttft_s"))
                row.itl_errors.extend(_errors(served, "itl_s"))
    return row


@cache
def _best_capacity_rps(workload: Workload) -> float:
    return max(_capacity_rps(arm, workload, _quiet(workload)) for arm in _STATIC)


def _attainment(served: Sequence[Served], slo: Slo) -> float:
    return fmean(each.ttft_s <= slo.ttft_s and each.itl_s <= slo.tpot_s for each in served)


def _errors(served: Sequence[Served], field: str) -> list[float]:
    pairs = [(getattr(each.prediction, field), getattr(each, field)) for each in served]
    return [abs(predicted - real) / real for predicted, real in pairs]


def page(found: Sequence[Row], large: Mapping[int, Sequence[Row]], command: str, large_count: int) -> str:
    """Return the page. `large`: the rows of larger clusters by their number of workers, with `large_count` requests for
    every two workers."""
    lines = [
        "# Placement in simulated time",
        "",
        f"`{command}`: two workers with the speed of",
        "one CPU thread at SmolLM2-135M's shape, real scheduler and policies, simulated steps with 5 % of noise. Loads",
        "are shares of the better static arm's capacity. Shown are the requests within the SLO (3 x quiet TTFT, 2 x",
        "quiet TPOT), as the mean over the seeds with the lowest and the highest one, and the errors of `auto`'s",
        "predictions, median / p90. `auto` runs over a prefill and a decode worker, or over two workers of both roles.",
        "Bold: the better static arm keeps more. `auto` has to learn at each point which arrangement of the workers is",
        "better, and the requests from which it learns count too.",
        "",
        "| prompt/output | " + " | ".join(_ARMS) + " | TTFT error | ITL error |",
        "|" + "---|" * (len(_ARMS) + 3),
    ]
    for row in found:
        errors = [
            f"{percentile(each, 0.5):.0%} / {percentile(each, 0.9):.0%}" for each in (row.ttft_errors, row.itl_errors)
        ]
        lines.append("| " + " | ".join([row.name, *_cells(row), *errors]) + " |")
    means = [f"{fmean(row.mean(arm) for row in found):.0%}" for arm in _ARMS]
    lines += ["| mean | " + " | ".join(means) + " | | |", "", "## Larger clusters", ""]
    lines += [
        f"The same with {large_count} requests for every two workers, and the same load of each. Half of the workers",
        "have each role, except with `role both`: there `auto` decides how many do which work.",
        "",
        "| workers | seeds | prompt/output | " + " | ".join(_ARMS) + " |",
        "|" + "---|" * (len(_ARMS) + 3),
    ]
    for num_workers, of_size in large.items():
        for row in of_size:
            num_seeds = len(row.attainment["auto"])
            lines.append(f"| {num_workers} | {num_seeds} | " + " | ".join([row.name, *_cells(row)]) + " |")
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    """Return the shares by arm; bold, where `auto` keeps fewer than the better static arm."""
    best = max(map(row.mean, _STATIC))
    cells = list[str]()
    for arm, shares in row.attainment.items():
        is_less = arm not in _STATIC and row.mean(arm) < best
        text = f"**{row.mean(arm):.0%}**" if is_less else f"{row.mean(arm):.0%}"
        spread = f" ({100 * min(shares):.0f} to {100 * max(shares):.0f})" if len(shares) > 1 else ""
        cells.append(text + spread)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="requests per arm, point and seed")
    parser.add_argument("--seeds", type=int, default=1, help="of two and eight workers; larger clusters get fewer")
    parser.add_argument("--largest", type=int, default=max(_LARGE), help="workers of the largest cluster")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="complete points, which are not measured again")
    parser.add_argument("--write", action="store_true", help="write the page in benchmarks/results")
    arguments = parser.parse_args()
    count, large_count, num_seeds = arguments.requests, max(1, arguments.requests // 6), arguments.seeds
    kept = KeptRows(arguments.kept, loaded_code())
    small = rows(count, num_seeds, kept)
    sizes = [each for each in _LARGE if each <= arguments.largest]
    large = {each: large_rows(each, large_count, max(1, num_seeds * min(_LARGE) // each), kept) for each in sizes}
    largest = f" --largest {arguments.largest}" if arguments.largest < max(_LARGE) else ""
    options = f"--requests {count} --seeds {num_seeds}{largest} --write"
    command = f"python -m benchmarks.placement_simulated {options}"
    text = page(small, large, command, large_count)
    print(text)
    if arguments.write:
        (Path(__file__).parent / "results" / "placement_simulated.md").write_text(text)


if __name__ == "__main__":
    main()
