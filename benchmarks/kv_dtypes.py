"""Measure the time of a step with KV of 8 bits, on one core.

`python -m benchmarks.kv_dtypes` prints a table of benchmarks/results/cpu_engine.md. The same steps run in turns by the
compiled forward, which keeps KV in bfloat16 only, and by the plain one over each kind of pool. The fastest sample
counts; weights are random.
"""

import tempfile
import time
from pathlib import Path

import torch

from benchmarks.engine.shapes import MODELS
from benchmarks.machine import about
from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.step import Chunk, Sample, StepPlan

_BLOCK_SIZE = 16
_NUM_BLOCKS = 320  # of the largest step
_NUM_SAMPLES = 15
_POOLS = {  # name: --kv-cache-dtype, --cpu-kernels
    "bfloat16, compiled": ("auto", "on"),
    "bfloat16": ("auto", "off"),
    "int8": ("int8", "auto"),
    "fp8": ("fp8", "auto"),
}
_STEPS = {  # (sequences, their length, tokens computed of each)
    "decode 1 x 320": (1, 320, 1),
    "decode 4 x 1,152": (4, 1152, 1),
    "decode 16 x 320": (16, 320, 1),
    "prefill 512": (1, 512, 512),
    "prefill 512 after 512": (1, 1024, 512),
}


def main() -> None:
    engines = {name: _engine(*flags) for name, flags in _POOLS.items()}
    plans = {name: _plan(*step) for name, step in _STEPS.items()}
    best_s = {(pool, step): float("inf") for pool in engines for step in plans}
    for _ in range(_NUM_SAMPLES):
        for (pool, step), fastest_s in best_s.items():
            start_s = time.perf_counter()
            engines[pool].runner.logits(plans[step])
            best_s[pool, step] = min(fastest_s, time.perf_counter() - start_s)
    print(", ".join(about().values()), end="\n\n")
    print("| pool | bytes a token | " + " | ".join(f"{step}, ms" for step in plans) + " |")
    print("|---" * (2 + len(plans)) + "|")
    for pool, engine in engines.items():
        figures = " | ".join(f"{1e3 * best_s[pool, step]:.1f}" for step in plans)
        print(f"| {pool} | {engine.pool.layout.kv_bytes_per_token:,} | {figures} |")


def _engine(kv_cache_dtype: str, cpu_kernels: str) -> Engine:
    with tempfile.TemporaryDirectory() as folder:
        model = MODELS[0].save(Path(folder) / MODELS[0].name)
        settings = EngineSettings(
            model=str(model),
            load_format="dummy",
            device="cpu",
            block_size=_BLOCK_SIZE,
            num_blocks=_NUM_BLOCKS,
            kv_cache_dtype=kv_cache_dtype,
            cpu_kernels=cpu_kernels,
        )
        return build_engine(settings)


def _plan(num_sequences: int, length: int, num_tokens: int) -> StepPlan:
    """Return a step whose blocks are in random order, as in a pool that has served for a while."""
    size = -(-length // _BLOCK_SIZE)
    blocks = torch.randperm(num_sequences * size, generator=torch.Generator().manual_seed(1)).tolist()
    sample = Sample(seed=0, position=length, sampling=Sampling())
    return StepPlan(
        tuple(
            Chunk(
                sequence_id=number,
                token_ids=tuple((7 * position + number) % 40_000 + 10 for position in range(num_tokens)),
                start=length - num_tokens,
                block_ids=tuple(blocks[number * size : (number + 1) * size]),
                samples=(sample,),
            )
            for number in range(num_sequences)
        )
    )


if __name__ == "__main__":
    main()
