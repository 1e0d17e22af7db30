"""Every transport between two pools in one process, as the contract tests run them."""

from dataclasses import dataclass

import pytest
import torch

from cluster.messages import Epoch, MemberId
from cluster.serving.tls import ClusterTls
from cluster.settings.worker_settings import TransferSettings
from engine.kv.pool import KvPool
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.available import Available, available_transports
from kvtransfer.transports.base import ExporterTransport, ImporterTransport, TransportSetup
from kvtransfer.transports.cuda.transport import CudaIpcExporter, CudaIpcImporter
from kvtransfer.transports.nccl.communicator_life import CommunicatorLimits
from kvtransfer.transports.nccl.exporting import NcclExporter
from kvtransfer.transports.nccl.transport import NcclImporter
from kvtransfer.transports.nixl import transport as nixl
from kvtransfer.transports.shm import transport as shm
from kvtransfer.transports.shm.transport import ShmExporter, ShmImporter
from kvtransfer.transports.tcp import transport as tcp
from kvtransfer.transports.tcp.transport import TcpExporter, TcpImporter
from tests.certificates import certificates_of_the_run
from tests.contract.rigs.host_access import ExportedPool, HostAccess
from tests.contract.rigs.proofs import PROOFS
from tests.contract.rigs.socket_nccl import SocketNccl
from tests.loopback import LoopbackExporter, LoopbackImporter, LoopbackNetwork

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


def read_by_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read on a thread, as long reads do."""
    monkeypatch.setattr(tcp, "SHORT_BYTES", 0)
    monkeypatch.setattr(shm, "SHORT_BYTES", 0)


def over_loopback(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    network = LoopbackNetwork()
    return LoopbackExporter(memory=source, network=network), LoopbackImporter(memory=target, network=network)


def over_tcp(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    exporter = TcpExporter(
        memory=source, proofs=PROOFS, host="127.0.0.1", advertise_host="127.0.0.1", send_timeout_s=5.0
    )
    return exporter, TcpImporter(memory=target, proofs=PROOFS)


def over_tcp_by_thread(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    return over_tcp(source, target)


def over_tls(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    tls = certificates_of_the_run().loaded()
    return tls_exporter(source, tls), TcpImporter(memory=target, proofs=PROOFS, tls=tls.wrap_client)


def tls_exporter(source: KvPool, tls: ClusterTls) -> TcpExporter:
    return TcpExporter(
        memory=source,
        proofs=PROOFS,
        host="127.0.0.1",
        advertise_host="127.0.0.1",
        send_timeout_s=5.0,
        tls=tls.server_context,
    )


def over_shm(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    return ShmExporter(memory=source, proofs=PROOFS), ShmImporter(memory=target, proofs=PROOFS)


def over_shm_by_thread(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    return over_shm(source, target)


def over_nixl(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    if reason := nixl.unavailable(setup_of(source)):
        pytest.skip(reason)
    return nixl.exporter(setup_of(source)), nixl.importer(setup_of(target))


def over_nccl(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    """Return the NCCL transport over sockets. Tests that need a GPU are in test_nccl.py."""
    limits, library = CommunicatorLimits(transfer_s=30.0), SocketNccl()
    exporter = NcclExporter(
        memory=source, proofs=PROOFS, library=library, host="127.0.0.1", advertise_host="127.0.0.1", limits=limits
    )
    return exporter, NcclImporter(memory=target, proofs=PROOFS, library=library, limits=limits)


def over_cuda_ipc(source: KvPool, target: KvPool) -> tuple[ExporterTransport, ImporterTransport]:
    """Return the cuda_ipc transport over a file in host memory. Tests that need a GPU are in test_cuda_ipc.py."""
    exporter = CudaIpcExporter(memory=ExportedPool(source), proofs=PROOFS, access=HostAccess(source))
    return exporter, CudaIpcImporter(memory=target, proofs=PROOFS, access=HostAccess(target))


def setup_of(memory: PoolMemory) -> TransportSetup:
    return TransportSetup(
        member=EPOCH.exporter,
        proofs=PROOFS,
        memory=memory,
        host="127.0.0.1",
        advertise_host="127.0.0.1",
        timeout_s=30.0,
    )


def available(memory: PoolMemory, kv_transports: str = "auto") -> Available:
    return available_transports(TransferSettings(kv_transports=kv_transports), setup_of(memory))
