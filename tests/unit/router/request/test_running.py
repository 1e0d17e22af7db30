"""Branches end together and do not change the task that ran them: its deadline still applies."""

import asyncio
from collections.abc import Coroutine

import pytest

from router.running import all_of, branches


async def _fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("one branch")


async def _within(timeout_s: float, work: Coroutine[None, None, None]) -> None:
    async with asyncio.timeout(timeout_s):
        await work


async def _beside(branch: Coroutine[None, None, None], block: Coroutine[None, None, object]) -> None:
    async with branches() as group:
        group.create_task(branch)
        await block


async def test_the_first_error_is_raised_and_ends_the_others() -> None:
    ended = asyncio.Event()

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ValueError, match="one branch"):
        await all_of([other(), _fail()])
    assert ended.is_set()


async def test_a_deadline_ends_a_task_whose_branch_failed_before() -> None:
    """The case occurs when a migrated sequence is lost and its request waits for another worker until its deadline."""

    async def attempt_and_wait() -> None:
        with pytest.raises(ValueError, match="one branch"):
            await all_of([_fail()])
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await _within(0.01, attempt_and_wait())


async def test_a_failed_branch_leaves_no_cancellation() -> None:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(ValueError, match="one branch"):
        await all_of([_fail()])
    assert task.cancelling() == 0
    with pytest.raises(ValueError, match="one branch"):
        await _beside(_fail(), asyncio.Event().wait())
    assert task.cancelling() == 0


async def test_a_deadline_that_passes_while_a_branch_fails_is_not_lost() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("one branch")

    async def attempt_and_go_on() -> None:
        with pytest.raises(ValueError, match="one branch"):
            await all_of([fail_when_cancelled()])
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError):
            await _within(0.01, attempt_and_go_on())


async def test_a_cancelled_task_ends_its_branches() -> None:
    ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(all_of([endless()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
