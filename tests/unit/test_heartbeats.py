"""Heartbeats that routers follow by a call of their own."""

from cluster.observe.heartbeats import HeartbeatFeed
from tandem.v1 import worker_pb2


async def test_a_router_that_reads_slowly_hears_the_latest_heartbeat_only() -> None:
    feed = HeartbeatFeed()
    feed.beat(worker_pb2.Heartbeat(step=1))
    calls = [feed.follow(), feed.follow()]
    assert [(await anext(call)).step for call in calls] == [1, 1]
    feed.beat(worker_pb2.Heartbeat(step=2))
    assert (await anext(calls[0])).step == 2
    feed.beat(worker_pb2.Heartbeat(step=3))
    assert [(await anext(call)).step for call in calls] == [3, 3]


async def test_a_worker_that_leaves_ends_the_call() -> None:
    feed = HeartbeatFeed()
    feed.beat(worker_pb2.Heartbeat(step=1))
    call = feed.follow()
    await anext(call)
    feed.close()
    assert [heartbeat.step async for heartbeat in call] == []
