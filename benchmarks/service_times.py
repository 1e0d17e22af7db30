"""Measure how well a worker's models of its own speed predict its steps.

    python -m benchmarks.service_times [--write]

For the demo model and the 135M shape, on one thread: the steps that a worker times at load, then rounds of prefill
chunks, decode steps and mixed steps of many sizes in random order. Each step is predicted before the fit receives it.
Every step is timed twice: by the wall clock, and by the CPU time of the thread that computes, which other processes
disturb less. The samples of each finished round go to benchmarks/results/service_times.json with --write, and a
restarted command continues after them if the commit is the same.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.shapes import MODELS
from benchmarks.machine import about
from cluster.messages import Sampling
from cluster.request_size import blocks_for
from cluster.service_times import StepWork, TimedStep
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.timing.service_time_fit import ServiceTimeFit, step_work
from engine.timing.steps_at_load import time_steps

_DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
_RESULTS = Path(__file__).parent / "results"
_NEW, _CONTEXTS = (16, 32, 64, 128, 256, 512), (0, 128, 512, 1024, 2048)
_BATCHES, _LENGTHS = (1, 2, 4, 8, 16, 32, 64), (16, 256, 700)
_MIXED_NEW, _MIXED_BATCHES = (16, 64, 256), (1, 8, 32)
_MIXED_LENGTH, _MAX_MODEL_LEN = 256, 2560
_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step: its work and its seconds by each clock."""

    work: StepWork
    seconds: dict[str, float]

    @property
    def kind(self) -> str:
        return "mixed" if self.work.is_mixed else "prefill" if self.work.num_new else "decode"


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples of one model: the steps at load, and the rounds."""

    at_load: list[TimedStep]
    rounds: list[list[Sampled]]


def measure(folder: Path, samples: Samples, num_rounds: int) -> Iterator[Samples]:
    """Yield the samples with one more round, until there are `num_rounds`."""
    has_weights = (folder / "model.safetensors").exists()
    settings = EngineSettings(
        model=str(folder),
        load_format="auto" if has_weights else "dummy",
        dtype="bfloat16",
        device="cpu",
        kv_cache_memory="1GiB",
        max_model_len=1024 if has_weights else _MAX_MODEL_LEN,
        num_threads=1,
    )
    engine = build_engine(settings)
    engine.pool.raw.fill_(0)  # pages that were never touched would be counted into the first round
    try:
        if not samples.at_load:
            samples.at_load.extend(time_steps(engine, engine.runner, max(_BATCHES)))
        while len(samples.rounds) < num_rounds:
            plans = list(_plans(engine))
            random.Random(len(samples.rounds)).shuffle(plans)
            samples.rounds.append([_timed(engine, plan) for plan in plans])
            yield samples
    finally:
        engine.pool.close()


def _timed(engine: Engine, plan: StepPlan) -> Sampled:
    before = {clock: read() for clock, read in _CLOCKS.items()}
    engine.runner.run(plan)
    seconds = {clock: read() - before[clock] for clock, read in _CLOCKS.items()}
    work = step_work(plan)
    assert work is not None
    return Sampled(work, seconds)


def _plans(engine: Engine) -> Iterator[StepPlan]:
    longest = engine.model_info.max_model_len
    for num_new, context in product(_NEW, _CONTEXTS):
        if num_new + context <= longest:
            yield StepPlan((_chunk(engine, 0, context, num_new),))
    for batch, length in product(_BATCHES, _LENGTHS):
        yield StepPlan(_decodes(engine, batch, length))
    for num_new, batch in product(_MIXED_NEW, _MIXED_BATCHES):
        yield StepPlan((*_decodes(engine, batch, _MIXED_LENGTH), _chunk(engine, batch, 0, num_new)))


def _decodes(engine: Engine, batch: int, length: int) -> tuple[Chunk, ...]:
    return tuple(_chunk(engine, index, length - 1, 1) for index in range(batch))


def _chunk(engine: Engine, index: int, start: int, num_tokens: int) -> Chunk:
    """Return a chunk of a sequence with blocks of its own."""
    pool, end = engine.pool, start + num_tokens
    width = blocks_for(end, pool.layout.block_size)
    blocks = tuple((index * width + place) % pool.num_blocks for place in range(width))
    return Chunk(index, tuple(range(10, 10 + num_tokens)), start, blocks, (Sample(1, end, Sampling()),))


def errors(samples: Samples, clock: str) -> dict[tuple[str, str], list[float]]:
    """Return |predicted - measured| / measured of every step, by (kind, when): "load" are predictions from the steps at
    load alone, "first" those of the first round, "later" those after it."""
    at_load, fit = ServiceTimeFit(), ServiceTimeFit()
    for one in (at_load, fit):
        one.start(samples.at_load)
    found: dict[tuple[str, str], list[float]] = {}
    for number, steps in enumerate(samples.rounds):
        for step in steps:
            measured_s = step.seconds[clock]
            for when, one in (("load", at_load), ("later" if number else "first", fit)):
                assert one.times is not None
                error = abs(one.times.seconds(step.work) - measured_s) / measured_s
                found.setdefault((step.kind, when), []).append(error)
            fit.add(TimedStep(step.work, measured_s))
    return found


def _table(results: dict[str, Samples], machine: dict[str, str]) -> str:
    rounds = min(len(samples.rounds) for samples in results.values())
    lines = [
        "# Service times: predicted against measured",
        "",
        f"`python -m benchmarks.service_times --write`, {machine['date']}, commit {machine['commit']},",
        f"{machine['processor']}, torch {machine['torch']}, one thread, bfloat16; load average {machine['load']}.",
        "Relative errors of the prediction that a worker would have sent before the step, median / p90, over",
        f"{rounds} rounds: prefill chunks of 16 to 512 tokens with contexts up to 2,048 (demo model: 512), decode",
        "steps of 1 to 64 sequences of up to 700 tokens, and mixed steps, all in random order. *At load*: from the",
        "steps timed at load alone. *First round*, *later*: from these and every step before. Goal: median 10 %.",
        "",
        "`cpu` is the CPU time of the computing thread, `wall` what a client waits: with more running threads than",
        "cores it has the scheduler's pauses in it, which nothing can predict.",
    ]
    for model, samples in results.items():
        lines += ["", f"## {model}", "", "| clock | steps | at load | first round | later |", "|---|---|---|---|---|"]
        for clock in _CLOCKS:
            found = errors(samples, clock)
            for kind in ("prefill", "decode", "mixed"):
                cells = [_cell(found.get((kind, when), [])) for when in ("load", "first", "later")]
                lines.append(f"| {clock} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{median(values):.0%} / {sorted(values)[int(0.9 * (len(values) - 1))]:.0%}"


def _stored(commit: str) -> dict[str, Samples]:
    """Return the samples of an earlier run at this commit."""
    path = _RESULTS / "service_times.json"
    kept = json.loads(path.read_text()) if path.exists() else {"about": {}, "models": {}}
    return {name: _read(model) for name, model in kept["models"].items() if kept["about"].get("commit") == commit}


def _read(model: dict[str, Any]) -> Samples:
    at_load = [TimedStep(StepWork(*work), seconds) for work, seconds in model["at_load"]]
    rounds = [
        [Sampled(StepWork(*work), dict(zip(_CLOCKS, times, strict=True))) for work, *times in steps]
        for steps in model["rounds"]
    ]
    return Samples(at_load, rounds)


def _write(results: dict[str, Samples], machine: dict[str, str]) -> None:
    def numbers(work: StepWork) -> list[float]:
        return list(asdict(work).values())

    models = {
        name: {
            "at_load": [[numbers(step.work), step.seconds] for step in model.at_load],
            "rounds": [[[numbers(s.work), *s.seconds.values()] for s in steps] for steps in model.rounds],
        }
        for name, model in results.items()
    }
    (_RESULTS / "service_times.json").write_text(json.dumps({"about": machine, "models": models}) + "\n")
    (_RESULTS / "service_times.md").write_text(_table(results, machine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="times that each size is measured")
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    arguments = parser.parse_args()
    machine = about() | {"load": f"{os.getloadavg()[1]:.1f}"}
    results = _stored(machine["commit"]) if arguments.write else {}
    with tempfile.TemporaryDirectory() as directory:
        shape = MODELS[0].save(Path(directory) / MODELS[0].name)
        for name, folder in (("Demo model", _DEMO), (f"{MODELS[0].name} shape, random weights", shape)):
            kept = results.setdefault(name, Samples([], []))
            for _ in measure(folder, kept, arguments.rounds):
                if arguments.write:
                    _write({name: model for name, model in results.items() if model.rounds}, machine)
    print(_table(results, machine))


if __name__ == "__main__":
    main()
