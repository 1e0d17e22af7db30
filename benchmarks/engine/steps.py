"""Measure one decode step in the engine alone, part by part. The rest of a step that clients see is scheduling and
network.

    python -m benchmarks.engine.steps MODEL_FOLDER

Answers each line with a load by one line with StepParts.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from benchmarks.engine.parties import MODEL_CORE
from benchmarks.engine.shapes import Load
from benchmarks.engine.table import StepParts
from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps import runner as step_runner

_WARM_UP, _STEPS = 3, 15


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


def measure(built: Engine, load: Load) -> StepParts:
    """Measure a step in the middle of the output."""
    position = load.tokens_in + load.tokens_out // 2
    runs: list[dict[str, float]] = []
    for step in range(_WARM_UP + _STEPS):
        plan = _plan(load, position + step, built.pool.layout.block_size)
        with _timed_parts(built) as parts:
            began_s = time.perf_counter()
            started = built.runner.start(plan)
            drawing_s = time.perf_counter()
            started.result()
            ended_s = time.perf_counter()
        parts["draw"] += ended_s - drawing_s
        parts["run"] = ended_s - began_s
        runs.append(parts)
    medians = {name: median(run[name] for run in runs[_WARM_UP:]) for name in ("pack", "forward", "draw", "run")}
    return StepParts(**{f"{name}_s": seconds for name, seconds in medians.items()})


def _plan(load: Load, position: int, block_size: int) -> StepPlan:
    width = position // block_size + 1
    return StepPlan(
        tuple(
            Chunk(
                sequence_id=index,
                token_ids=(7 + position,),
                start=position,
                block_ids=tuple(range(index * width, (index + 1) * width)),
                samples=(Sample(seed=1, position=position + 1, sampling=Sampling()),),
            )
            for index in range(load.sequences)
        )
    )


@contextmanager
def _timed_parts(built: Engine) -> Iterator[dict[str, float]]:
    """Wrap the runner's three parts with clocks."""
    parts: dict[str, float] = {}

    def timed(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object) -> object:
            began_s = time.perf_counter()
            try:
                return part(*arguments)
            finally:
                parts[name] = time.perf_counter() - began_s

        return call

    module: Any = step_runner
    pack, draws, forward = module.pack, module.StepDraws, built.runner.forward
    module.pack, module.StepDraws = timed("pack", pack), timed("draw", draws)
    built.runner.forward = timed("forward", forward)
    try:
        yield parts
    finally:
        module.pack, module.StepDraws, built.runner.forward = pack, draws, forward


def main(folder: str) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {MODEL_CORE})
    built = build(folder)
    print(json.dumps(built.report), flush=True)
    for line in sys.stdin:
        parts = measure(built, Load(**json.loads(line)))
        print(json.dumps({name: getattr(parts, name) for name in parts.__slots__}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
