"""`make bench-step-loop`: measure a decode step of a worker's step thread, part by part.

The page states the share of a step that is neither its forward nor its draw. `make bench-engine` compares the parts
with the step that clients see: `python -m benchmarks.engine.steps --model FOLDER` reads a load from each line of stdin
and answers with one line, the median seconds of each part as JSON.

The scheduler, the step loop and the runner are those of a worker, and events go to an event loop on another thread as
in a worker. Sequences join as if they had been handed over in the middle of their output. Time is the step thread's own
processor time, so that other processes do not count.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.engine.parties import MODEL_CORE
from benchmarks.engine.shapes import MODELS, Load, prompt
from benchmarks.machine import about
from cluster.clock import MonotonicClock
from cluster.messages import DecodeJob, MemberId, Sampling, SequenceStart, TokenStops
from cluster.protocol.hashing import keyed_chains
from cluster.request_size import tail_length
from cluster.service_times import TimedStep
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.commands import AdmitImported, Command, Event, Reserve, Reserved
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import StepPlan
from engine.steps import runner as step_runner
from engine.steps.step_loop import StepLoop, StepTime
from engine.timing.service_time_fit import ServiceTimeFit, step_work
from engine.timing.steps_at_load import time_steps

_RESULTS = Path(__file__).parents[1] / "results"
_POINTS = ((MODELS[0], Load(64, 256, 64), 0.04), (MODELS[1], Load(16, 256, 64), 0.02))  # with the goal
_ROUNDS = 3
PARTS = ("forward", "draw", "plan", "pack", "runner", "complete", "events", "timing", "loop")
_ROUTER = MemberId("router", "1")
_WARM_UP, _STEPS, _STEPS_OF_A_LOAD = 8, 96, 15
_TIMEOUT_S = 300.0


def build(folder: str, kv_cache_memory: str = "2GiB", max_model_len: int = 2048) -> Engine:
    settings = EngineSettings(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_memory=kv_cache_memory,
        max_model_len=max_model_len,
        num_threads=1,
    )
    return build_engine(settings)


class Parts:
    """The processor time of the step thread by part. A part's own time excludes the parts that it calls."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._seconds: dict[str, float] = {}
        self._open: list[str] = ["loop"]
        self._last_s = 0.0

    def timed(self, name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self._switch()
            self._open.append(name)
            try:
                return part(*arguments, **keywords)
            finally:
                self._switch()
                self._open.pop()

        return call

    def end_step(self) -> None:
        """Begin the next step."""
        self._switch()
        self.steps.append(self._seconds)
        self._seconds = {}

    def _switch(self) -> None:
        now_s = time.thread_time()
        self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now_s - self._last_s
        self._last_s = now_s


@contextmanager
def _clocks(built: Engine, scheduler: SequenceScheduler, parts: Parts) -> Iterator[None]:
    """Wrap the parts of the step thread with clocks."""
    for name, part in (("apply", "plan"), ("reap", "plan"), ("plan", "plan"), ("complete", "complete")):
        setattr(scheduler, name, parts.timed(part, getattr(scheduler, name)))
    module: Any = step_runner
    runner: Any = built.runner
    pack, draws, forward = module.pack, module.StepDraws, runner.forward

    def drawing(*arguments: Any) -> Any:
        started = parts.timed("draw", draws)(*arguments)
        started.read = parts.timed("draw", started.read)
        return started

    module.pack, module.StepDraws = parts.timed("pack", pack), drawing
    runner.forward, runner.run = parts.timed("forward", forward), parts.timed("runner", runner.run)
    try:
        yield
    finally:
        module.pack, module.StepDraws, runner.forward = pack, draws, forward
        del runner.run


async def measure(built: Engine, load: Load, num_steps: int = _STEPS) -> list[dict[str, float]]:
    """Return the seconds of each step by part."""
    fit, parts, is_over = ServiceTimeFit(), Parts(), threading.Event()
    fit.start(await asyncio.to_thread(time_steps, built, built.runner, load.sequences))
    scheduler = filled(built, load, fit, _WARM_UP + num_steps + 16)
    event_loop = asyncio.get_running_loop()

    def on_timed(plan: StepPlan, time: StepTime) -> None:
        work = step_work(plan)
        assert work is not None
        fit.add(TimedStep(work, time.seconds))

    def end_step(plan: StepPlan, time: StepTime) -> None:
        parts.timed("timing", on_timed)(plan, time)
        parts.end_step()
        if len(parts.steps) == _WARM_UP + num_steps:
            is_over.set()

    def emit(events: tuple[Event, ...]) -> None:
        event_loop.call_soon_threadsafe(len, events)

    def stumble(error: Exception) -> None:
        raise SystemExit(f"a step failed: {error}")

    with _clocks(built, scheduler, parts):
        loop: StepLoop[Command, Event] = StepLoop(
            scheduler,
            built.runner,
            MonotonicClock(),
            parts.timed("events", emit),
            on_error=stumble,
            on_fatal=stumble,
            on_timed=end_step,
        )
        loop.start()
        await asyncio.to_thread(is_over.wait, _TIMEOUT_S)
        await asyncio.to_thread(loop.stop)
    return [{part: step.get(part, 0.0) for part in PARTS} for step in parts.steps[_WARM_UP : _WARM_UP + num_steps]]


def filled(built: Engine, load: Load, fit: ServiceTimeFit, num_tokens: int) -> SequenceScheduler:
    """Return a worker's scheduler with every sequence, before its first step."""
    size, context = built.pool.layout.block_size, load.tokens_in + load.tokens_out // 2
    limits = SchedulerLimits(
        num_blocks=built.pool.num_blocks,
        block_size=size,
        max_model_len=built.model_info.max_model_len,
        max_num_seqs=load.sequences,
        max_prefill_tokens=512,
        max_queue=load.sequences,
        watermark=0.01,
    )
    scheduler = SequenceScheduler(
        limits,
        new_chain=keyed_chains(b"k" * 32, size),
        lengths=LengthPredictor(),
        times=lambda: fit.times,
    )
    for number in range(load.sequences):
        start = SequenceStart(number, seed=number)
        tokens = tuple(prompt(Load(1, context, 1), number))
        stops = TokenStops(num_tokens)
        job = DecodeJob("bench", 0, _ROUTER, tokens, Sampling(), stops, (start,), None, 1e6)
        needed = limits.num_needed(context, 1)
        (reserved,) = scheduler.apply(Reserve(number, needed, (), job, is_announced=True), 0.0)
        assert isinstance(reserved, Reserved), reserved
        num_tails = 1 if tail_length(context, size) else 0
        sealed, tail = reserved.block_ids[: needed - num_tails], reserved.block_ids[needed - num_tails :]
        scheduler.apply(AdmitImported(number, job, sealed, tail, (7,)), 0.0)
    return scheduler


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each part."""
    return {part: median(step[part] for step in steps) for part in PARTS}


def share(step: Mapping[str, float]) -> float:
    """Return the part of a step that is neither forward nor draw."""
    return 1 - (step["forward"] + step["draw"]) / sum(step.values())


def as_markdown(points: Mapping[str, Sequence[Mapping[str, float]]], goals: Mapping[str, float]) -> str:
    machine = about()
    names = list(points)
    lines = [
        "# Step loop",
        "",
        f"{machine['processor']}, {machine['kernel']}; torch {machine['torch']}; commit {machine['commit']}.",
        "Processor time of the step thread in a decode step, compiled forward on one thread (it has no other), random",
        f"weights in bfloat16: medians of {_ROUNDS} rounds of {_STEPS} steps, with the 5th and the 95th percentile.",
        "",
        "| ms | " + " | ".join(names) + " |",
        "|" + "---|" * (len(names) + 1),
    ]
    for part in PARTS:
        cells = [_interval([1e3 * step[part] for step in points[name]], 3) for name in names]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    shares = [_interval([100 * share(step) for step in points[name]], 2) for name in names]
    lines.append("| neither forward nor draw, % | " + " | ".join(shares) + " |")
    lines.append("| goal, % | " + " | ".join(f"{100 * goals[name]:g}" for name in names) + " |")
    return "\n".join([*lines, ""])


def _interval(values: Sequence[float], digits: int) -> str:
    twentieths = quantiles(values, n=20)
    return f"{median(values):.{digits}f} [{twentieths[0]:.{digits}f}, {twentieths[-1]:.{digits}f}]"


def _answer_loads(built: Engine) -> None:
    print(json.dumps(built.report), flush=True)
    for line in sys.stdin:
        steps = asyncio.run(measure(built, Load(**json.loads(line)), _STEPS_OF_A_LOAD))
        print(json.dumps(medians(steps)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-step-loop")
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    parser.add_argument("--model", default="", help="answer the loads on stdin for the model in this folder instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {MODEL_CORE})
    if arguments.model:
        _answer_loads(build(arguments.model))
        return
    points: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        built = [build(str(model.save(Path(directory) / model.name))) for model, _, _ in _POINTS]
    for _ in range(_ROUNDS):
        for engine, (model, load, _) in zip(built, _POINTS, strict=True):
            points.setdefault(f"{model.name}, {load.sequences}", []).extend(asyncio.run(measure(engine, load)))
    goals = {f"{model.name}, {load.sequences}": goal for model, load, goal in _POINTS}
    text = as_markdown(points, goals)
    print(text)
    if arguments.write:
        (_RESULTS / "step_loop.md").write_text(text)
        (_RESULTS / "step_loop.json").write_text(json.dumps({"about": about(), "seconds": points}, indent=1) + "\n")


if __name__ == "__main__":
    main()
