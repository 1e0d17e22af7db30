"""One contract for every transport: what a read promises, and what destroying a channel proves."""

import asyncio
import os
import socket
import ssl
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError
from cluster.messages import Epoch, MemberId
from cluster.settings.transfer_settings import TransferSettings
from engine.kv.pool import KvPool
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.available import Available, available_transports
from kvtransfer.transports.base import ExporterTransport, ImporterTransport, TransportError, TransportSetup, negotiate
from kvtransfer.transports.cuda.transport import CudaIpcExporter, CudaIpcImporter
from kvtransfer.transports.host_memory import runs
from kvtransfer.transports.nccl.communicator_life import CommunicatorLimits
from kvtransfer.transports.nccl.exporting import NcclExporter
from kvtransfer.transports.nccl.transport import NcclImporter
from kvtransfer.transports.nixl import transport as nixl
from kvtransfer.transports.shm import transport as shm
from kvtransfer.transports.shm.transport import ShmExporter, ShmImporter
from kvtransfer.transports.tcp import transport as tcp
from kvtransfer.transports.tcp.exporting import ANNOUNCEMENT, ANSWER, MAGIC, pack_endpoint
from kvtransfer.transports.tcp.transport import TcpExporter, TcpImporter
from tests.certificates import Certificates, load, make_certificates
from tests.contract.host_access import ExportedPool, HostAccess
from tests.contract.kv_pools import random_pool
from tests.contract.socket_nccl import SocketNccl
from tests.loopback import Fault, FaultSchedule, LoopbackExporter, LoopbackImporter, LoopbackNetwork

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
        channel = await self.importer.open_channel(EPOCH, endpoint)
        await channel.read([0], [0])


def _read_by_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read on a thread, as long reads do."""
    monkeypatch.setattr(tcp, "SHORT_BYTES", 0)
    monkeypatch.setattr(shm, "SHORT_BYTES", 0)


def _loopback(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    network = LoopbackNetwork()
    return LoopbackExporter(memory=source, network=network), LoopbackImporter(memory=target, network=network)


def _tcp(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    exporter = TcpExporter(memory=source, host="127.0.0.1", advertise_host="127.0.0.1", send_timeout_s=5.0)
    return exporter, TcpImporter(memory=target)


def _tcp_by_thread(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    return _tcp(source, target)


def _tls(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    certificates = _certificates().loaded()
    exporter = TcpExporter(
        memory=source,
        host="127.0.0.1",
        advertise_host="127.0.0.1",
        send_timeout_s=5.0,
        tls=certificates.server_context(),
    )
    return exporter, TcpImporter(memory=target, tls=certificates.client_context())


@lru_cache
def _certificates() -> Certificates:
    return make_certificates(Path(tempfile.mkdtemp(prefix="tandem-tls-")))


def _shm(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    return ShmExporter(memory=source), ShmImporter(memory=target)


def _shm_by_thread(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    return _shm(source, target)


def _nixl(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    if reason := nixl.unavailable(means(source)):
        pytest.skip(reason)
    return nixl.exporter(means(source)), nixl.importer(means(target))


def _nccl(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    """Return the NCCL transport over sockets. Tests that need a GPU are in test_nccl.py."""
    limits, library = CommunicatorLimits(transfer_s=30.0), SocketNccl()
    exporter = NcclExporter(memory=source, library=library, host="127.0.0.1", advertise_host="127.0.0.1", limits=limits)
    return exporter, NcclImporter(memory=target, library=library, limits=limits)


def _cuda_ipc(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    """Return the cuda_ipc transport over a file in host memory. Tests that need a GPU are in test_cuda_ipc.py."""
    exporter = CudaIpcExporter(memory=ExportedPool(source), access=HostAccess(source))
    return exporter, CudaIpcImporter(memory=target, access=HostAccess(target))


@pytest.fixture(
    params=[_loopback, _tcp, _tcp_by_thread, _tls, _shm, _shm_by_thread, _nixl, _nccl, _cuda_ipc],
    ids=["loopback", "tcp", "tcp by thread", "tcp with TLS", "shm", "shm by thread", "nixl", "nccl", "cuda_ipc"],
)
async def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    make: Callable[[KvPool, KvPool], tuple[ExporterTransport, ImporterTransport]] = request.param
    if make in (_tcp_by_thread, _shm_by_thread):
        _read_by_thread(monkeypatch)
    source, target = random_pool(NUM_BLOCKS, seed=1), random_pool(NUM_BLOCKS, seed=2)
    exporter, importer = make(source, target)
    await exporter.start()
    yield Rig(source, target, exporter, importer)
    await importer.close()
    await exporter.close()
    source.close()
    target.close()


async def test_blocks_arrive_whatever_the_order_of_their_ids(rig: Rig) -> None:
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


@pytest.mark.parametrize("is_short", [True, False])
async def test_destroying_the_channel_ends_a_read_of_a_stopped_tcp_exporter(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter accepts and never answers, so no read ends by itself."""
    if not is_short:
        _read_by_thread(monkeypatch)
    target = random_pool(4, seed=3)
    importer = TcpImporter(memory=target)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = pack_endpoint(b"k" * 16, "127.0.0.1", silent.getsockname()[1])
        channel = await importer.open_channel(EPOCH, endpoint)
        read = asyncio.create_task(channel.read([0], [0]))
        peer, _ = await asyncio.to_thread(silent.accept)
        with peer:
            assert await asyncio.to_thread(peer.recv, 4) == b"TKV1"
            assert not read.done()
            await channel.destroy()
            with pytest.raises(TransportError):
                await read
    await importer.close()


