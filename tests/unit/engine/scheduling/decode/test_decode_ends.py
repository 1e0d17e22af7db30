"""Tests the ways in which jobs of a decode worker end early: refusals, cancels, deadlines, failed steps."""

from collections.abc import Callable

import pytest

from cluster.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    QueueFull,
    StepFailed,
    TandemError,
    WorkerTooSmall,
)
from cluster.messages import DecodeJob, FinishReason
from engine.scheduling.commands import AdmitImported, AdmitLocal, Failed, LimitQueue
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.scheduler_bench import SchedulerBench


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids: (ids[:1], ids[1:2]),  # a tail is missing
        lambda ids: (ids[:1], (ids[1], ids[1])),  # two choices on one tail
        lambda ids: ((60,), ids[1:]),  # a block of another hand-off
    ],
)
def test_an_import_that_does_not_match_its_job_is_refused_and_freed(
    spoil: Callable[[tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    bench = SchedulerBench(limits())
    job = bench.job([1, 2, 3, 4, 5], num_choices=2)
    handoff = bench.reserve(job)
    assert handoff.block_ids is not None

    sealed, tails = spoil(handoff.block_ids)
    (failed,) = bench.scheduler.apply(AdmitImported(handoff.handoff_id, job, sealed, tails, (1, 2)), 0.0)

    assert isinstance(failed, Failed) and isinstance(failed.error, InternalError)
    bench.assert_idle()


def test_cancelled_sequences_free_their_blocks_at_once() -> None:
    bench = SchedulerBench(limits(max_num_seqs=2))
    running = bench.admit(bench.job(range(1, 9), num_choices=2, max_tokens=30))
    waiting = bench.admit(bench.job([1, 2, 3]))
    bench.step()

    bench.cancel([*running, *waiting])

    bench.assert_idle()
    assert bench.run() == []


def test_cancelling_a_choice_during_the_shared_prefill_leaves_the_others() -> None:
    bench = SchedulerBench(limits())
    first, second, third = bench.admit(bench.job(range(1, 35), num_choices=3))
    bench.step()
    held = bench.inspect().blocks["held"]

    bench.cancel([first])

    assert bench.inspect().blocks["held"] == held - 1
    bench.run()
    bench.assert_idle()
    assert bench.choices[second].ended == bench.choices[third].ended == FinishReason.LENGTH


def _too_long(bench: SchedulerBench) -> DecodeJob:
    return bench.job(range(1, 50), max_tokens=152)


def _longer_than_the_pool(bench: SchedulerBench) -> DecodeJob:
    return bench.job([1, 2], max_tokens=40)


def _complete(bench: SchedulerBench) -> DecodeJob:
    return bench.job([1, 2], max_tokens=3, committed=[3])


@pytest.mark.parametrize(
    ("make", "num_blocks", "error", "text"),
    [
        (_too_long, 64, WorkerTooSmall, "201 tokens; this worker holds at most 200"),
        (_longer_than_the_pool, 10, WorkerTooSmall, "42 tokens; this worker holds at most 41"),
        (_complete, 64, InvalidRequest, "max_tokens 3 already"),
    ],
)
def test_a_job_that_can_never_be_served_is_refused_with_the_numbers(
    make: Callable[[SchedulerBench], DecodeJob], num_blocks: int, error: type[TandemError], text: str
) -> None:
    bench = SchedulerBench(limits(num_blocks=num_blocks))

    bench.admit(make(bench))

    (failed,) = bench.failures
    assert isinstance(failed.error, error) and text in str(failed.error)
    bench.assert_idle()


def test_a_sequence_that_just_fits_the_pool_is_served() -> None:
    bench = SchedulerBench(limits(num_blocks=10))
    (handle,) = bench.admit(bench.job([1, 2], max_tokens=39))

    bench.run()

    assert bench.choices[handle].ended == FinishReason.LENGTH
    bench.assert_idle()


def test_a_full_queue_and_a_handle_in_use_are_refused() -> None:
    bench = SchedulerBench(limits(max_queue=2))
    jobs = [bench.job([1, 2]) for _ in range(3)]
    for job in jobs:
        bench.admit(job)
    assert isinstance(bench.failures[0].error, QueueFull)
    bench.scheduler.apply(LimitQueue(3), 0.0)
    bench.admit(bench.job([1, 2]))
    assert len(bench.failures) == 1

    bench.step()
    (duplicate,) = bench.scheduler.apply(AdmitLocal(jobs[0]), 0.0)

    assert isinstance(duplicate, Failed) and isinstance(duplicate.error, DuplicateRequest)
    bench.run()
    bench.assert_idle()


def test_an_exceeded_deadline_frees_all_blocks_and_names_its_phase() -> None:
    bench = SchedulerBench(limits(max_num_seqs=1))
    bench.admit(bench.job([1, 2, 3], max_tokens=30, timeout_s=5.0))
    bench.admit(bench.job([1, 2, 3], max_tokens=30, timeout_s=9.0))
    bench.step()
    assert bench.scheduler.reap(4.0) == ((), 5.0)

    bench.now_s = 20.0
    assert bench.step() is None

    assert all(isinstance(failed.error, DeadlineExceeded) for failed in bench.failures)
    assert [str(failed.error) for failed in bench.failures] == [
        "5 s passed in decode, with 1 of 30 tokens",
        "9 s passed in the decode queue, with 0 of 30 tokens",
    ]
    bench.assert_idle()
    assert bench.scheduler.reap(20.0) == ((), None)


def test_a_failed_step_ends_only_its_own_sequences() -> None:
    bench = SchedulerBench(limits(max_num_seqs=2))
    hit = bench.admit(bench.job([1, 2], num_choices=2, max_tokens=9))
    (spared,) = bench.admit(bench.job([3, 4], max_tokens=9))
    bench.step()

    bench.step(RuntimeError("the device is gone"))

    (failed,) = bench.failures
    assert failed.handles == tuple(hit) and "RuntimeError: the device is gone" in str(failed.error)
    assert isinstance(failed.error, StepFailed)
    bench.run()
    assert bench.choices[spared].ended == FinishReason.LENGTH
    bench.assert_idle()
