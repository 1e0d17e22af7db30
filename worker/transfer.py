"""The exporter and the importer of one worker, over one set of transports."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from cluster.clock import Clock
from cluster.errors import InternalError
from cluster.member import Capacity
from cluster.messages import ExportWait, LayoutFingerprint
from cluster.settings.config import WorkerConfig
from kvtransfer.counters import TransferCounters
from kvtransfer.digests import VerifyMode
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.exporter.service import KvTransferServicer, LeaseCachedPrefix, PrefixLeases
from kvtransfer.importer.importer import Importer
from kvtransfer.importer.links import LinkTable
from kvtransfer.link_check import Destination, LinkCheck, LinkCheckAccess, LinkCheckContext
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.available import available_transports
from kvtransfer.transports.base import TransportSetup
from kvtransfer.transports.proven_connections import ConnectionProofs
from kvtransfer.wire.quantised import BlockTable
from kvtransfer.wire.wire_format import WireDtype, WireFormat
from tandem.internal.v1 import kv_pb2_grpc
from worker.life import WorkerLife, WorkerProfile

_LOG = logging.getLogger(__name__)


class WorkerTransfer:
    """The exporter and the importer of one worker. It is built before the worker's server, on whose port importers
    attach, starts."""

    def __init__(
        self,
        *,
        life: WorkerLife,
        pool: PoolMemory,
        table: BlockTable,  # of the pool
        layout: LayoutFingerprint,
        release: Callable[[bytes], None],  # as Exporter's, like the next one
        importer_waits: Callable[[bytes, ExportWait], None],
        lease_prefix: LeaseCachedPrefix,
        clock: Clock,
    ) -> None:
        """Raises ConfigError if a transport that the settings name cannot work on this machine."""
        self._life = life
        self._layout = layout
        self._clock = clock
        self.counters = TransferCounters(life.telemetry)
        self.counters.verifies(VerifyMode(life.config.kv_verify))
        self._wire = _wire_format(life.config, pool, table)
        self.block_bytes = self._wire.memory.block_bytes  # as they travel
        self.transports = available_transports(life.config, _transport_setup(life, self._wire.memory))
        self.links = LinkTable(self.transports.names)
        self.exporter = self._exporter(release, importer_waits)
        self.importer = self._importer()
        self.prefixes = PrefixLeases(
            exporter=self.exporter, block_size=life.config.block_size, lease=lease_prefix, release=release
        )
        self._opening = self._link_check_access()
        servicer = KvTransferServicer(exporter=self.exporter, link_checks=self._opening, prefixes=self.prefixes)
        kv_pb2_grpc.add_KvTransferServicer_to_server(servicer, life.server.grpc)

    def profile(self, capacity: Capacity, grammar_engine: str) -> WorkerProfile:
        """Return the profile that the worker registers. `capacity`: the largest requests that its scheduler accepts."""
        capacity = replace(capacity, block_bytes=self.block_bytes)
        return WorkerProfile(self._layout, capacity, self.transports.names, grammar_engine)

    def link_check(self, destination: Destination) -> LinkCheck:
        """Return a check of the link to `destination`."""
        context = LinkCheckContext(
            member=self._life.member,
            layout=self._layout,
            keys=self._life.keys,
            block_bytes=self.block_bytes,
            transports=self.transports,
            connect=self._life.connect,
            links=self.links,
            clock=self._clock,
            unhealthy=lambda detail: self._life.fatal(InternalError(detail)),
        )
        return LinkCheck(context, destination)

    async def start(self) -> None:
        """Start the exporter. Raises OSError."""
        await self.exporter.start()

    def end_idle_calls(self) -> None:
        """End calls without a hand-off. Call it before the server ends."""
        self.exporter.end_idle_calls()

    async def close(self) -> None:
        """End every hand-off from and to this worker. Call it after the server has ended."""
        self._opening.close()
        await self.importer.close()
        await self.exporter.close()

    def owners(self) -> Iterator[str]:
        """Return the names of hand-offs in progress, as holders of blocks."""
        for part in (self.exporter, self.importer, self.prefixes):
            yield from part.owners()

    def figures(self) -> dict[str, float]:
        return self.counters.totals | {
            "live_tickets": float(self.exporter.num_live_tickets),
            "block_bytes": float(self.block_bytes),
        }

    def _exporter(
        self, release: Callable[[bytes], None], importer_waits: Callable[[bytes, ExportWait], None]
    ) -> Exporter:
        return Exporter(
            member=self._life.member,
            address=self._life.address,
            wire=self._wire,
            layout=self._layout,
            keys=self._life.keys,
            settings=self._life.config,
            transports=self.transports.exporters,
            release=release,
            importer_waits=importer_waits,
            clock=self._clock,
            counters=self.counters,
        )

    def _importer(self) -> Importer:
        return Importer(
            member=self._life.member,
            wire=self._wire,
            layout=self._layout,
            block_size=self._life.config.block_size,
            keys=self._life.keys,
            settings=self._life.config,
            transports=self.transports.importers,
            clock=self._clock,
            counters=self.counters,
            connect=self._life.connect,
            links=self.links,
            unhealthy=lambda detail: self._life.fatal(InternalError(detail)),
        )

    def _link_check_access(self) -> LinkCheckAccess:
        return LinkCheckAccess(
            member=self._life.member,
            address=self._life.address,
            memory=self._wire.memory,
            layout=self._layout,
            keys=self._life.keys,
            transports=self.transports,
        )


def _wire_format(config: WorkerConfig, pool: PoolMemory, table: BlockTable) -> WireFormat:
    wire = WireDtype(config.kv_wire_dtype).format(pool, table)
    block_bytes = wire.memory.block_bytes
    _LOG.info(
        "KV is transferred as %s: %d bytes per block, %.3f of the pool's",
        config.kv_wire_dtype,
        block_bytes,
        block_bytes / pool.block_bytes,
    )
    return wire


def _transport_setup(life: WorkerLife, memory: PoolMemory) -> TransportSetup:
    return TransportSetup(
        member=life.member,
        proofs=ConnectionProofs(life.keys, life.member, life.telemetry, life.audit),
        memory=memory,
        host=life.config.host,
        advertise_host=life.host,
        timeout_s=life.config.read_timeout_s,
        stall_timeout_s=life.config.read_stall_timeout_s,
        server_tls=life.tls.server_context if life.tls is not None else None,
        client_tls=life.tls.wrap_client if life.tls is not None else None,
    )
