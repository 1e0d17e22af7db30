"""Who looks at a worker's step thread: inspections ask it, its health is watched, canaries try it.

Made together from the worker's settings, the same for both pools. Owns nothing of what they find.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from cluster.canary import Canaries, Flight
from cluster.clock import Clock
from cluster.errors import Unhealthy
from cluster.messages import Inspect
from cluster.observe.watchdog import StuckLimits
from cluster.settings.config import WorkerConfig
from cluster.worker_health import StepThread, WorkerHealth
from cluster.worker_life import WorkerLife
from cluster.worker_service import Inspections

_CANARY_FACTOR = 5.0  # of a step's limit: the first one may compile


class AskedStepThread(StepThread, Protocol):
    def post(self, command: Inspect, /) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerWatch:
    inspections: Inspections
    health: WorkerHealth
    canaries: Canaries


def canary_timeout_s(config: WorkerConfig) -> float:
    return _CANARY_FACTOR * config.step_timeout_s


def watch_over(
    steps: AskedStepThread,
    flight: Flight,
    *,
    life: WorkerLife,
    clock: Clock,
    end_work: Callable[[Unhealthy], None],
    owners: Callable[[], Iterable[str]],
) -> WorkerWatch:
    """`flight`: this worker's way of running canaries. `end_work`: as WorkerHealth's. `owners`: as Inspections'."""
    config = life.config
    health = WorkerHealth(
        server=life.server,
        steps=steps,
        limits=StuckLimits(config.step_timeout_s, config.stuck_exit_s),
        clock=clock,
        telemetry=life.telemetry,
        end_work=end_work,
    )
    canaries = Canaries(
        flight,
        interval_s=config.canary_interval_s,
        timeout_s=canary_timeout_s(config),
        retry_s=min(config.canary_interval_s, config.stuck_exit_s / 4),
        progress=lambda: steps.progress,
        health=health,
        clock=clock,
        telemetry=life.telemetry,
    )
    return WorkerWatch(Inspections(steps.post, owners), health, canaries)
