"""The watch over a worker's step thread: inspections, health and canaries, built from the worker's settings."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.errors import Unhealthy
from cluster.observe.stand_still import StuckLimits
from cluster.settings.config import WorkerConfig
from engine.scheduling import commands
from engine.steps.step_loop import StepLoop
from worker.canary import Canaries, CanaryGeneration
from worker.health import WorkerHealth
from worker.life import WorkerLife
from worker.service import Inspections

_CANARY_FACTOR = 5.0  # times the timeout of a step: the first step may compile kernels


@dataclass(frozen=True, slots=True)
class WorkerWatch:
    inspections: Inspections
    health: WorkerHealth
    canaries: Canaries


def canary_timeout_s(config: WorkerConfig) -> float:
    return _CANARY_FACTOR * config.step_timeout_s


def watch_over(
    steps: StepLoop[commands.Command, commands.Event],
    runner: CanaryGeneration,
    *,
    life: WorkerLife,
    clock: Clock,
    end_work: Callable[[Unhealthy], None],
    owners: Callable[[], Iterable[str]],
) -> WorkerWatch:
    """`runner` runs the canaries. `end_work`: as WorkerHealth's. `owners`: as Inspections'."""
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
        runner,
        interval_s=config.canary_interval_s,
        timeout_s=canary_timeout_s(config),
        retry_s=min(config.canary_interval_s, config.stuck_exit_s / 4),
        progress=lambda: steps.progress,
        health=health,
        clock=clock,
        telemetry=life.telemetry,
    )
    return WorkerWatch(Inspections(steps, owners), health, canaries)
