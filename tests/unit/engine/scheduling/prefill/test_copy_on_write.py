"""Shared blocks are only read: a block that a step writes is in one sequence's table, and in no cache."""

from collections import Counter

from engine.scheduling.step import StepPlan
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.scheduler_bench import SchedulerBench

_BLOCK_SIZE = limits().block_size


def _written(plan: StepPlan) -> set[int]:
    return {
        block_id
        for chunk in plan.chunks
        for block_id in chunk.block_ids[chunk.start // _BLOCK_SIZE : -(-chunk.end // _BLOCK_SIZE)]
    } | {copy.target for copy in plan.copies}


def _assert_owned(plan: StepPlan) -> None:
    users = Counter(block_id for chunk in plan.chunks for block_id in set(chunk.block_ids))
    assert {block_id for block_id in _written(plan) if users[block_id] > 1} == set()


def test_choices_and_requests_that_share_blocks_write_only_to_their_own() -> None:
    bench = SchedulerBench(limits())
    prompt = range(1, 3 * _BLOCK_SIZE + 2)
    bench.admit(bench.job(prompt, num_choices=3, max_tokens=3 * _BLOCK_SIZE))
    num_shared = 0
    for turn in range(4 * _BLOCK_SIZE):
        if turn == _BLOCK_SIZE:  # the same prompt while the others run: found, and parted from
            bench.admit(bench.job(prompt, num_choices=2, max_tokens=2 * _BLOCK_SIZE))
        plan = bench.step()
        if plan is not None:
            _assert_owned(plan)
            users = Counter(block_id for chunk in plan.chunks for block_id in chunk.block_ids)
            num_shared += sum(count > 1 for count in users.values())
    assert num_shared > 20
    bench.run()
    bench.assert_idle()


def test_cached_blocks_are_never_written() -> None:
    bench = SchedulerBench(limits())
    prompt = range(1, 3 * _BLOCK_SIZE + 2)
    for number in range(6):
        bench.admit(bench.job([*prompt, *range(number)], num_choices=2, max_tokens=2 * _BLOCK_SIZE))
        for _ in range(3):
            pool = bench.scheduler._pool
            cached = {block_id for block_id in range(pool.num_blocks) if block_id in pool._cache}
            evicted = pool.num_evicted
            plan = bench.step()
            if plan is not None and pool.num_evicted == evicted:
                assert _written(plan) & cached == set()
    bench.run()
    bench.assert_idle()
