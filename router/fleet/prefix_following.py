"""Follows what every prefill worker says of its prefix cache, so that requests go to those that have their beginning.

Owns one call per worker, opened anew after every loss, and what the index knows of it: that ends with the worker. A
worker that cannot be followed is a worker of which nothing is known; nothing else depends on it.
"""

import asyncio
import logging

import grpc

from cluster.errors import InvalidRequest, MalformedMessage
from cluster.member import Member
from cluster.protocol import prefix_news
from router.policies.prefix_index import PrefixIndex
from router.policies.prefix_memory import PrefixMemory
from tandem.v1 import worker_pb2, worker_pb2_grpc

_LOG = logging.getLogger("tandem.router.prefixes")
_CALL_S = 300.0  # then it is opened anew, and goes on where it was
_RETRY_PAUSE_S = 1.0


class PrefixFollowing:
    def __init__(self, index: PrefixIndex, memory: PrefixMemory) -> None:
        """`memory` also holds what is only believed: evictions end that as well."""
        self._index = index
        self._memory = memory

    async def follow(self, worker: Member, channel: grpc.aio.Channel) -> None:
        """Until cancelled."""
        stub, told = worker_pb2_grpc.WorkerStub(channel), ""
        try:
            while True:
                detail = await self._listen(worker, stub)
                if detail != told:
                    _LOG.info("prefixes are asked for anew", extra={"worker": str(worker.id), "detail": detail})
                told = detail
                await asyncio.sleep(_RETRY_PAUSE_S)
        finally:
            self._index.forget(worker.id)

    async def _listen(self, worker: Member, stub: worker_pb2_grpc.WorkerStub) -> str:
        """One call, to its end; why it ended."""
        since = self._index.next_number(worker.id)
        member = str(worker.id) if since is not None else ""
        request = worker_pb2.FollowPrefixesRequest(member=member, since=since or 0)
        call = stub.FollowPrefixes(request, timeout=_CALL_S)
        try:
            async for message in call:
                if not self._take(worker, message):
                    return "events are missing"
        except grpc.aio.AioRpcError as error:
            return str(error.code())
        except (InvalidRequest, MalformedMessage) as error:
            return error.message
        finally:
            call.cancel()
        return "the worker ended it"

    def _take(self, worker: Member, message: worker_pb2.PrefixNews) -> bool:
        """Raises InvalidRequest, MalformedMessage."""
        if message.member not in ("", str(worker.id)):
            self._index.forget(worker.id)
            raise InvalidRequest(f"{message.member} answers at its address")
        news = prefix_news.from_wire(message)
        self._memory.forget(news.evicted, worker.id)
        max_blocks = worker.capacity.num_blocks if worker.capacity is not None else 0
        return self._index.apply(worker.id, news, max_blocks=max_blocks)
