"""Compares the arms: which one loses where, and which goals are met. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.placement.figures.intervals import Share, difference
from benchmarks.placement.figures.log import PointResult
from benchmarks.placement.plan import ENOUGH_FOR_P99, REFERENCE, REFERENCE_RPS, FixedRate, Point

SEPARATE, COLOCATED, AUTO, VLLM = "1+1", "colocated x 2", "auto", "vLLM"
STATIC = (SEPARATE, COLOCATED)
GOODPUT_GOAL = 1.2
TTFT_GOAL_S, ITL_GOAL_S = 1.3, 0.06


@dataclass(frozen=True, slots=True)
class Comparison:
    """The SLO attainment of one arm against another one at one point."""

    point: str
    arm: str
    other: str
    mine: Share
    its: Share

    @property
    def interval(self) -> tuple[float, float]:
        return difference(self.mine, self.its)

    @property
    def is_behind(self) -> bool:
        return self.mine.value < self.its.value

    @property
    def is_lost(self) -> bool:
        """Behind by more than the interval."""
        return self.interval[1] < 0


@dataclass(frozen=True, slots=True)
class Goal:
    text: str
    is_met: bool | None  # None: not measured
    found: str


def better_static(result: PointResult) -> str:
    """Return the static arm with the higher SLO attainment, at equal ones the one with the lower median TTFT."""

    def rank(name: str) -> tuple[float, float]:
        arm = result.arms[name]
        return -arm.attainment(result.slo).value, arm.percentiles_s("ttft_s").get("p50", float("inf"))

    return min((name for name in STATIC if name in result.arms), key=rank)


def compared(result: PointResult, arm: str, other: str) -> Comparison:
    mine, its = (result.arms[name].attainment(result.slo) for name in (arm, other))
    return Comparison(result.point, arm, other, mine, its)


def auto_against_better(results: Sequence[PointResult]) -> list[Comparison]:
    """Return one comparison per point that `auto` was measured at."""
    return [compared(each, AUTO, better_static(each)) for each in results if AUTO in each.arms]


def static_arms(results: Sequence[PointResult]) -> list[Comparison]:
    """Return one comparison per point: the static arm that is behind, against the other one."""
    both = [each for each in results if set(STATIC) <= set(each.arms)]
    found = []
    for result in both:
        better = better_static(result)
        worse = next(name for name in STATIC if name != better)
        found.append(compared(result, worse, better))
    return found


def goodput_rps(results: Sequence[PointResult], arm: str) -> float:
    """Return all requests within the SLO per second of planned arrivals, over these points."""
    arms = [(result.slo, result.arms[arm]) for result in results]
    return sum(one.attainment(slo).met for slo, one in arms) / sum(one.arrivals_s for _, one in arms)


def goals(results: Sequence[PointResult]) -> list[Goal]:
    return [_attainment_goal(results), _goodput_goal(results), *_reference_goals(results)]


def _attainment_goal(results: Sequence[PointResult]) -> Goal:
    text = "`auto`'s SLO attainment is at least the better static arm's at every point, within the interval"
    found = auto_against_better(results)
    lost = sum(each.is_lost for each in found)
    return Goal(text, lost == 0, f"{lost} of {len(found)} points lost") if found else Goal(text, None, "")


def _goodput_goal(results: Sequence[PointResult]) -> Goal:
    text = f"`auto`'s goodput over all points is at least {GOODPUT_GOAL:g} times the worse static arm's"
    all_arms = [each for each in results if {AUTO, *STATIC} <= set(each.arms)]
    if not all_arms:
        return Goal(text, None, "")
    worse = min(STATIC, key=lambda arm: goodput_rps(all_arms, arm))
    ours, its = goodput_rps(all_arms, AUTO), goodput_rps(all_arms, worse)
    return Goal(text, ours >= GOODPUT_GOAL * its, f"{ours:.2f}/s against {its:.2f}/s of {worse}")


def _reference_goals(results: Sequence[PointResult]) -> list[Goal]:
    name = Point(REFERENCE, FixedRate(REFERENCE_RPS), ENOUGH_FOR_P99).name
    arm = next((each.arms[AUTO] for each in results if each.point == name and AUTO in each.arms), None)
    found_s = {
        "TTFT": arm.percentiles_s("ttft_s").get("p99") if arm is not None else None,
        "ITL": arm.itl_s.get("p99") if arm is not None else None,
    }
    is_enough = arm is not None and arm.num_requests >= ENOUGH_FOR_P99
    goals = []
    for what, limit_s in (("TTFT", TTFT_GOAL_S), ("ITL", ITL_GOAL_S)):
        p99_s = found_s[what]
        found = "" if p99_s is None else f"{1e3 * p99_s:,.0f} ms"
        if p99_s is not None and not is_enough:
            found += f", of fewer than {ENOUGH_FOR_P99} requests"
        is_met = p99_s <= limit_s if p99_s is not None and is_enough else None
        goals.append(Goal(f"`auto` at {name}: {what} p99 at most {1e3 * limit_s:,.0f} ms", is_met, found))
    return goals
