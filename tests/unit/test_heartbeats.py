"""Tests of the heartbeats that routers receive in a separate call."""

from tandem.internal.v1 import worker_pb2
from worker.heartbeats import HeartbeatFeed


async def test_a_router_that_reads_slowly_gets_only_the_latest_heartbeat() -> None:
    feed = HeartbeatFeed()
    feed.beat(worker_pb2.Heartbeat(step=1))
    calls = [feed.follow(), feed.follow()]
    assert [(await anext(call)).step for call in calls] == [1, 1]
    feed.beat(worker_pb2.Heartbeat(step=2))
    assert (await anext(calls[0])).step == 2
    feed.beat(worker_pb2.Heartbeat(step=3))
    assert [(await anext(call)).step for call in calls] == [3, 3]


async def test_a_draining_worker_ends_the_heartbeat_call() -> None:
    feed = HeartbeatFeed()
    feed.beat(worker_pb2.Heartbeat(step=1))
    call = feed.follow()
    await anext(call)
    feed.close()
    assert [heartbeat.step async for heartbeat in call] == []
