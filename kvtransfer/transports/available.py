"""Which transports this process has, out of those that its settings allow, best first."""

from collections.abc import Callable

from cluster.config import TransferSettings
from kvtransfer.memory import PoolMemory
from kvtransfer.transports import shm, tcp
from kvtransfer.transports.base import ExporterTransport, ImporterTransport


def exporter_transports(
    settings: TransferSettings, memory: PoolMemory, *, host: str, advertise_host: str
) -> tuple[ExporterTransport, ...]:
    """`host` is bound to, `advertise_host` is told to importers."""
    makers: dict[str, Callable[[], ExporterTransport]] = {
        tcp.NAME: lambda: tcp.TcpExporter(
            memory=memory, host=host, advertise_host=advertise_host, send_timeout_s=settings.read_timeout_s
        )
    }
    if memory.memfd is not None:
        makers[shm.NAME] = lambda: shm.ShmExporter(memory=memory)
    return tuple(makers[name]() for name in settings.transports if name in makers)


def importer_transports(settings: TransferSettings, memory: PoolMemory) -> tuple[ImporterTransport, ...]:
    makers: dict[str, Callable[[], ImporterTransport]] = {
        shm.NAME: lambda: shm.ShmImporter(memory=memory),
        tcp.NAME: lambda: tcp.TcpImporter(memory=memory),
    }
    return tuple(makers[name]() for name in settings.transports)
