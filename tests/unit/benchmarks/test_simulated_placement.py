"""A simulated prefill and a decode worker, each of which may serve a request alone: `auto` keeps about as many latency
targets as the better of two fixed roles and two colocated workers, whichever that is."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from benchmarks.placement.simulation import Served, Simulation
from benchmarks.placement.workload import Workload, poisson_arrivals
from benchmarks.placement_simulated import SETTING, TIMES
from cluster.messages import Role
from cluster.service_times import StepLimit
from router.policies.candidates import SloTargets
from router.policies.placement import Policy, PrefixAware
from router.policies.slo_aware import SloAware

_SEEDS, _NUM_REQUESTS = (1,), 120
_NUM_TO_LEARN = 150  # requests until the arrangement is learned and those that waited before are served
Arm = tuple[tuple[int, ...], tuple[int, ...]]
SEPARATE, COLOCATED = ((0,), (1,)), ((), (0, 1))


def targets_of(workload: Workload) -> SloTargets:
    """Return targets of three times the quiet time to first token and twice the quiet time between tokens, as in the
    benchmark.
    """
    quiet_s = TIMES.prompt_s(workload.prompt_tokens, 0.0, 512)
    return SloTargets(3 * quiet_s, 2 * TIMES.step_s(1, workload.prompt_tokens))


def run(
    policy: Policy,
    arm: Arm,
    workload: Workload,
    rate_rps: float,
    seed: int,
    target_s: float = 0.0,
    num_requests: int = _NUM_REQUESTS,
    roles: Sequence[Role] = (Role.PREFILL, Role.DECODE),
) -> list[Served]:
    draws = Random(seed)
    setting = replace(SETTING, step_limit=StepLimit(target_s), noise=lambda: max(0.7, draws.lognormvariate(0, 0.05)))
    workers = [replace(setting, role=role) for role in roles]
    arrivals = poisson_arrivals(workload, rate_rps, num_requests, Random(f"{workload} {rate_rps} {seed}"))
    return Simulation(policy, workers, *arm).run(arrivals)


def attainment(found: list[Served], targets: SloTargets) -> float:
    return sum(not targets.missed(one.ttft_s, one.itl_s) for one in found) / len(found)


def of_static(arm: Arm, workload: Workload, rate_rps: float) -> float:
    targets = targets_of(workload)
    return sum(attainment(run(PrefixAware(), arm, workload, rate_rps, seed), targets) for seed in _SEEDS) / len(_SEEDS)


def of_auto(workload: Workload, rate_rps: float) -> float:
    targets = targets_of(workload)
    found = [
        run(SloAware(targets, Random(seed).random), SEPARATE, workload, rate_rps, seed, targets.itl_s)
        for seed in _SEEDS
    ]
    return sum(attainment(each, targets) for each in found) / len(found)


@pytest.mark.parametrize(
    ("workload", "rate_rps", "better"),
    [
        pytest.param(Workload(512, 64), 2.6, SEPARATE, marks=pytest.mark.slow),
        (Workload(64, 16), 18.0, SEPARATE),
        pytest.param(Workload(512, 128), 1.1, SEPARATE, marks=pytest.mark.slow),
        (Workload(2048, 16), 0.34, COLOCATED),
    ],
)
def test_auto_keeps_about_as_many_targets_as_the_better_fixed_arrangement(
    workload: Workload, rate_rps: float, better: Arm
) -> None:
    worse = COLOCATED if better is SEPARATE else SEPARATE
    best, worst = of_static(better, workload, rate_rps), of_static(worse, workload, rate_rps)
    assert best >= worst, "the point no longer shows what it is here for"
    assert of_auto(workload, rate_rps) >= best - 0.1


def test_at_the_reference_point_a_fifth_more_requests_keep_their_targets() -> None:
    workload, rate_rps = Workload(512, 64), 3.0
    best = max(of_static(arm, workload, rate_rps) for arm in (SEPARATE, COLOCATED))
    assert of_auto(workload, rate_rps) >= 1.2 * best


@pytest.mark.parametrize(
    ("workload", "rate_rps", "better"),
    [
        (Workload(2048, 16), 0.68, COLOCATED),
        pytest.param(Workload(512, 128), 2.2, SEPARATE, marks=pytest.mark.slow),
        pytest.param(Workload(64, 128), 6.5, COLOCATED, marks=pytest.mark.slow),
    ],
)
def test_where_one_arrangement_is_far_better_auto_learns_it(workload: Workload, rate_rps: float, better: Arm) -> None:
    targets, num_requests = targets_of(workload), 2 * _NUM_TO_LEARN

    def kept(policy: Policy, arm: Arm, target_s: float = 0.0) -> float:
        found = run(policy, arm, workload, rate_rps, 1, target_s, num_requests)
        return attainment(found[_NUM_TO_LEARN:], targets)

    worse = COLOCATED if better is SEPARATE else SEPARATE
    best = kept(PrefixAware(), better)
    assert best >= kept(PrefixAware(), worse) + 0.3, "the point no longer shows what it is here for"
    assert kept(SloAware(targets, Random(1).random), SEPARATE, targets.itl_s) >= best - 0.1


def test_workers_of_both_roles_keep_about_as_many_targets_as_the_better_fixed_arrangement() -> None:
    workload, rate_rps, both = Workload(2048, 16), 0.68, (Role.BOTH, Role.BOTH)
    targets, everyone = targets_of(workload), ((0, 1), (0, 1))
    auto = SloAware(targets, Random(1).random)
    found = run(auto, everyone, workload, rate_rps, 1, targets.itl_s, 2 * _NUM_TO_LEARN, roles=both)
    best = run(PrefixAware(), COLOCATED, workload, rate_rps, 1, num_requests=2 * _NUM_TO_LEARN)
    assert attainment(found[_NUM_TO_LEARN:], targets) >= attainment(best[_NUM_TO_LEARN:], targets) - 0.1


def test_two_workers_of_both_roles_are_never_worse_than_fixed_roles_that_are_nearly_busy() -> None:
    """One request that is placed wrongly at first would delay all later ones."""
    workload, rate_rps, everyone = Workload(512, 128), 3.1, ((0, 1), (0, 1))
    targets, num_requests, both = targets_of(workload), 100, (Role.BOTH, Role.BOTH)
    auto = SloAware(targets, Random(1).random)
    found = run(auto, everyone, workload, rate_rps, 1, targets.itl_s, num_requests, both)
    best = run(PrefixAware(), SEPARATE, workload, rate_rps, 1, num_requests=num_requests)
    assert attainment(best, targets) >= 0.3, "the point no longer shows what it is here for"
    assert attainment(found, targets) >= attainment(best, targets) - 0.02


@pytest.mark.parametrize(
    ("workload", "rate_rps", "arm"),
    [
        pytest.param(Workload(512, 128), 8.7, ((0, 2, 4, 6), (1, 3, 5, 7)), marks=pytest.mark.slow),
        pytest.param(Workload(64, 128), 26.0, ((), tuple(range(8))), marks=pytest.mark.slow),
    ],
)
def test_eight_workers_of_both_roles_learn_before_many_requests_are_late(
    workload: Workload, rate_rps: float, arm: Arm
) -> None:
    targets, everyone, num_requests = targets_of(workload), tuple(range(8)), 160
    auto, roles = SloAware(targets, Random(1).random), [Role.BOTH] * 8
    found = run(auto, (everyone, everyone), workload, rate_rps, 1, targets.itl_s, num_requests, roles)
    best = run(PrefixAware(), arm, workload, rate_rps, 1, num_requests=num_requests, roles=[Role.DECODE] * 8)
    assert attainment(best, targets) >= 0.9, "the point no longer shows what it is here for"
    assert attainment(found, targets) >= attainment(best, targets) - 0.05


def test_sixteen_workers_of_both_roles_keep_their_targets_while_the_first_sequences_run() -> None:
    """A moment without prompts at a worker that computes them is no reason to decode there: more prompts come."""
    workload, rate_rps, everyone, roles = Workload(512, 128), 19.0, tuple(range(16)), [Role.BOTH] * 16
    targets, auto = targets_of(workload), SloAware(targets_of(workload), Random(1).random)
    found = run(auto, (everyone, everyone), workload, rate_rps, 14, targets.itl_s, 160, roles)
    assert attainment(found, targets) >= 0.95
