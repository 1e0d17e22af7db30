"""The router's view of one worker."""

import asyncio
import itertools

from cluster.auth.keys import ClusterKeys
from cluster.auth.member_channel import open_member_channel
from cluster.clock import ManualClock
from cluster.member import Member
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from router.fleet.peer import Peer
from router.fleet.supervision import WorkerTimeouts
from router.fleet.worker_stream import RouterSide


async def test_a_ticket_given_up_after_the_channel_closed_stays_until_its_deadline_without_a_stack_trace() -> None:
    unhandled: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    channel = open_member_channel("127.0.0.1:1", keys=ClusterKeys(b"k" * 32), caller="r0@1")
    member = Member(id=MemberId("p0", "a1"), role=Role.PREFILL, address="127.0.0.1:1", model="m")
    timeouts = WorkerTimeouts(heartbeat_timeout_s=1.0, recovery_timeout_s=1.0)
    side = RouterSide(MemberId("r0", "1"), timeouts, itertools.count(1), lambda: None, Telemetry(), ManualClock())
    peer = Peer(member, channel, side, others=list)
    with peer.abandoned_unless_imported(b"ticket"):
        await channel.close()
    abandoning = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert len(abandoning) == 1
    await asyncio.wait(abandoning)
    assert abandoning[0].exception() is None
    assert not unhandled
