"""Publishes the cache events of this worker's prefix cache to the routers that subscribe.

Lives on the event loop. Owns the open subscriptions; each has at most one command at a time at the step thread, which
answers with all changes since the last answer. A slow subscriber therefore gets fewer, larger messages, and no queue
grows.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator

from cluster.errors import Draining, Overloaded
from cluster.messages import CacheEvents, MemberId
from cluster.protocol import report_wire
from engine.scheduling import cache_commands, commands
from engine.steps.questions import StepInbox
from tandem.internal.v1 import worker_pb2

_MIN_INTERVAL_S = 0.2  # between two messages of one subscription; changes in between are merged into one message
_MAX_SUBSCRIBERS = 64


class CacheEventPublisher:
    def __init__(self, member: MemberId, steps: StepInbox[commands.Command]) -> None:
        self._member = member
        self._steps = steps
        self._ids = itertools.count()
        self._asking: set[asyncio.Task[cache_commands.CacheEventsReady]] = set()  # one for each subscriber that waits
        self._closed = asyncio.Event()
        self._num_subscribers = 0

    async def subscribe(
        self, request: worker_pb2.SubscribeCacheEventsRequest
    ) -> AsyncGenerator[worker_pb2.CacheEvents, None]:
        """Yield messages until the subscriber cancels or the worker leaves. Raises Draining, Overloaded."""
        if self._num_subscribers >= _MAX_SUBSCRIBERS:
            raise Overloaded(f"this worker has {_MAX_SUBSCRIBERS} subscribers to its cache events, the most it allows")
        self._num_subscribers += 1
        try:
            since = request.since if request.member == str(self._member) else None
            while not self._closed.is_set():
                events = await self._next(since)
                for message in report_wire.cache_events_to_wire(events):
                    message.member = str(self._member)
                    yield message
                since = events.next_number
                await self._pause()
            raise Draining("this worker is draining")
        finally:
            self._num_subscribers -= 1

    def close(self) -> None:
        """End every subscription with Draining."""
        self._closed.set()
        for asking in self._asking:
            asking.cancel()

    async def _next(self, since: int | None) -> CacheEvents:
        """Wait for the next events and return them. Raises Draining when the worker leaves first."""
        subscriber_id = next(self._ids)
        asking = asyncio.create_task(self._steps.ask(cache_commands.AwaitCacheEvents(subscriber_id, since)))
        self._asking.add(asking)
        try:
            await asyncio.wait([asking])
            if asking.cancelled():
                raise Draining("this worker is draining")
            return asking.result().events
        finally:
            self._asking.discard(asking)
            if not asking.done() or asking.cancelled():
                asking.cancel()
                self._steps.post(cache_commands.CancelCacheEvents(subscriber_id))

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_MIN_INTERVAL_S):
                await self._closed.wait()
        except TimeoutError:
            pass
