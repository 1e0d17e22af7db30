"""A decode worker that leaves waits until its last messages to its routers are sent."""

import asyncio
from contextlib import aclosing

from cluster.messages import MemberId
from decode_worker.streams import RouterStreams
from tandem.internal.v1 import worker_pb2

_ROUTER = MemberId("router", "1")
_LAST = worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(step=7))


async def _is_pending(work: "asyncio.Task[None]") -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not work.done()


async def test_a_leaving_worker_waits_until_its_last_message_is_written() -> None:
    streams, connection = RouterStreams(grace_s=60.0, on_gone=lambda _: None), object()
    stream = streams.connect(_ROUTER, connection)
    streams.send(_ROUTER, _LAST)
    sent = asyncio.create_task(streams.until_all_sent())
    async with aclosing(stream.drain(connection)) as read:
        assert await _is_pending(sent)
        assert await anext(read) == _LAST
        assert await _is_pending(sent)
        following = asyncio.ensure_future(anext(read))  # gRPC asks for the next one when it has written this one
        async with asyncio.timeout(10):
            await sent
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_leaving_worker_waits_for_a_router_that_may_reconnect_but_not_for_a_removed_one() -> None:
    streams, connection = RouterStreams(grace_s=60.0, on_gone=lambda _: None), object()
    streams.connect(_ROUTER, connection)
    streams.send(_ROUTER, _LAST)
    streams.disconnect(_ROUTER, connection)
    sent = asyncio.create_task(streams.until_all_sent())
    assert await _is_pending(sent)
    streams.close()
    async with asyncio.timeout(10):
        await sent
