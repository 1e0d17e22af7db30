"""Measure the time of a step with `--deterministic on`, on one core, in the engine alone.

    python -m benchmarks.deterministic MODEL_FOLDER [--dummy]

Prints a table of benchmarks/results/deterministic.md. Three variants run in turns, and the fastest sample of each
counts: the plain forward, the same with fixed shapes, and the compiled kernels, which are deterministic as they are.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks.machine import about
from cluster.messages import Sampling
from cluster.request_size import blocks_for
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.step import Chunk, Sample, StepPlan

_PROMPT_TOKENS, _CONTEXT, _TURNS = 512, 300, 5
_SEQUENCES = (1, 4, 16, 64)


def _engines(folder: str, load_format: str) -> dict[str, Engine]:
    settings = EngineSettings(
        model=folder,
        load_format=load_format,
        dtype="bfloat16",
        device="cpu",
        kv_cache_memory="1GiB",
        num_threads=1,
        cpu_kernels="off",
    )
    return {
        "plain": build_engine(settings),
        "fixed shapes": build_engine(replace(settings, deterministic="on")),
        "compiled": build_engine(replace(settings, cpu_kernels="on", deterministic="on")),
    }


def _prefill(block_size: int) -> StepPlan:
    tokens = tuple(range(5, 5 + _PROMPT_TOKENS))
    blocks = tuple(range(blocks_for(_PROMPT_TOKENS, block_size)))
    return StepPlan((Chunk(0, tokens, 0, blocks, (Sample(0, _PROMPT_TOKENS, Sampling()),)),))


def _decode(count: int, block_size: int) -> StepPlan:
    width = blocks_for(_CONTEXT + 1, block_size)
    return StepPlan(
        tuple(
            Chunk(
                number,
                (5 + number,),
                _CONTEXT,
                tuple(range(number * width, (number + 1) * width)),
                (Sample(number, _CONTEXT + 1, Sampling()),),
            )
            for number in range(count)
        )
    )


def _fastest_s(engines: dict[str, Engine], plan_for: Callable[[int], StepPlan], times: int) -> dict[str, float]:
    best = dict.fromkeys(engines, float("inf"))
    for _ in range(_TURNS):
        for name, engine in engines.items():
            plan = plan_for(engine.pool.layout.block_size)
            for _ in range(times):
                began_s = time.perf_counter()
                engine.runner.run(plan)
                best[name] = min(best[name], time.perf_counter() - began_s)
    return best


def main(folder: str, *flags: str) -> None:
    engines = _engines(folder, "dummy" if "--dummy" in flags else "auto")
    print(about())
    print("\n| step | plain | fixed shapes | | compiled |")
    print("|---|---|---|---|---|")
    works: dict[str, tuple[Callable[[int], StepPlan], int]] = {f"a prompt of {_PROMPT_TOKENS}": (_prefill, 1)}
    for count in _SEQUENCES:
        works[f"{count} decoding"] = (partial(_decode, count), 3)
    for name, (plan_for, times) in works.items():
        taken = _fastest_s(engines, plan_for, times)
        plain, fixed, compiled = (1e3 * taken[way] for way in ("plain", "fixed shapes", "compiled"))
        print(f"| {name} | {plain:.1f} ms | {fixed:.1f} ms | {fixed / plain:.2f} x | {compiled:.1f} ms |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
