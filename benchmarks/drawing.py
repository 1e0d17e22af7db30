"""Measure the time to draw one row of logits on one core, by torch and by the compiled library.

`python -m benchmarks.drawing` prints a table of benchmarks/results/cpu_engine.md. The two run in turns; figures are
medians of the thread's CPU time. Rows are normally distributed, with two hundred tokens above the rest.
"""

import statistics
import time

import torch

from benchmarks.machine import about
from cluster.messages import Sampling
from engine.cpu.compiled_draw import compiled_draw
from engine.scheduling.step import Sample
from engine.steps.sampler import RowDraw, draw

_VOCAB_SIZES = (49_152, 151_936)
_NUM_ROWS = (1, 16, 64)
_NUM_SAMPLES = 3
_SETTINGS = {
    "temperature 1": Sampling(1.0),
    "top-p 0.95": Sampling(1.0, top_p=0.95),
    "top-k 50": Sampling(1.0, top_k=50),
    "all, min-p 0.02": Sampling(0.8, 50, 0.95, 0.02),
}


def main() -> None:
    torch.set_num_threads(1)
    compiled = compiled_draw()
    print(", ".join(about().values()), end="\n\n")
    print("| vocabulary x rows | " + " | ".join(f"{name}, ms a row" for name in _SETTINGS) + " |")
    print("|---" * (1 + len(_SETTINGS)) + "|")
    for vocab_size in _VOCAB_SIZES:
        logits = _logits(vocab_size)
        for num_rows in _NUM_ROWS:
            cells = [_medians(logits[:num_rows], sampling, compiled) for sampling in _SETTINGS.values()]
            print(f"| {vocab_size:,} x {num_rows} | " + " | ".join(cells) + " |", flush=True)


def _logits(vocab_size: int) -> torch.Tensor:
    logits = 2.2 * torch.randn(max(_NUM_ROWS), vocab_size, generator=torch.Generator().manual_seed(1))
    logits[:, :200] += torch.linspace(12, 2, 200)
    return logits


def _medians(logits: torch.Tensor, sampling: Sampling, compiled: RowDraw) -> str:
    """Return the text "torch → compiled", in milliseconds."""
    turns = [
        (_ms_per_row(logits, sampling, None), _ms_per_row(logits, sampling, compiled)) for _ in range(_NUM_SAMPLES)
    ]
    by_torch, by_library = (statistics.median(samples) for samples in zip(*turns, strict=True))
    return f"{by_torch:.1f} -> {by_library:.3f}"


def _ms_per_row(logits: torch.Tensor, sampling: Sampling, compiled: RowDraw | None) -> float:
    samples = [Sample(row, 10, sampling) for row in range(len(logits))]
    start_s = time.thread_time()
    draw(logits, samples, compiled)
    return (time.thread_time() - start_s) / len(logits) * 1e3


if __name__ == "__main__":
    main()
