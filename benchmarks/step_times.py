"""Measure the time of a step by variants of the engine, on one core.

    python -m benchmarks.step_times deterministic MODEL_FOLDER [--dummy]
    python -m benchmarks.step_times kv_dtypes

The first prints a table of benchmarks/results/deterministic.md: the plain forward, the same with fixed shapes, and the
compiled kernels, which are deterministic as they are. The second prints one of benchmarks/results/cpu_engine.md: the
compiled forward, which keeps KV in bfloat16 only, and the plain one over each kind of pool, with random weights and
without drawing. The same steps run in turns by all variants, and the fastest sample of each counts.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.engine.shapes import MODELS
from benchmarks.machine import about
from cluster.messages import Sampling
from cluster.request_size import blocks_for
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.step import Chunk, Sample, StepPlan

_NUM_SAMPLES = 15
_CONTEXT = 301  # of each sequence that decodes
_DETERMINISTIC_STEPS = {  # (sequences, their length, tokens computed of each)
    "a prompt of 512": (1, 512, 512),
    **{f"{count} decoding": (count, _CONTEXT, 1) for count in (1, 4, 16, 64)},
}
_KV_STEPS = {
    "decode 1 x 320": (1, 320, 1),
    "decode 4 x 1,152": (4, 1152, 1),
    "decode 16 x 320": (16, 320, 1),
    "prefill 512": (1, 512, 512),
    "prefill 512 after 512": (1, 1024, 512),
}
_POOLS = {  # name: --kv-cache-dtype, --cpu-kernels
    "bfloat16, compiled": ("auto", "on"),
    "bfloat16": ("auto", "off"),
    "int8": ("int8", "auto"),
    "fp8": ("fp8", "auto"),
}
_NUM_BLOCKS = 320  # of the largest step over a pool of 8 bits


def deterministic(folder: str, *flags: str) -> None:
    settings = EngineSettings(
        model=folder,
        load_format="dummy" if "--dummy" in flags else "auto",
        dtype="bfloat16",
        device="cpu",
        kv_cache_memory="1GiB",
        num_threads=1,
        cpu_kernels="off",
    )
    engines = {
        "plain": build_engine(settings),
        "fixed shapes": build_engine(replace(settings, deterministic="on")),
        "compiled": build_engine(replace(settings, cpu_kernels="on", deterministic="on")),
    }
    best_s = _fastest_s(engines, _DETERMINISTIC_STEPS, lambda engine, plan: engine.runner.run(plan))
    print(", ".join(about().values()), end="\n\n")
    print("| step | plain | fixed shapes | | compiled |\n|---|---|---|---|---|")
    for step in _DETERMINISTIC_STEPS:
        plain, fixed, compiled = (1e3 * best_s[engine, step] for engine in engines)
        print(f"| {step} | {plain:.1f} ms | {fixed:.1f} ms | {fixed / plain:.2f} x | {compiled:.1f} ms |")


def kv_dtypes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = str(MODELS[0].save(Path(folder) / MODELS[0].name))
        engines = {name: _engine_over(model, *flags) for name, flags in _POOLS.items()}
    best_s = _fastest_s(engines, _KV_STEPS, lambda engine, plan: engine.runner.logits(plan))
    print(", ".join(about().values()), end="\n\n")
    print("| pool | bytes a token | " + " | ".join(f"{step}, ms" for step in _KV_STEPS) + " |")
    print("|---" * (2 + len(_KV_STEPS)) + "|")
    for pool, engine in engines.items():
        figures = " | ".join(f"{1e3 * best_s[pool, step]:.1f}" for step in _KV_STEPS)
        print(f"| {pool} | {engine.pool.layout.kv_bytes_per_token:,} | {figures} |")


def _engine_over(model: str, kv_cache_dtype: str, cpu_kernels: str) -> Engine:
    return build_engine(
        EngineSettings(
            model=model,
            load_format="dummy",
            device="cpu",
            num_blocks=_NUM_BLOCKS,
            kv_cache_dtype=kv_cache_dtype,
            cpu_kernels=cpu_kernels,
        )
    )


def _fastest_s(
    engines: Mapping[str, Engine],
    steps: Mapping[str, tuple[int, int, int]],
    compute: Callable[[Engine, StepPlan], object],
) -> dict[tuple[str, str], float]:
    """Return the seconds of each step by each engine."""
    block_size = next(iter(engines.values())).pool.layout.block_size
    plans = {name: _plan(*step, block_size) for name, step in steps.items()}
    best_s = {(name, step): float("inf") for step in plans for name in engines}
    for _ in range(_NUM_SAMPLES):
        for (name, step), fastest_s in best_s.items():
            began_s = time.perf_counter()
            compute(engines[name], plans[step])
            best_s[name, step] = min(fastest_s, time.perf_counter() - began_s)
    return best_s


def _plan(num_sequences: int, length: int, num_tokens: int, block_size: int) -> StepPlan:
    """Return a step whose blocks are in random order, as in a pool that has served for a while."""
    size = blocks_for(length, block_size)
    blocks = torch.randperm(num_sequences * size, generator=torch.Generator().manual_seed(1)).tolist()
    sample = Sample(seed=0, position=length, sampling=Sampling())
    return StepPlan(
        tuple(
            Chunk(
                sequence_id=number,
                token_ids=tuple((7 * position + number) % 500 + 10 for position in range(num_tokens)),
                start=length - num_tokens,
                block_ids=tuple(blocks[number * size : (number + 1) * size]),
                samples=(sample,),
            )
            for number in range(num_sequences)
        )
    )


_VARIANTS: Mapping[str, Callable[..., None]] = {"deterministic": deterministic, "kv_dtypes": kv_dtypes}

if __name__ == "__main__":
    torch.set_num_threads(1)
    _VARIANTS[sys.argv[1]](*sys.argv[2:])
