"""The points of the benchmark and which of them are left to do. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from benchmarks.placement.figures.log import PointResult
from benchmarks.placement.workload import Workload

PROMPT_TOKENS = (64, 512, 2_048)
OUTPUT_TOKENS = (16, 128)
SHARES = (0.3, 0.6, 0.9)
MAIN_SHARE = 0.6  # a load that a cluster is planned for; at 0.9 one more drawn burst moves every p99
CONVERSATIONS = Workload(256, 64, num_turns=4)
REFERENCE = Workload(512, 64)
REFERENCE_RPS = 3.0

ENOUGH_FOR_P99 = 300
_ENOUGH_FOR_P90 = 100
_MOST_PER_TURN = 100  # requests that one arm gets before the next arm's turn
_LEAST_TURNS = 2


@dataclass(frozen=True, slots=True)
class ShareOfCapacity:
    """A rate of arrivals as a share of the better static arm's capacity."""

    share: float

    def rate_rps(self, capacity_rps: float) -> float:
        return self.share * capacity_rps

    def __str__(self) -> str:
        return f"{self.share:g} of capacity"


@dataclass(frozen=True, slots=True)
class FixedRate:
    per_s: float

    def rate_rps(self, _capacity_rps: float) -> float:
        return self.per_s

    def __str__(self) -> str:
        return f"{self.per_s:g}/s"


@dataclass(frozen=True, slots=True)
class Point:
    """One workload at one rate, measured with the same arrivals on every arm."""

    workload: Workload
    offered: ShareOfCapacity | FixedRate
    num_requests: int  # per arm

    @property
    def name(self) -> str:
        return f"{self.workload.name} at {self.offered}"


def full_plan() -> list[Point]:
    """Return all points, those of one workload together, and the reference point first."""
    points = [Point(REFERENCE, FixedRate(REFERENCE_RPS), ENOUGH_FOR_P99)]
    for workload in (Workload(prompt, output) for prompt in PROMPT_TOKENS for output in OUTPUT_TOKENS):
        for share in SHARES:
            count = ENOUGH_FOR_P99 if share == MAIN_SHARE else _ENOUGH_FOR_P90
            points.append(Point(workload, ShareOfCapacity(share), count))
    return points + [Point(CONVERSATIONS, ShareOfCapacity(share), _ENOUGH_FOR_P90) for share in SHARES]


def quick_plan() -> list[Point]:
    """Return one small point."""
    return [Point(Workload(64, 8), ShareOfCapacity(0.5), 12)]


def selected(points: Sequence[Point], part: str, num_requests: int | None) -> list[Point]:
    """Return the points whose name contains `part`, with another number of requests if one is given."""
    chosen = [point for point in points if part in point.name]
    return chosen if num_requests is None else [replace(point, num_requests=num_requests) for point in chosen]


def left_to_do(points: Sequence[Point], log: Iterable[PointResult], code: str, arms: Collection[str]) -> list[Point]:
    """Return the points that the log lacks for this code, with all these arms and at least as many requests."""
    done = [result for result in log if result.code == code and set(arms) <= set(result.arms)]
    return [
        point
        for point in points
        if not any(result.point == point.name and result.num_requests >= point.num_requests for result in done)
    ]


def turns(num_requests: int) -> list[int]:
    """Return the number of requests of each of an arm's turns: about equal, and at least two, so that every arm meets
    what else the machine does at several times."""
    count = max(_LEAST_TURNS, ceil(num_requests / _MOST_PER_TURN))
    return [num_requests * (i + 1) // count - num_requests * i // count for i in range(count)]


def order(arms: Sequence[str], turn: int) -> list[str]:
    """Return the arms in the order of this turn. Each turn starts with the next arm."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]
