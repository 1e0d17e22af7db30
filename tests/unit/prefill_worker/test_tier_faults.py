"""Tests that after any exception while blocks move between the pool and its tiers, every block, slot and lease is
released."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from engine.kv.block_pool import BlockState
from engine.scheduling import cache_commands, commands
from prefill_worker.prefixes import tiers
from tests.faults.injection import AwaitFaults, CallFaults, SubmitFaults, When, Where
from tests.prefill_jobs import prefill_job
from tests.unit.prefill_worker.tier_bench import TierBench, prompt

_ERRORS = (MemoryError, OSError, RuntimeError)


async def _fetch_and_store(bench: TierBench, number: int = 1) -> None:
    """Fetch one prompt from disk and host memory, and compute the blocks that are missing."""
    job = prefill_job(prompt(number))
    chain = bench.tiers.chain(job)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.create_task(bench.tiers.fetch(job, chain))
    bench.compute_prompt(job)
    bench.tiers.store(chain)
    await bench.stored()


async def _until_threads_rest(bench: TierBench) -> None:
    for executor in (bench.tiers._fetcher, bench.tiers._storer):
        await asyncio.wrap_future(executor.submit(int))
    for _ in range(4):  # what their ends post
        await asyncio.sleep(0)


def _files(folder: Path) -> set[bytes]:
    """Return the hashes of the blocks on disk. Fails if a draft is left."""
    names = {path.name for path in folder.glob("*/*") if path.name != "lock"}
    assert not [name for name in names if name.endswith(".draft")]
    return set(map(bytes.fromhex, names))


async def _check(bench: TierBench, folder: Path) -> None:
    """Assert that no block, pin, slot or uncounted file is held, and that the tiers still work."""
    await _until_threads_rest(bench)
    assert _files(folder) == set(bench.index._disk), "files that are not counted, or counted ones that are not there"
    bench.scheduler.check()
    bench.index.check()
    assert bench.scheduler.holders() == set(bench.tiers.owners()) == frozenset()
    counts = bench.scheduler._pool.counts()
    assert counts[BlockState.FREE] + counts[BlockState.CACHED] == bench.pool.num_blocks
    assert all(held.is_whole and not held.pins for held in bench.index._host.values())
    for number in (2, 3, 1):
        await bench.ask(*prompt(number))  # compares what is found with what was computed
    await bench.tiers.close()


async def _filled(folder: Path) -> TierBench:
    bench = TierBench(folder, slots=4)
    for number in (1, 2, 3):
        await bench.ask(*prompt(number))
    return bench


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("error", [*_ERRORS, asyncio.CancelledError])
async def test_an_exception_at_any_await_of_a_copy_leaves_no_block_held(
    tmp_path: Path, error: type[BaseException], when: When
) -> None:
    num_points = at = 0
    while at <= num_points:
        bench = await _filled(tmp_path / str(at))
        faults = AwaitFaults("prefill_worker", at - 1, error, when)
        faults.install()
        await _fetch_and_store(bench)
        faults.disarm()
        num_points = max(num_points, faults.num_awaits)
        await _check(bench, tmp_path / str(at))
        at += 1
    assert num_points >= 6, "the question, the reservation, the read; the demotion, the leases, the copy"


@pytest.mark.parametrize("where", Where)
@pytest.mark.parametrize("error", _ERRORS)
async def test_an_exception_of_any_copying_thread_leaves_no_block_held(
    tmp_path: Path, error: type[Exception], where: Where
) -> None:
    num_points = at = 0
    while at <= num_points:
        bench = await _filled(tmp_path / str(at))
        faults = SubmitFaults(at - 1, error, where)
        with pytest.MonkeyPatch.context() as patch:
            faults.install(patch)
            await _fetch_and_store(bench)
        num_points = max(num_points, faults.num_submitted)
        await _check(bench, tmp_path / str(at))
        at += 1
    assert num_points == 3, "the read, the demotion, the copy"


@pytest.mark.parametrize("error", _ERRORS)
@pytest.mark.parametrize("call", ["replace", "open", "unlink"])
async def test_an_exception_while_blocks_are_demoted_leaves_no_file_that_is_not_counted(
    tmp_path: Path, error: type[Exception], call: str
) -> None:
    """At every call of the disk in turn. With four files at most, demoted blocks replace others on disk."""
    num_calls = at = 0
    while at <= num_calls:
        folder = tmp_path / str(at)
        bench = TierBench(folder, slots=3, files=4)
        for number in (1, 2):
            await bench.ask(*prompt(number))
        faults = CallFaults(getattr(os, call), at - 1, error)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"prefill_worker.prefixes.tier_storage.os.{call}", faults)
            await _fetch_and_store(bench, 3)
            await _until_threads_rest(bench)
        num_calls = max(num_calls, faults.num_calls)
        await bench.ask(*prompt(4))  # deletes what could not be deleted before
        await _check(bench, folder)
        at += 1
    assert num_calls >= 3


async def test_a_fetch_that_fails_is_counted_and_its_prompt_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await _filled(tmp_path)

    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(bench.tiers._resources.storage, "fetch", exhausted)
    assert await bench.ask(*prompt(1)) == 0
    assert bench.outcomes("fetch") == {"failed": 3}
    await bench.tiers.close()


async def test_leases_that_are_granted_in_the_turn_of_their_time_limit_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case occurs in a process that was stopped for longer than the limit: answer and limit occur in the same
    turn."""
    bench = await _filled(tmp_path)
    loop, stopped_s = asyncio.get_running_loop(), 0.0
    real_time, real_post = loop.time, bench.questions.post
    monkeypatch.setattr(loop, "time", lambda: real_time() + stopped_s)

    def post(command: commands.Command) -> None:
        if isinstance(command, cache_commands.LeaseForCopy):
            loop.call_soon(stop, command)
        else:
            real_post(command)

    def stop(command: commands.Command) -> None:
        nonlocal stopped_s
        stopped_s += 60.0
        real_post(command)  # the answer is the first thing of the next turn, the limit the second

    monkeypatch.setattr(bench.questions, "post", post)
    job = prefill_job(prompt(4))
    bench.compute_prompt(job)
    bench.tiers.store(bench.tiers.chain(job))
    await bench.stored()
    assert bench.outcomes("store") == {"ok": 9, "failed": 3}, "the time limit had its turn"
    await _check(bench, tmp_path)


async def test_a_store_that_waits_for_a_hung_step_thread_ends_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_CLOSE_TIMEOUT_S", 0.05)
    bench = TierBench()
    chain = bench.tiers.chain(prefill_job(prompt(1)))
    monkeypatch.setattr(bench.questions, "post", lambda command: None)  # nothing is answered
    bench.tiers.store(chain)
    await bench.tiers.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "store prefix"]


@pytest.mark.parametrize("where", [Where.NOT_SUBMITTED, Where.SUBMITTED_ALL_THE_SAME])
@pytest.mark.parametrize("submission", [0, 1])
async def test_tiers_close_in_order_where_no_thread_can_be_started(
    submission: int, where: Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await _filled(tmp_path)
    SubmitFaults(submission, RuntimeError, where).install(monkeypatch)
    await bench.tiers.close()
    bench.scheduler.check()
