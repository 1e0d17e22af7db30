"""Measures at start what one more row costs in a decode step, from which `drafter.py` decides if speculation
pays."""

import time
from collections.abc import Callable

import torch

from cluster.messages import Sampling
from cluster.request_size import blocks_for
from engine.build import Engine
from engine.scheduling.step import Chunk, Sample, StepPlan

_ROWS = 33
_TURNS = 5
_MOST = 4096.0  # if a row's cost is too small to measure
_SAMPLING = Sampling(temperature=1.0)  # so that the time includes sampling


def fixed_rows(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the fixed part of a step's time, as a number of rows. The pool must be unused; its used blocks are zeroed
    afterwards."""
    pool = engine.pool
    most_rows = min(_ROWS, engine.model_info.max_model_len, pool.num_tokens)
    if most_rows < 2:
        return _MOST
    plans = {num_rows: _plan(num_rows, pool.layout.block_size) for num_rows in (1, most_rows)}
    best_s = dict.fromkeys(plans, float("inf"))
    for _ in range(_TURNS + 1):  # the first turn warms up
        for num_rows, plan in plans.items():
            began_s = clock()
            engine.runner.run(plan)
            best_s[num_rows] = min(best_s[num_rows], clock() - began_s)
    used = list(plans[most_rows].chunks[0].block_ids)
    pool.raw[torch.tensor(used, device=pool.device)] = 0
    row_s = (best_s[most_rows] - best_s[1]) / (most_rows - 1)
    return _MOST if row_s <= 0 else min(_MOST, max(0.0, best_s[1] / row_s - 1))


def _plan(num_rows: int, block_size: int) -> StepPlan:
    """Return a step of one sequence with `num_rows` tokens, all but the first of them draft tokens."""
    samples = tuple(Sample(0, row + 1, _SAMPLING) for row in range(num_rows))
    blocks = tuple(range(blocks_for(num_rows, block_size)))
    return StepPlan((Chunk(0, (1,) * num_rows, 0, blocks, samples, num_draft_tokens=num_rows - 1),))
