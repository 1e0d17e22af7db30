"""Tests of the contract of every transport: the promises of a read, and that destroying a channel ends all writes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
import torch

from cluster.messages import Epoch
from engine.kv.pool import KvPool
from kvtransfer.memory import runs
from kvtransfer.transports.base import ExporterTransport, ImporterTransport, TransportError, negotiate
from kvtransfer.transports.shm import transport as shm
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.transport_rig import (
    EPOCH,
    NUM_BLOCKS,
    Rig,
    available,
    over_cuda_ipc,
    over_loopback,
    over_nccl,
    over_nixl,
    over_shm,
    over_shm_by_thread,
    over_tcp,
    over_tcp_by_thread,
    over_tls,
    read_by_thread,
)
from tests.loopback import Fault, FaultSchedule, LoopbackExporter, LoopbackImporter, LoopbackNetwork


@pytest.fixture(
    params=[
        over_loopback,
        over_tcp,
        over_tcp_by_thread,
        over_tls,
        over_shm,
        over_shm_by_thread,
        over_nixl,
        over_nccl,
        over_cuda_ipc,
    ],
    ids=["loopback", "tcp", "tcp by thread", "tcp with TLS", "shm", "shm by thread", "nixl", "nccl", "cuda_ipc"],
)
async def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    make: Callable[[KvPool, KvPool], tuple[ExporterTransport, ImporterTransport]] = request.param
    if make in (over_tcp_by_thread, over_shm_by_thread):
        read_by_thread(monkeypatch)
    source, target = random_pool(NUM_BLOCKS, seed=1), random_pool(NUM_BLOCKS, seed=2)
    exporter, importer = make(source, target)
    await exporter.start()
    yield Rig(source, target, exporter, importer)
    await importer.close()
    await exporter.close()
    source.close()
    target.close()


async def test_blocks_arrive_in_any_order_of_their_ids(rig: Rig) -> None:
    channel = await rig.importer.open_channel(EPOCH, rig.exporter.grant(EPOCH))
    untouched = rig.target.raw.clone()
    remote, local = [5, 6, 7, 23, 0, 2, 1], [9, 10, 11, 4, 3, 0, 1]
    await channel.read(remote, local)
    assert rig.arrived(remote, local)
    others = [block for block in range(NUM_BLOCKS) if block not in local]
    assert torch.equal(rig.target.raw[others], untouched[others])
    await channel.finish()


async def test_a_channel_serves_many_reads_and_the_next_hand_off(rig: Rig) -> None:
    for attempt in range(3):
        epoch = Epoch(EPOCH.exporter, EPOCH.ticket_id, attempt)
        channel = await rig.importer.open_channel(epoch, rig.exporter.grant(epoch))
        for block in range(4):
            await channel.read([block], [8 + block])
            assert rig.arrived([block], [8 + block])
        await channel.finish()
        rig.exporter.revoke(epoch)


async def test_many_hand_offs_read_at_once(rig: Rig) -> None:
    async def pull(number: int) -> None:
        epoch = Epoch(EPOCH.exporter, bytes([number]) * 16, 1)
        channel = await rig.importer.open_channel(epoch, rig.exporter.grant(epoch))
        await channel.read([number, 2 * number], [number, 12 + number])
        await channel.finish()

    await asyncio.gather(*(pull(number) for number in range(1, 12)))
    assert rig.arrived(list(range(1, 12)), list(range(1, 12)))


async def test_a_process_without_a_token_cannot_read_the_pool(rig: Rig) -> None:
    endpoint = bytearray(rig.exporter.grant(EPOCH))
    endpoint[0] ^= 1
    before = rig.target.raw.clone()
    with pytest.raises(TransportError):
        await rig.pull(bytes(endpoint))
    assert torch.equal(rig.target.raw, before)


async def test_a_revoked_epoch_cannot_come_in(rig: Rig) -> None:
    endpoint = rig.exporter.grant(EPOCH)
    rig.exporter.revoke(EPOCH)
    with pytest.raises(TransportError):
        await rig.pull(endpoint)


async def test_a_block_outside_the_pool_is_refused(rig: Rig) -> None:
    channel = await rig.importer.open_channel(EPOCH, rig.exporter.grant(EPOCH))
    with pytest.raises(TransportError):
        await channel.read([NUM_BLOCKS], [0])
    await channel.destroy()


async def test_a_failed_read_poisons_its_channel(rig: Rig) -> None:
    channel = await rig.importer.open_channel(EPOCH, rig.exporter.grant(EPOCH))
    await channel.destroy()
    with pytest.raises(TransportError):
        await channel.read([0], [0])
    await channel.destroy()  # once more does no harm
    await channel.finish()


async def test_destroying_the_channel_ends_a_cancelled_read(rig: Rig) -> None:
    channel = await rig.importer.open_channel(EPOCH, rig.exporter.grant(EPOCH))
    read = asyncio.create_task(channel.read(list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))))
    await asyncio.sleep(0)
    read.cancel()
    with suppress(asyncio.CancelledError):
        await read
    await channel.destroy()
    after = rig.target.raw.clone()
    rig.source.raw.zero_()
    another = await rig.importer.open_channel(EPOCH, rig.exporter.grant(EPOCH))
    await another.read([0], [0])  # a later message on the same path: what was on its way would have come before it
    assert torch.equal(rig.target.raw[1:], after[1:])


def test_the_best_common_transport_is_chosen() -> None:
    source = random_pool(2, seed=1)
    offered = over_tcp(source, source)[0], over_shm(source, source)[0]
    here = {"shm": shm.host_identity()}
    assert negotiate(["shm", "tcp"], here, offered) == (offered[1], offered[0])
    assert negotiate(["tcp", "shm", "tcp"], here, offered) == offered
    assert negotiate(["shm", "tcp"], {"shm": b"elsewhere"}, offered) == offered[:1]
    assert negotiate(["nccl"], here, offered) == ()


def test_runs_are_consecutive_on_both_sides() -> None:
    assert list(runs([1, 2, 3, 7, 8], [4, 5, 9, 1, 2])) == [(1, 4, 2), (3, 9, 1), (7, 1, 2)]
    assert list(runs([], [])) == []
    assert list(runs([3], [9])) == [(3, 9, 1)]


async def test_loopback_performs_its_faults_at_their_steps() -> None:
    source, target = random_pool(8, seed=1), random_pool(8, seed=2)
    network = LoopbackNetwork()
    exporter = LoopbackExporter(memory=source, network=network)
    faults = {1: Fault.CORRUPT, 2: Fault.DUPLICATE, 3: Fault.REORDER, 5: Fault.DELAY, 6: Fault.KILL}
    schedule = FaultSchedule(faults)
    importer = LoopbackImporter(memory=target, network=network, schedule=schedule)
    channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    await channel.read([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert torch.equal(target.raw[[0, 2, 3, 4]], source.raw[[0, 2, 3, 4]])
    assert not torch.equal(target.raw[1], source.raw[1])
    delayed = asyncio.create_task(channel.read([5], [5]))
    async with asyncio.timeout(5):
        await schedule.holding.wait()
    assert not delayed.done()
    schedule.resume()
    await delayed
    assert torch.equal(target.raw[5], source.raw[5])
    for _ in range(2):
        with pytest.raises(TransportError):
            await (await importer.open_channel(EPOCH, exporter.grant(EPOCH))).read([6], [6])
    await importer.close()


async def test_a_cancelled_loopback_read_writes_on_until_its_channel_is_destroyed() -> None:
    """Quarantine exists for this: a cancelled read may still write."""
    source, target = random_pool(2, seed=1), random_pool(2, seed=2)
    network = LoopbackNetwork()
    exporter = LoopbackExporter(memory=source, network=network)
    schedule = FaultSchedule({0: Fault.STOP})
    importer = LoopbackImporter(memory=target, network=network, schedule=schedule)
    channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    read = asyncio.create_task(channel.read([0], [0]))
    async with asyncio.timeout(5):
        await schedule.holding.wait()
    read.cancel()
    with suppress(asyncio.CancelledError):
        await read
    before = target.raw.clone()
    schedule.resume()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not torch.equal(target.raw, before)
    await importer.close()


@pytest.mark.parametrize("forced", ["shm,tcp", "tcp,shm", "tcp"])
def test_settings_force_transports_and_their_order(forced: str) -> None:
    found = available(random_pool(2, seed=1), forced)
    assert found.names == tuple(forced.split(","))
    assert tuple(transport.name for transport in found.exporters) == found.names
