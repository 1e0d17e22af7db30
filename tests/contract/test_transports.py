"""One contract for every transport: what a read promises, and what destroying a channel proves."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch

from cluster.config import TransferSettings
from cluster.errors import ConfigError
from cluster.messages import Epoch, MemberId
from engine.pool import KvPool
from kvtransfer.memory import PoolMemory
from kvtransfer.transports import nixl, shm, tcp
from kvtransfer.transports.available import Available, available_transports
from kvtransfer.transports.base import ExporterTransport, ImporterTransport, TransportError, TransportMeans, negotiate
from kvtransfer.transports.host_memory import runs
from kvtransfer.transports.loopback import Fault, FaultSchedule, LoopbackExporter, LoopbackImporter, LoopbackNetwork
from kvtransfer.transports.nccl_exporter import NcclExporter
from kvtransfer.transports.nccl_importer import NcclImporter
from kvtransfer.transports.nccl_pair import PairLimits
from kvtransfer.transports.shm import ShmExporter, ShmImporter
from kvtransfer.transports.tcp import TcpExporter, TcpImporter
from tests.contract.kv_pools import random_pool
from tests.contract.socket_nccl import SocketNccl

NUM_BLOCKS = 24
EPOCH = Epoch(MemberId("p0", "a1"), b"t" * 16, 1)


@dataclass
class Rig:
    source: KvPool
    target: KvPool
    exporter: ExporterTransport
    importer: ImporterTransport

    def arrived(self, remote: list[int], local: list[int]) -> bool:
        return torch.equal(self.target.raw[local], self.source.raw[remote])

    async def pull(self, endpoint: bytes) -> None:
        channel = await self.importer.open(EPOCH, endpoint)
        await channel.read([0], [0])


def _loopback(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    network = LoopbackNetwork()
    return LoopbackExporter(memory=source, network=network), LoopbackImporter(memory=target, network=network)


def _tcp(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    exporter = TcpExporter(memory=source, host="127.0.0.1", advertise_host="127.0.0.1", send_timeout_s=5.0)
    return exporter, TcpImporter(memory=target)


def _shm(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    return ShmExporter(memory=source), ShmImporter(memory=target)


def _nixl(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    if reason := nixl.unavailable(means(source)):
        pytest.skip(reason)
    return nixl.exporter(means(source)), nixl.importer(means(target))


def _nccl(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    """Everything but NCCL itself: what a GPU is needed for stands in test_nccl.py."""
    limits, library = PairLimits(transfer_s=5.0), SocketNccl()
    exporter = NcclExporter(memory=source, library=library, host="127.0.0.1", advertise_host="127.0.0.1", limits=limits)
    return exporter, NcclImporter(memory=target, library=library, limits=limits)


@pytest.fixture(params=[_loopback, _tcp, _shm, _nixl, _nccl], ids=["loopback", "tcp", "shm", "nixl", "nccl"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    make: Callable[[KvPool, KvPool], tuple[ExporterTransport, ImporterTransport]] = request.param
    source, target = random_pool(NUM_BLOCKS, seed=1), random_pool(NUM_BLOCKS, seed=2)
    exporter, importer = make(source, target)
    await exporter.start()
    yield Rig(source, target, exporter, importer)
    await importer.close()
    await exporter.close()
    source.close()
    target.close()


async def test_blocks_arrive_whatever_the_order_of_their_ids(rig: Rig) -> None:
    channel = await rig.importer.open(EPOCH, rig.exporter.admit(EPOCH))
    untouched = rig.target.raw.clone()
    remote, local = [5, 6, 7, 23, 0, 2, 1], [9, 10, 11, 4, 3, 0, 1]
    await channel.read(remote, local)
    assert rig.arrived(remote, local)
    others = [block for block in range(NUM_BLOCKS) if block not in local]
    assert torch.equal(rig.target.raw[others], untouched[others])
    await channel.release()


async def test_a_channel_serves_many_reads_and_the_next_hand_off(rig: Rig) -> None:
    for attempt in range(3):
        epoch = Epoch(EPOCH.exporter, EPOCH.ticket_id, attempt)
        channel = await rig.importer.open(epoch, rig.exporter.admit(epoch))
        for block in range(4):
            await channel.read([block], [8 + block])
            assert rig.arrived([block], [8 + block])
        await channel.release()
        rig.exporter.revoke(epoch)


async def test_many_hand_offs_read_at_once(rig: Rig) -> None:
    async def pull(number: int) -> None:
        epoch = Epoch(EPOCH.exporter, bytes([number]) * 16, 1)
        channel = await rig.importer.open(epoch, rig.exporter.admit(epoch))
        await channel.read([number, 2 * number], [number, 12 + number])
        await channel.release()

    await asyncio.gather(*(pull(number) for number in range(1, 12)))
    assert rig.arrived(list(range(1, 12)), list(range(1, 12)))


async def test_a_stranger_cannot_read_the_pool(rig: Rig) -> None:
    endpoint = bytearray(rig.exporter.admit(EPOCH))
    endpoint[0] ^= 1
    before = rig.target.raw.clone()
    with pytest.raises(TransportError):
        await rig.pull(bytes(endpoint))
    assert torch.equal(rig.target.raw, before)


async def test_a_revoked_epoch_cannot_come_in(rig: Rig) -> None:
    endpoint = rig.exporter.admit(EPOCH)
    rig.exporter.revoke(EPOCH)
    with pytest.raises(TransportError):
        await rig.pull(endpoint)


async def test_a_block_outside_the_pool_is_refused(rig: Rig) -> None:
    channel = await rig.importer.open(EPOCH, rig.exporter.admit(EPOCH))
    with pytest.raises(TransportError):
        await channel.read([NUM_BLOCKS], [0])
    await channel.destroy()


async def test_a_failed_read_poisons_its_channel(rig: Rig) -> None:
    channel = await rig.importer.open(EPOCH, rig.exporter.admit(EPOCH))
    await channel.destroy()
    with pytest.raises(TransportError):
        await channel.read([0], [0])
    await channel.destroy()  # once more does no harm
    await channel.release()


async def test_destroying_the_channel_of_a_cancelled_read_proves_it_quiet(rig: Rig) -> None:
    channel = await rig.importer.open(EPOCH, rig.exporter.admit(EPOCH))
    read = asyncio.create_task(channel.read(list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))))
    await asyncio.sleep(0)
    read.cancel()
    with suppress(asyncio.CancelledError):
        await read
    await channel.destroy()
    after = rig.target.raw.clone()
    rig.source.raw.zero_()
    another = await rig.importer.open(EPOCH, rig.exporter.admit(EPOCH))
    await another.read([0], [0])  # a later message on the same path: what was on its way would have come before it
    assert torch.equal(rig.target.raw[1:], after[1:])


async def test_a_tcp_exporter_that_stopped_is_left_by_destroying_the_channel() -> None:
    """It accepts and never answers: no read of it ends by itself."""
    target = random_pool(4, seed=3)
    importer = TcpImporter(memory=target)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = tcp._ENDPOINT.pack(b"k" * 16, silent.getsockname()[1]) + b"127.0.0.1"
        channel = await importer.open(EPOCH, endpoint)
        read = asyncio.create_task(channel.read([0], [0]))
        peer, _ = await asyncio.to_thread(silent.accept)
        with peer:
            assert await asyncio.to_thread(peer.recv, 4) == b"TKV1"
            assert not read.done()
            await channel.destroy()
            with pytest.raises(TransportError):
                await read
    await importer.close()


async def test_an_idle_tcp_connection_that_ended_is_not_used_again() -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    importer = TcpImporter(memory=target)
    for _ in range(2):
        exporter = TcpExporter(memory=source, host="127.0.0.1", advertise_host="127.0.0.1", send_timeout_s=5.0)
        await exporter.start()
        channel = await importer.open(EPOCH, exporter.admit(EPOCH))
        await channel.read([1], [2])
        await channel.release()
        await exporter.close()
    await importer.close()


async def test_the_importer_maps_the_pool_for_reading_only() -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, importer = ShmExporter(memory=source), ShmImporter(memory=target)
    await exporter.start()
    channel = await importer.open(EPOCH, exporter.admit(EPOCH))
    with pytest.raises(ValueError, match="read-only"):
        channel._remote[0, 0] = 1
    await importer.close()
    await exporter.close()


async def test_the_end_of_the_exporter_ends_the_mapping_of_its_pool() -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, importer = ShmExporter(memory=source), ShmImporter(memory=target)
    await exporter.start()
    channel = await importer.open(EPOCH, exporter.admit(EPOCH))
    await channel.release()
    assert importer.num_mappings == 1
    endpoint = exporter.admit(EPOCH)
    await exporter.close()
    with pytest.raises(TransportError):
        await importer.open(EPOCH, endpoint)
    assert importer.num_mappings == 0
    await importer.close()


def test_shm_is_offered_only_where_both_see_the_same_files() -> None:
    source = random_pool(2, seed=1)
    exporter = ShmExporter(memory=source)
    assert exporter.reachable(shm.host_identity())
    assert not exporter.reachable(b"another host")
    assert not exporter.reachable(b"")


def test_what_both_have_is_taken_best_first() -> None:
    source = random_pool(2, seed=1)
    offered = _tcp(source, source)[0], _shm(source, source)[0]
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
    channel = await importer.open(EPOCH, exporter.admit(EPOCH))
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
            await (await importer.open(EPOCH, exporter.admit(EPOCH))).read([6], [6])
    await importer.close()


async def test_a_cancelled_loopback_read_writes_on_until_its_channel_is_destroyed() -> None:
    """What quarantine is for: a cancelled read is not a quiet one."""
    source, target = random_pool(2, seed=1), random_pool(2, seed=2)
    network = LoopbackNetwork()
    exporter = LoopbackExporter(memory=source, network=network)
    schedule = FaultSchedule({0: Fault.STOP})
    importer = LoopbackImporter(memory=target, network=network, schedule=schedule)
    channel = await importer.open(EPOCH, exporter.admit(EPOCH))
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


def means(memory: PoolMemory) -> TransportMeans:
    return TransportMeans(
        member=EPOCH.exporter, memory=memory, host="127.0.0.1", advertise_host="127.0.0.1", timeout_s=5.0
    )


def available(memory: PoolMemory, kv_transports: str = "auto") -> Available:
    return available_transports(TransferSettings(kv_transports=kv_transports), means(memory))


@pytest.mark.parametrize("forced", ["shm,tcp", "tcp,shm", "tcp"])
def test_settings_force_transports_and_their_order(forced: str) -> None:
    found = available(random_pool(2, seed=1), forced)
    assert found.names == tuple(forced.split(","))
    assert tuple(transport.name for transport in found.exporters) == found.names


def test_a_pool_that_is_no_file_is_not_offered_as_shared_memory() -> None:
    pool = random_pool(2, seed=1)
    elsewhere = OnDevice(pool.num_blocks, pool.block_bytes, pool.raw, None)
    found = available(elsewhere)
    assert "shm" not in found.names and "tcp" in found.names
    assert "not in this host's memory" in found.missing["shm"]
    with pytest.raises(ConfigError, match="shm: the pool is not in this host's memory"):
        available(elsewhere, "shm,tcp")


@dataclass
class OnDevice:
    """PoolMemory without a file, as a GPU's pool is."""

    num_blocks: int
    block_bytes: int
    raw: torch.Tensor
    memfd: int | None
