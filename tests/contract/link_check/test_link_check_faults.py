"""Tests of link checks that are cancelled, once or twice, or fail at any await: blocks that are not proven quiet stay
in quarantine until they are, and no channel stays open.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from cluster.messages import Epoch
from kvtransfer import link_check as probe_module
from kvtransfer.transports.base import Channel
from tandem.internal.v1 import worker_pb2
from tests.contract.link_check.link_check_rig import DEADLINE_S, Rig, probe_rig
from tests.contract.rigs.handoff_parts import EXPORTER
from tests.faults.injection import AwaitFaults, When


class _Turn:
    """A stand-in whose calls each take a turn of the event loop."""

    name = "tcp"

    def __init__(self) -> None:
        self.open_channels: set[_Channel] = set()
        self.may_end = asyncio.Event()

    def endpoint(self) -> bytes:
        return b""

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> Channel:
        await asyncio.sleep(0)
        channel = _Channel(self)
        self.open_channels.add(channel)
        return channel

    async def close(self) -> None:
        assert not self.open_channels

    @property
    def may_be_written(self) -> set[int]:
        return {block_id for channel in self.open_channels for block_id in channel.reading}


class _Channel:
    """A channel whose cancelled read may still write until the channel has been destroyed."""

    def __init__(self, transport: _Turn) -> None:
        self._transport = transport
        self.reading: set[int] = set()

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        self.reading = set(local_block_ids)
        await asyncio.sleep(0)
        self.reading = set()

    async def destroy(self) -> None:
        if self.reading:
            await self._transport.may_end.wait()
        await asyncio.sleep(0)
        self._transport.open_channels.discard(self)

    async def finish(self) -> None:
        assert not self.reading
        await self.destroy()


async def _cut_off(rig: Rig, transport: _Turn, faults: AwaitFaults) -> None:
    """End one measurement by an injected fault, and check that blocks that may still be written are in quarantine."""
    probe = rig.probe()
    request = worker_pb2.CheckLinkRequest(exporter=str(EXPORTER), address=rig.address, max_blocks=2)
    transport.may_end.clear()
    faults.install()
    with contextlib.suppress(Exception, asyncio.CancelledError):
        await asyncio.create_task(probe.measure(request))
    faults.disarm()
    quarantined = {
        block for block in range(rig.blocks.pool.num_blocks) if rig.blocks.pool.state(block) == "quarantined"
    }
    assert transport.may_be_written <= quarantined
    assert bool(list(probe.owners())) == bool(quarantined)
    transport.may_end.set()
    async with asyncio.timeout(DEADLINE_S):
        while probe._quiet_tasks:
            await asyncio.wait(tuple(probe._quiet_tasks))
            await asyncio.sleep(0)  # their callbacks
    assert not transport.open_channels
    assert not list(probe.owners()) and not rig.unhealthy
    rig.check()


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("error", [asyncio.CancelledError, RuntimeError])
async def test_a_link_check_that_ends_at_any_await_frees_no_block_under_read(
    error: type[BaseException], when: When, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "_QUIET_S", 0.001)
    transport = _Turn()
    async with probe_rig("tcp", importer_sides=[transport]) as rig:
        num_points = at = 0
        while at <= num_points:
            faults = AwaitFaults("kvtransfer/link_check.py:LinkCheck.measure", at - 1, error, when)
            await _cut_off(rig, transport, faults)
            num_points = max(num_points, faults.num_awaits)
            at += 1
    assert num_points >= 10, "the reservation, the call, the channel, the reads, their end"