@pytest.mark.parametrize("is_short", [True, False])
async def test_a_tcp_exporter_that_stops_in_mid_answer_writes_nothing_once_the_channel_is_destroyed(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_short:
        _read_by_thread(monkeypatch)
    target = random_pool(4, seed=3, layers=600)
    importer = TcpImporter(memory=target)
    with socket.create_server(("127.0.0.1", 0)) as half:
        channel = await importer.open_channel(EPOCH, pack_endpoint(b"k" * 16, "127.0.0.1", half.getsockname()[1]))
        read = asyncio.create_task(channel.read([0], [1]))
        peer, _ = await asyncio.to_thread(half.accept)
        with peer:
            await asyncio.to_thread(peer.recv, ANNOUNCEMENT.size)
            answer = ANSWER.pack(MAGIC, EPOCH.ticket_id, EPOCH.attempt, 1, False, target.block_bytes)
            await asyncio.to_thread(peer.sendall, answer + b"x" * 100_000)
            async with asyncio.timeout(5):
                while bytes(target.raw[1, :10].numpy()) != b"x" * 10:  # noqa: ASYNC110 - memory has no events
                    await asyncio.sleep(0)
            await channel.destroy()
            before = target.raw.clone()
            with suppress(OSError):
                await asyncio.to_thread(peer.sendall, b"y" * 100)
            with pytest.raises(TransportError):
                await read
    assert torch.equal(target.raw, before)
    await importer.close()


async def test_a_long_read_is_in_order_whatever_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than one system call takes, in pools larger than any socket's buffer."""
    source, target = random_pool(3000, seed=1, layers=16), random_pool(3000, seed=2, layers=16)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(3)).tolist()
    for make in (_tcp, _shm, _tls):
        target.raw.zero_()
        exporter, importer = make(source, target)
        await exporter.start()
        channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        await channel.read(order, range(3000))
        assert torch.equal(target.raw, source.raw[order])
        await channel.finish()
        await importer.close()
        await exporter.close()


@pytest.mark.parametrize("who", ["plain", "of another authority", "without certificate"])
async def test_a_peer_without_a_certificate_of_the_cluster_cannot_read_over_tcp(who: str) -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, _ = _tls(source, target)
    await exporter.start()
    certificates = _certificates()
    contexts = {
        "plain": None,
        "of another authority": load(certificates.stranger, certificates.other_authority).client_context(),
        "without certificate": ssl.create_default_context(cafile=str(certificates.authority.cert)),
    }
    importer = TcpImporter(memory=target, tls=contexts[who])
    before = target.raw.clone()
    with pytest.raises(TransportError):
        await _open_and_read(importer, exporter.grant(EPOCH))
    assert torch.equal(target.raw, before)
    await importer.close()
    await exporter.close()


