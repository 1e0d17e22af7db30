"""What metrics add to a worker's steps, in pairs: `OMP_NUM_THREADS=1 python -m benchmarks.engine.observed`.

One step loop computes runs of steps, in turns with a worker's metrics and without. Time is the step thread's own
processor time of the whole step, so that other processes do not count. What runs beside the steps, on the event loop
and on the thread of a scrape, is measured alone, and its share is that of one core.
"""

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.engine.parties import MODEL_CORE
from benchmarks.engine.shapes import MODELS, Load, ModelShape
from benchmarks.engine.steps import build, filled
from benchmarks.router.figures import Interval, interval
from cluster.clock import MonotonicClock
from cluster.observe.telemetry import Telemetry
from cluster.service_times import TimedStep
from engine.build import Engine
from engine.scheduling.commands import Command, Event, Inspect, Inspected
from engine.scheduling.step import StepPlan
from engine.steps.step_loop import StepLoop, StepTime
from engine.timing.service_time_fit import ServiceTimeFit, step_work
from engine.timing.steps_at_load import time_steps
from worker.watch import WorkerMetrics

_TINY = ModelShape("tiny", "llama", 64, 128, 4, 4, 2, 49152)  # a step of it is short, so its metrics weigh most
_RUN, _RUNS = 8, 96  # steps of a run, and runs; every second one has metrics
_TIMEOUT_S = 300.0
_SCRAPE_S, _HEARTBEAT_S = 5.0, 1.0


async def measure(built: Engine, load: Load, num_runs: int = _RUNS) -> tuple[Interval, Interval]:
    """Return the seconds of a step without metrics, and how much longer it takes with them, as a share."""
    fit, metrics, is_over = ServiceTimeFit(), WorkerMetrics(Telemetry.of_worker()), threading.Event()
    fit.start(await asyncio.to_thread(time_steps, built, built.runner, load.sequences))
    seconds: list[float] = []
    last_s = 0.0

    def on_timed(plan: StepPlan, taken: StepTime) -> None:
        nonlocal last_s
        work = step_work(plan)
        assert work is not None
        fit.add(TimedStep(work, taken.seconds))
        if _has_metrics(len(seconds)):
            metrics.record_step(work, taken)
        now_s = time.thread_time()
        seconds.append(now_s - last_s)
        last_s = now_s
        if len(seconds) == _RUN * num_runs:
            is_over.set()

    def stumble(error: Exception) -> None:
        raise SystemExit(f"a step failed: {error}")

    loop: StepLoop[Command, Event] = StepLoop(
        filled(built, load, fit, _RUN * num_runs + 16),
        built.runner,
        MonotonicClock(),
        lambda events: None,
        on_error=stumble,
        on_fatal=stumble,
        on_timed=on_timed,
    )
    loop.start()
    await asyncio.to_thread(is_over.wait, _TIMEOUT_S)
    await asyncio.to_thread(loop.stop)
    runs = [median(seconds[start : start + _RUN]) for start in range(0, _RUN * num_runs, _RUN)][2:]  # the first warm up
    without, with_metrics = runs[::2], runs[1::2]
    return interval(without), interval([a / b - 1 for a, b in zip(with_metrics, without, strict=True)])


def _has_metrics(step: int) -> bool:
    return step // _RUN % 2 == 1


def beside_steps(built: Engine, load: Load) -> dict[str, tuple[float, float]]:
    """Return the CPU in microseconds, and the period in seconds, of what runs beside the steps."""
    scheduler = filled(built, load, ServiceTimeFit(), 16)
    (inspected,) = scheduler.apply(Inspect(1), 0.0)
    assert isinstance(inspected, Inspected)
    telemetry = Telemetry.of_worker()
    metrics = WorkerMetrics(telemetry)
    return {
        "the figures of a heartbeat": (_cpu_us(lambda: metrics.publish(inspected)), _HEARTBEAT_S),
        "a scrape": (_cpu_us(telemetry.render), _SCRAPE_S),
    }


def _cpu_us(call: Callable[[], object], times: int = 200) -> float:
    taken_us = []
    for _ in range(times):
        began_s = time.thread_time()
        call()
        taken_us.append(1e6 * (time.thread_time() - began_s))
    return median(taken_us)


def main() -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {MODEL_CORE})
    loads = {_TINY.name: Load(64, 256, 64), MODELS[0].name: Load(8, 256, 64)}
    with tempfile.TemporaryDirectory() as folder:
        engines = {shape.name: build(str(shape.save(Path(folder) / shape.name))) for shape in (_TINY, MODELS[0])}
    print("| a step | CPU without metrics, ms | with them, more |", "|---|---|---|", sep="\n")
    for name, built in engines.items():
        (step_s, step_low_s, step_high_s), (more, low, high) = asyncio.run(measure(built, loads[name]))
        step = f"{1e3 * step_s:.2f} ({1e3 * step_low_s:.2f} to {1e3 * step_high_s:.2f})"
        print(f"| {name}, {loads[name].sequences} sequences | {step} | {more:+.2%} ({low:+.2%} to {high:+.2%}) |")
    print("", "| beside the steps | CPU, us | how often | share of a core |", "|---|---|---|---|", sep="\n")
    for what, (cpu_us, period_s) in beside_steps(engines[_TINY.name], loads[_TINY.name]).items():
        print(f"| {what} | {cpu_us:.0f} | every {period_s:g} s | {cpu_us / period_s / 1e6:.3%} |")


if __name__ == "__main__":
    main()
