"""Waits for a change share one future, and one that is cancelled does not disturb the others."""

import asyncio

import pytest

from router.running import ChangeSignal, first_done


async def test_a_change_wakes_all_that_wait_and_none_that_come_later() -> None:
    signal = ChangeSignal()
    waits = [asyncio.create_task(signal.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    signal.set()
    later = signal.next()
    await asyncio.gather(*waits)
    assert not later.done()


async def test_a_cancelled_wait_leaves_the_others_waiting() -> None:
    signal = ChangeSignal()
    leaving, staying = asyncio.create_task(signal.wait()), asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert not signal.next().cancelled()
    signal.set()
    await staying


async def test_a_change_without_a_wait_is_not_kept() -> None:
    signal = ChangeSignal()
    signal.set()
    assert not signal.next().done()


async def test_a_wait_for_the_first_of_several_ends_with_a_change_or_with_a_future() -> None:
    signal, ending = ChangeSignal(), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(first_done(ending, changes=(signal,)))
    await asyncio.sleep(0)
    assert not waiting.done()
    signal.set()
    await waiting
    assert not ending.done()
    waiting = asyncio.create_task(first_done(ending, changes=(signal,)))
    await asyncio.sleep(0)
    ending.set_result(None)
    await waiting