async def _open_and_read(importer: TcpImporter, endpoint: bytes) -> None:
    """With TLS 1.3 the importer detects only at its first read that it was refused."""
    channel = await importer.open_channel(EPOCH, endpoint)
    await channel.read([0], [0])


async def test_an_importer_with_tls_reads_only_from_exporters_with_tls() -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, _ = _tcp(source, target)
    await exporter.start()
    importer = TcpImporter(memory=target, tls=_certificates().loaded().client_context())
    with pytest.raises(TransportError):
        await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    await importer.close()
    await exporter.close()


async def test_an_idle_tcp_connection_that_ended_is_neither_used_again_nor_kept() -> None:
    """A restarted exporter has a new connection, and kept old ones would accumulate."""
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    importer = TcpImporter(memory=target)
    for _ in range(3):
        exporter = TcpExporter(memory=source, host="127.0.0.1", advertise_host="127.0.0.1", send_timeout_s=5.0)
        await exporter.start()
        channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        await channel.read([1], [2])
        await channel.finish()
        await exporter.close()
    assert len(importer._idle) == 1
    await importer.close()


async def test_the_importer_maps_the_pool_for_reading_only() -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, importer = ShmExporter(memory=source), ShmImporter(memory=target)
    await exporter.start()
    channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    assert channel._pool is not None
    with pytest.raises(ValueError, match="read-only"):
        channel._pool.memory[0, 0] = 1
    await importer.close()
    await exporter.close()


async def test_the_end_of_the_exporter_ends_the_mapping_of_its_pool() -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, importer = ShmExporter(memory=source), ShmImporter(memory=target)
    await exporter.start()
    channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    assert channel._pool is not None
    mapped = weakref.ref(channel._pool.memory)
    await channel.finish()
    assert importer.num_mappings == 1 and mapped() is not None
    endpoint = exporter.grant(EPOCH)
    await exporter.close()
    with pytest.raises(TransportError):
        await importer.open_channel(EPOCH, endpoint)
    assert importer.num_mappings == 0 and mapped() is None, "a reference to the channel keeps no pool mapped"
    await importer.close()


def test_shm_is_offered_only_if_both_workers_see_the_same_files() -> None:
    source = random_pool(2, seed=1)
    exporter = ShmExporter(memory=source)
    assert exporter.reachable(shm.host_identity())
    assert not exporter.reachable(b"another host")
    assert not exporter.reachable(b"")


def test_the_best_common_transport_is_chosen() -> None:
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


def means(memory: PoolMemory) -> TransportSetup:
    return TransportSetup(
        member=EPOCH.exporter, memory=memory, host="127.0.0.1", advertise_host="127.0.0.1", timeout_s=30.0
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
    elsewhere = WithFile(pool.num_blocks, pool.block_bytes, pool.raw, None)
    found = available(elsewhere)
    assert "shm" not in found.names and "tcp" in found.names
    assert "not in this host's memory" in found.missing["shm"]
    with pytest.raises(ConfigError, match="shm: the pool is not in this host's memory"):
        available(elsewhere, "shm,tcp")


async def test_a_pool_that_its_exporter_could_truncate_is_not_mapped() -> None:
    """Reading past the new end of a file that was cut ends the reading process with SIGBUS."""
    source, target = random_pool(2, seed=1), random_pool(2, seed=2)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, source.num_blocks * source.block_bytes)
    exporter = ShmExporter(memory=WithFile(source.num_blocks, source.block_bytes, source.raw, unsealed))
    importer = ShmImporter(memory=target)
    await exporter.start()
    try:
        with pytest.raises(TransportError, match="not sealed"):
            await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        assert importer.num_mappings == 0
    finally:
        await importer.close()
        await exporter.close()
        os.close(unsealed)


@dataclass
class WithFile:
    """PoolMemory with another file, or without one like a GPU's pool."""

    num_blocks: int
    block_bytes: int
    raw: torch.Tensor
    memfd: int | None
