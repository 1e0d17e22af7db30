"""Both halves of one worker: what others may read of it, and what it reads of others, over one set of transports."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from cluster.clock import Clock
from cluster.errors import InternalError
from cluster.member import Capacity
from cluster.messages import LayoutFingerprint
from cluster.settings.config import WorkerConfig
from cluster.worker_life import WorkerLife, WorkerProfile
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.exporter.prefix_offers import AskForPrefix, PrefixOffers
from kvtransfer.exporter.service import KvTransferServicer
from kvtransfer.importer.importer import Importer
from kvtransfer.importer.pairs import PairBook
from kvtransfer.memory import PoolMemory
from kvtransfer.probe.measurement import Destination, PairProbe, ProbeMeans
from kvtransfer.probe.opening import ProbeOpening
from kvtransfer.protocol.verification import VerifyMode
from kvtransfer.telemetry import TelemetryCounters
from kvtransfer.transports.available import available_transports
from kvtransfer.transports.base import TransportMeans
from kvtransfer.wire.kv_groups import BlockTable
from kvtransfer.wire.wire_dtypes import WireDtype
from kvtransfer.wire.wire_format import WireFormat
from tandem.v1 import kv_pb2_grpc

_LOG = logging.getLogger(__name__)


class WorkerTransfer:
    """Made before the worker's server starts, on whose port importers attach. Every worker exports and imports."""

    def __init__(
        self,
        *,
        life: WorkerLife,
        pool: PoolMemory,
        table: BlockTable,  # of the pool
        layout: LayoutFingerprint,
        release: Callable[[bytes], None],  # as Exporter's
        ask_for_prefix: AskForPrefix,
        clock: Clock,
    ) -> None:
        """Raises ConfigError when a transport that the settings name cannot work here."""
        self._life = life
        self._layout = layout
        self._clock = clock
        self.counters = TelemetryCounters(life.telemetry)
        self.counters.verifies(VerifyMode(life.config.kv_verify))
        self._wire = _wire_format(life.config, pool, table)
        self.block_bytes = self._wire.memory.block_bytes  # as they travel
        self.transports = available_transports(life.config, _transport_means(life, self._wire.memory))
        self.pairs = PairBook(self.transports.names)
        self.exporter = self._exporter(release)
        self.importer = self._importer()
        self.prefixes = PrefixOffers(
            exporter=self.exporter, block_size=life.config.block_size, ask=ask_for_prefix, release=release
        )
        self._opening = self._probe_opening()
        servicer = KvTransferServicer(exporter=self.exporter, probes=self._opening, prefixes=self.prefixes)
        kv_pb2_grpc.add_KvTransferServicer_to_server(servicer, life.server.grpc)

    def profile(self, capacity: Capacity) -> WorkerProfile:
        """What the cluster must know of this worker to give it work. `capacity`: what its scheduler accepts."""
        capacity = replace(capacity, block_bytes=self.block_bytes)
        return WorkerProfile(self._layout, capacity, self.transports.names)

    def probe(self, destination: Destination) -> PairProbe:
        """To measure others' memory from here."""
        means = ProbeMeans(
            member=self._life.member,
            layout=self._layout,
            key=self._life.key,
            block_bytes=self.block_bytes,
            transports=self.transports,
            connect=self._life.connect,
            pairs=self.pairs,
            clock=self._clock,
            unhealthy=lambda detail: self._life.fatal(InternalError(detail)),
        )
        return PairProbe(means, destination)

    async def start(self) -> None:
        """Raises OSError."""
        await self.exporter.start()

    def leave(self) -> None:
        """Before the server ends."""
        self.exporter.leave()

    async def close(self) -> None:
        """After the server: whoever reads here is cut off, and what is read elsewhere is given up."""
        self._opening.close()
        await self.importer.close()
        await self.exporter.close()

    def owners(self) -> Iterator[str]:
        """Holders of blocks that live here."""
        for part in (self.exporter, self.importer, self.prefixes):
            yield from part.owners()

    def figures(self) -> dict[str, float]:
        return self.counters.totals | {
            "live_tickets": float(self.exporter.num_live_tickets),
            "block_bytes": float(self.block_bytes),
        }

    def _exporter(self, release: Callable[[bytes], None]) -> Exporter:
        return Exporter(
            member=self._life.member,
            address=self._life.address,
            wire=self._wire,
            layout=self._layout,
            key=self._life.key,
            settings=self._life.config,
            transports=self.transports.exporters,
            release=release,
            clock=self._clock,
            counters=self.counters,
        )

    def _importer(self) -> Importer:
        return Importer(
            member=self._life.member,
            wire=self._wire,
            layout=self._layout,
            block_size=self._life.config.block_size,
            key=self._life.key,
            settings=self._life.config,
            transports=self.transports.importers,
            clock=self._clock,
            counters=self.counters,
            connect=self._life.connect,
            pairs=self.pairs,
            unhealthy=lambda detail: self._life.fatal(InternalError(detail)),
        )

    def _probe_opening(self) -> ProbeOpening:
        return ProbeOpening(
            member=self._life.member,
            address=self._life.address,
            memory=self._wire.memory,
            layout=self._layout,
            key=self._life.key,
            transports=self.transports,
        )


def _wire_format(config: WorkerConfig, pool: PoolMemory, table: BlockTable) -> WireFormat:
    wire = WireDtype(config.kv_wire_dtype).format(pool, table)
    block_bytes = wire.memory.block_bytes
    _LOG.info(
        "KV travels as %s: %d bytes a block, %.3f of the pool's",
        config.kv_wire_dtype,
        block_bytes,
        block_bytes / pool.block_bytes,
    )
    return wire


def _transport_means(life: WorkerLife, memory: PoolMemory) -> TransportMeans:
    return TransportMeans(
        member=life.member,
        memory=memory,
        host=life.config.host,
        advertise_host=life.host,
        timeout_s=life.config.read_timeout_s,
        stall_timeout_s=life.config.read_stall_timeout_s,
        server_tls=life.tls.server_context() if life.tls is not None else None,
        client_tls=life.tls.client_context() if life.tls is not None else None,
    )
