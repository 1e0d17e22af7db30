"""A router that does not read costs its decode worker a bounded number of bytes, and costs other routers nothing."""

import asyncio
from contextlib import aclosing

from cluster.messages import MemberId
from decode_worker.streams import RouterStreams
from tandem.internal.v1 import worker_pb2

_STOPPED, _READING = MemberId("stopped", "1"), MemberId("reading", "1")
_STEP = worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(step=1, token_ids=bytes(100_000)))


def _beat(step: int) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat(step=step))


async def test_only_a_router_that_does_not_read_is_dropped_after_32_mib_of_waiting_messages() -> None:
    gone: list[MemberId] = []
    streams = RouterStreams(grace_s=60.0, on_gone=gone.append)
    streams.connect(_STOPPED, object())
    reader = object()
    reading = streams.connect(_READING, reader)
    most = 0
    async with aclosing(reading.drain(reader)) as read:
        for _ in range(1000):
            for router in (_STOPPED, _READING):
                streams.send(router, _STEP)
            assert await anext(read) == _STEP
            most = max(most, streams.waiting_bytes)
    assert gone == [_STOPPED]
    assert 30 << 20 < most < 34 << 20
    assert streams.waiting_bytes == 0
    assert streams.get(_READING) is reading


async def test_a_router_that_does_not_read_gets_only_the_latest_heartbeat() -> None:
    streams = RouterStreams(grace_s=60.0, on_gone=lambda _: None)
    connection = object()
    stream = streams.connect(_STOPPED, connection)
    for step in range(100_000):
        streams.beat(_beat(step))
    assert streams.waiting_bytes == 0
    streams.send(_STOPPED, _STEP)
    async with asyncio.timeout(10), aclosing(stream.drain(connection)) as said:
        assert [await anext(said), await anext(said)] == [_beat(99_999), _STEP]


async def test_a_router_that_connects_gets_the_latest_heartbeat_at_once() -> None:
    streams = RouterStreams(grace_s=60.0, on_gone=lambda _: None)
    for step in range(3):
        streams.beat(_beat(step))
    connection = object()
    stream = streams.connect(_READING, connection)
    async with asyncio.timeout(10), aclosing(stream.drain(connection)) as said:
        assert await anext(said) == _beat(2)
