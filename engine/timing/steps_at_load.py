"""Times a handful of real steps before a worker serves, so that the first request can be predicted, and that drafters
can decide if speculation pays."""

import itertools
import math
import time
from collections.abc import Callable, Iterator

import torch

from cluster.messages import Sampling
from cluster.request_size import blocks_for
from cluster.service_times import StepWork, TimedStep
from engine.build import Engine
from engine.scheduling.step import Chunk, Runner, Sample, StepPlan
from engine.timing.service_time_fit import step_work

# A slow model has time for the first ones only, so the third one already separates size and context.
_PREFILLS = ((16, 0), (16, 1008), (64, 0), (256, 0))  # (new tokens, tokens before them)
_DECODES = ((1, 16), (1, 1024), (8, 16), (32, 16))  # (sequences, their length)
_MAX_SECONDS = 0.3  # in all; the first step of each kind is timed in any case
_MAX_SECONDS_ON_GPU = 1.0  # with the first run of each step, which may compile kernels and is not timed
_PASSES = 3
_SAMPLING = Sampling(temperature=1.0)  # so that the time includes sampling
_ROWS = 33
_TURNS = 5
_MOST = 4096.0  # if the cost of a row is too small to measure


def time_steps(
    engine: Engine, runner: Runner, max_num_seqs: int, clock: Callable[[], float] | None = None
) -> tuple[TimedStep, ...]:
    """Run steps of a few sizes, of both kinds in turns, until the budget is spent. If time is left, run all of
    them again, up to `_PASSES` times; the quickest run counts, since a pause only ever makes a step longer. Sizes that
    the pool, the model's length or `max_num_seqs` do not allow are reduced. The pool must be unused; its used blocks
    are zeroed afterwards.

    On a CPU the default clock is that of the thread, so that other processes do not count: a worker that seems too slow
    gets no work and would never be corrected, while one that seems too quick is corrected by its first steps."""
    on_cpu = engine.pool.device.type == "cpu"
    budget_s = _MAX_SECONDS if on_cpu else _MAX_SECONDS_ON_GPU
    clock = clock or (time.thread_time if on_cpu else time.perf_counter)
    began_s, plans = clock(), list(_plans(engine, max_num_seqs))
    seconds: dict[int, float] = {}
    for turn, (number, plan) in itertools.product(range(_PASSES), enumerate(plans)):
        if (turn or number > 1) and clock() - began_s > budget_s:
            break
        if not (turn or on_cpu):
            runner.run(plan)
        before_s = clock()
        runner.run(plan)
        seconds[number] = min(seconds.get(number, math.inf), clock() - before_s)
    timed = tuple(TimedStep(_work(plans[number]), quickest_s) for number, quickest_s in seconds.items())
    most_blocks = max(max(chunk.block_ids) + 1 for number in seconds for chunk in plans[number].chunks)
    engine.pool.raw[torch.arange(most_blocks, device=engine.pool.device)] = 0
    return timed


def fixed_rows(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the fixed part of a step's time, as a number of rows. The pool must be unused; its used blocks are zeroed
    afterwards."""
    pool = engine.pool
    most_rows = min(_ROWS, engine.model_info.max_model_len, pool.num_tokens)
    if most_rows < 2:
        return _MOST
    plans = {num_rows: _drafting(num_rows, pool.layout.block_size) for num_rows in (1, most_rows)}
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


def _work(plan: StepPlan) -> StepWork:
    work = step_work(plan)
    assert work is not None
    return work


def _plans(engine: Engine, max_num_seqs: int) -> Iterator[StepPlan]:
    pool, longest = engine.pool, min(engine.model_info.max_model_len, engine.pool.num_tokens)
    size = pool.layout.block_size
    for (num_new, before), (batch, length) in zip(_PREFILLS, _DECODES, strict=True):
        length = min(length, longest)
        num_blocks = blocks_for(length, size)
        batch = min(batch, max_num_seqs, pool.num_blocks // num_blocks)
        yield StepPlan(tuple(_chunk(i, length - 1, 1, i * num_blocks, size) for i in range(batch)))
        num_new = min(num_new, longest)
        yield StepPlan((_chunk(0, min(before, longest - num_new), num_new, 0, size),))


def _chunk(sequence_id: int, start: int, num_tokens: int, first_block: int, block_size: int) -> Chunk:
    """Return a chunk of a sequence whose tokens before `start` were never computed: their KV is zero."""
    end = start + num_tokens
    return Chunk(
        sequence_id=sequence_id,
        token_ids=(1,) * num_tokens,
        start=start,
        block_ids=tuple(range(first_block, first_block + blocks_for(end, block_size))),
        samples=(Sample(seed=0, position=end, sampling=_SAMPLING),),
    )


def _drafting(num_rows: int, block_size: int) -> StepPlan:
    """Return a step of one sequence with `num_rows` tokens, all but the first of them draft tokens."""
    samples = tuple(Sample(0, row + 1, _SAMPLING) for row in range(num_rows))
    blocks = tuple(range(blocks_for(num_rows, block_size)))
    return StepPlan((Chunk(0, (1,) * num_rows, 0, blocks, samples, num_draft_tokens=num_rows - 1),))
