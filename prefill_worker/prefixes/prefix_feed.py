"""What changes in this worker's prefix cache, told to the routers that follow it.

Lives on the event loop. Owns the calls in progress, each of which has one question at a time with the step thread. A
router that follows slowly is told less often, never more at once than there is.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable

from cluster.errors import Draining, Overloaded
from cluster.messages import MemberId, PrefixNews
from cluster.protocol import prefix_news
from prefill_worker.scheduling import commands
from tandem.v1 import worker_pb2

_PAUSE_S = 0.2  # between two messages of a call: what changes meanwhile comes in one
_MAX_FOLLOWERS = 64


class PrefixFeed:
    def __init__(self, member: MemberId, post: Callable[[commands.Command], None]) -> None:
        """`post` reaches the step thread."""
        self._member = member
        self._post = post
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[PrefixNews]] = {}  # one of each call that waits
        self._closed = asyncio.Event()
        self._num_followers = 0

    async def follow(self, request: worker_pb2.FollowPrefixesRequest) -> AsyncGenerator[worker_pb2.PrefixNews, None]:
        """Until the caller leaves, or the worker does. Raises Draining, Overloaded."""
        if self._num_followers >= _MAX_FOLLOWERS:
            raise Overloaded(f"{_MAX_FOLLOWERS} follow this worker's prefixes already")
        self._num_followers += 1
        try:
            since = request.since if request.member == str(self._member) else None
            while not self._closed.is_set():
                news = await self._next(since)
                for message in prefix_news.to_wire(news):
                    message.member = str(self._member)
                    yield message
                since = news.next_number
                await self._pause()
            raise Draining("this worker is leaving")
        finally:
            self._num_followers -= 1

    def on_told(self, event: commands.PrefixesTold) -> None:
        answer = self._answers.get(event.follower_id)
        if answer is not None and not answer.done():
            answer.set_result(event.news)

    def close(self) -> None:
        """Every call ends."""
        self._closed.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Draining("this worker is leaving"))

    async def _next(self, since: int | None) -> PrefixNews:
        follower_id = next(self._ids)
        answer: asyncio.Future[PrefixNews]
        answer = self._answers[follower_id] = asyncio.get_running_loop().create_future()
        self._post(commands.FollowPrefixes(follower_id, since))
        try:
            return await answer
        finally:
            del self._answers[follower_id]
            if not answer.done() or answer.cancelled():
                self._post(commands.UnfollowPrefixes(follower_id))

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_PAUSE_S):
                await self._closed.wait()
        except TimeoutError:
            pass
