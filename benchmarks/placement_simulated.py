"""Placement in simulated time: `auto` over a prefill and a decode worker, beside fixed roles and two colocated workers,
at the lengths and loads of `make bench-placement`; and how well `auto` predicted its requests.

    python -m benchmarks.placement_simulated [--requests N] [--write]

Scheduler and policies are the real ones. Steps take the time of fixed service times with 5 % of noise, so the figures
show what the decisions and the forecasts are worth, without the noise of a machine. It takes a few minutes.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
_STATIC: dict[str, tuple[Sequence[int], Sequence[int]]] = {"1+1": ((0,), (1,)), "colocated x 2": ((), (0, 1))}


@dataclass(frozen=True, slots=True)
class Row:
    """One point: the shares of requests within the SLO by arm, and the errors of `auto`'s predictions."""

    name: str
    attainment: dict[str, float]
    ttft_errors: list[float]
    itl_errors: list[float]


def _static(name: str, arrivals: Sequence[Arrival], seed: str = "") -> list[Served]:
    workers = [_worker(role, 0.0, seed) for role in (Role.PREFILL, Role.DECODE)]
    return Simulation(PrefixAware(), workers, *_STATIC[name]).run(arrivals)


def _auto(slo: Slo, arrivals: Sequence[Arrival], seed: str) -> list[Served]:
    workers = [_worker(role, slo.tpot_s, seed) for role in (Role.PREFILL, Role.DECODE)]
    policy = SloAware(SloTargets(slo.ttft_s, slo.tpot_s), Random(seed).random)
    return Simulation(policy, workers, *_STATIC["1+1"]).run(arrivals)


def _worker(role: Role, target_s: float, seed: str) -> Setting:
    """Return one worker; without a seed its steps have no noise."""
    draws = Random(f"{role} {seed}")
    noise = (lambda: max(0.7, draws.lognormvariate(0.0, _NOISE))) if seed else lambda: 1.0
    return replace(SETTING, role=role, step_limit=StepLimit(target_s), noise=noise)


def _quiet(workload: Workload) -> Slo:
    (served,) = _static("colocated x 2", [Arrival(0.0, workload.prompt_tokens, workload.output_tokens)])
    return Slo(served.ttft_s, served.itl_s)


def _capacity_rps(name: str, workload: Workload, quiet: Slo) -> float:
    quiet_s = quiet.ttft_s + quiet.tpot_s * (workload.output_tokens - 1)
    search = CapacitySearch(1 / quiet_s)
    while not search.is_ended:
        rate_rps = search.rate_rps
        count = min(_MOST_TRIED, num_requests(rate_rps, quiet_s))
        records = [served.record for served in _static(name, even_arrivals(workload, rate_rps, count))]
        search.add(kept_up=keeps_up(records, rate_rps, quiet_s))
    return search.capacity_rps


def rows(count: int) -> list[Row]:
    """Measure all points with so many requests each."""
    workloads = [REFERENCE, *(Workload(prompt, output) for prompt in PROMPT_TOKENS for output in OUTPUT_TOKENS)]
    return [row for workload in workloads for row in _rows(workload, count)]


def _rows(workload: Workload, count: int) -> list[Row]:
    quiet = _quiet(workload)
    slo = Slo(3 * quiet.ttft_s, 2 * quiet.tpot_s)
    capacity_rps = max(_capacity_rps(name, workload, quiet) for name in _STATIC)
    found = []
    for share in SHARES:
        name = f"{workload.name} at {share:g}"
        arrivals = poisson_arrivals(workload, share * capacity_rps, count, Random(name))
        served = {arm: _static(arm, arrivals, name) for arm in _STATIC} | {"auto": _auto(slo, arrivals, name)}
        attainment = {arm: _attainment(each, slo) for arm, each in served.items()}
        found.append(Row(name, attainment, _errors(served["auto"], "ttft_s"), _errors(served["auto"], "itl_s")))
    return found


def _attainment(served: Sequence[Served], slo: Slo) -> float:
    return fmean(each.ttft_s <= slo.ttft_s and each.itl_s <= slo.tpot_s for each in served)


def _errors(served: Sequence[Served], field: str) -> list[float]:
    pairs = [(getattr(each.prediction, field), getattr(each, field)) for each in served]
    return [abs(predicted - real) / real for predicted, real in pairs]


def page(found: Sequence[Row], count: int) -> str:
    arms = list(found[0].attainment)
    lines = [
        "# Placement in simulated time",
        "",
        f"`python -m benchmarks.placement_simulated --requests {count} --write`: two workers with the speed of one CPU",
        "thread at SmolLM2-135M's shape, real scheduler and policies, simulated steps with 5 % of noise. Loads are",
        "shares of the better static arm's capacity. Shown are the requests within the SLO (3 x quiet TTFT, 2 x quiet",
        "TPOT), and the errors of `auto`'s predictions, median / p90. Bold: the better static arm keeps more. `auto`",
        "has to learn at each point which arrangement of the workers is better.",
        "",
        "| prompt/output | " + " | ".join(arms) + " | TTFT error | ITL error |",
        "|" + "---|" * (len(arms) + 3),
    ]
    for row in found:
        shares = [f"{value:.0%}" for value in row.attainment.values()]
        if row.attainment["auto"] < max(row.attainment[arm] for arm in _STATIC):
            shares[-1] = f"**{shares[-1]}**"
        errors = [
            f"{percentile(each, 0.5):.0%} / {percentile(each, 0.9):.0%}" for each in (row.ttft_errors, row.itl_errors)
        ]
        lines.append("| " + " | ".join([row.name, *shares, *errors]) + " |")
    means = [f"{fmean(row.attainment[arm] for row in found):.0%}" for arm in arms]
    return "\n".join([*lines, "| mean | " + " | ".join(means) + " | | |"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="requests per arm and point")
    parser.add_argument("--write", action="store_true", help="write the page in benchmarks/results")
    arguments = parser.parse_args()
    text = page(rows(arguments.requests), arguments.requests)
    print(text)
    if arguments.write:
        (Path(__file__).parent / "results" / "placement_simulated.md").write_text(text)


if __name__ == "__main__":
    main()
