"""What a prefill worker tells routers of its prefix cache: everything, then each change, and an end when it goes."""

import asyncio
from collections.abc import Callable

import pytest

from cluster.errors import Draining, Overloaded
from cluster.messages import MemberId
from engine.kv.block_pool import BlockPool
from prefill_worker.prefixes.prefix_feed import PrefixFeed
from prefill_worker.scheduling import commands
from prefill_worker.scheduling.prefix_followers import PrefixFollowers
from tandem.v1 import worker_pb2

_ME = MemberId("me", "1")
_HASHES = tuple(bytes([number]) * 16 for number in range(1, 10))


class _Worker:
    """A pool with its followers, as the step thread has them; it answers when it is told to."""

    def __init__(self) -> None:
        self.pool = BlockPool(4)
        self.followers = PrefixFollowers(self.pool)
        self.posted: list[commands.Command] = []
        self.feed = PrefixFeed(_ME, self._post)

    def keep(self, block_hash: bytes) -> None:
        block_ids = self.pool.reserve(1)
        assert block_ids is not None
        self.pool.keep(block_ids, [block_hash], b"root")
        self.pool.release(block_ids)
        self.turn()

    def turn(self) -> None:
        for told in self.followers.due():
            self.feed.on_told(told)

    def _post(self, command: commands.Command) -> None:
        self.posted.append(command)
        match command:
            case commands.FollowPrefixes():
                self.followers.follow(command)
            case commands.UnfollowPrefixes(follower_id):
                self.followers.unfollow(follower_id)
        asyncio.get_running_loop().call_soon(self.turn)


def _asked(member: str = "", since: int = 0) -> worker_pb2.FollowPrefixesRequest:
    return worker_pb2.FollowPrefixesRequest(member=member, since=since)


async def test_a_new_follower_hears_everything_and_then_what_changes() -> None:
    worker = _Worker()
    worker.keep(_HASHES[0])
    news = worker.feed.follow(_asked())
    first = await anext(news)
    assert (first.is_snapshot, first.next_number, first.added, first.member) == (True, 1, _HASHES[0], str(_ME))

    for block_hash in _HASHES[1:5]:  # one more than fit
        worker.keep(block_hash)
    then = await anext(news)
    assert (then.is_snapshot, then.first_number, then.next_number) == (False, 1, 6)
    assert (then.added, then.evicted) == (b"".join(_HASHES[1:5]), _HASHES[0])
    await news.aclose()


async def test_one_that_comes_back_hears_only_what_it_missed_and_of_another_incarnation_everything() -> None:
    worker = _Worker()
    for block_hash in _HASHES[:2]:
        worker.keep(block_hash)
    for member, heard in ((str(_ME), (False, _HASHES[1])), ("me@0", (True, b"".join(_HASHES[:2])))):
        news = worker.feed.follow(_asked(member, since=1))
        message = await anext(news)
        assert (message.is_snapshot, message.added) == heard
        await news.aclose()


async def test_one_that_leaves_while_it_waits_is_forgotten() -> None:
    worker = _Worker()
    waiting = asyncio.ensure_future(anext(worker.feed.follow(_asked(str(_ME)))))
    await _until(lambda: bool(worker.posted))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert isinstance(worker.posted[-1], commands.UnfollowPrefixes)
    worker.keep(_HASHES[0])
    assert worker.followers.due() == ()


async def test_followers_are_told_to_go_when_the_worker_leaves() -> None:
    worker = _Worker()
    waiting = asyncio.ensure_future(anext(worker.feed.follow(_asked(str(_ME)))))
    await _until(lambda: bool(worker.posted))
    worker.feed.close()
    with pytest.raises(Draining):
        await waiting


async def test_no_more_follow_than_there_is_room_for() -> None:
    worker = _Worker()
    waiting = [asyncio.ensure_future(anext(worker.feed.follow(_asked(str(_ME))))) for _ in range(64)]
    await _until(lambda: len(worker.posted) == 64)
    with pytest.raises(Overloaded):
        await anext(worker.feed.follow(_asked()))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def _until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):  # turns of the loop
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")
