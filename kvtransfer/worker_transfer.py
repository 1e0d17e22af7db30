"""Both halves of one worker: what others may read of it, and what it reads of others, over one set of transports."""

import logging
from collections.abc import Callable

from cluster.clock import Clock
from cluster.errors import InternalError
from cluster.messages import LayoutFingerprint
from cluster.worker_life import WorkerLife
from kvtransfer.exporter import Exporter
from kvtransfer.importer import Importer
from kvtransfer.kv_groups import BlockTable
from kvtransfer.memory import PoolMemory
from kvtransfer.pairs import PairBook
from kvtransfer.prefix_offers import AskForPrefix, PrefixOffers
from kvtransfer.probe import Destination, PairProbe, ProbeMeans
from kvtransfer.probe_opening import ProbeOpening
from kvtransfer.service import KvTransferServicer
from kvtransfer.telemetry import TelemetryCounters
from kvtransfer.transports.available import available_transports
from kvtransfer.transports.base import TransportMeans
from kvtransfer.verification import VerifyMode
from kvtransfer.wire_dtypes import WireDtype
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
        config = life.config
        self.counters = TelemetryCounters(life.telemetry)
        self.counters.verifies(VerifyMode(config.kv_verify))
        wire = WireDtype(config.kv_wire_dtype).format(pool, table)
        self.block_bytes = wire.memory.block_bytes  # as they travel
        ratio = self.block_bytes / pool.block_bytes
        _LOG.info(
            "KV travels as %s: %d bytes a block, %.3f of the pool's", config.kv_wire_dtype, self.block_bytes, ratio
        )
        self.transports = available_transports(
            config,
            TransportMeans(
                member=life.member,
                memory=wire.memory,
                host=config.host,
                advertise_host=life.host,
                timeout_s=config.read_timeout_s,
                server_tls=life.tls.server_context() if life.tls is not None else None,
                client_tls=life.tls.client_context() if life.tls is not None else None,
            ),
        )
        self.pairs = PairBook(self.transports.names)
        self.exporter = Exporter(
            member=life.member,
            address=life.address,
            wire=wire,
            layout=layout,
            key=life.key,
            settings=config,
            transports=self.transports.exporters,
            release=release,
            clock=clock,
            counters=self.counters,
        )
        self.importer = Importer(
            member=life.member,
            wire=wire,
            layout=layout,
            block_size=config.block_size,
            key=life.key,
            settings=config,
            transports=self.transports.importers,
            clock=clock,
            counters=self.counters,
            connect=life.connect,
            pairs=self.pairs,
            unhealthy=lambda detail: life.fatal(InternalError(detail)),
        )
        self._probe_means = ProbeMeans(
            member=life.member,
            layout=layout,
            key=life.key,
            block_bytes=wire.memory.block_bytes,
            transports=self.transports,
            connect=life.connect,
            pairs=self.pairs,
            clock=clock,
        )
        self._opening = ProbeOpening(
            member=life.member,
            address=life.address,
            memory=wire.memory,
            layout=layout,
            key=life.key,
            transports=self.transports,
        )
        self.prefixes = PrefixOffers(
            exporter=self.exporter, block_size=config.block_size, ask=ask_for_prefix, release=release
        )
        servicer = KvTransferServicer(exporter=self.exporter, probes=self._opening, prefixes=self.prefixes)
        kv_pb2_grpc.add_KvTransferServicer_to_server(servicer, life.server.grpc)

    def probe(self, destination: Destination) -> PairProbe:
        """To measure others' memory from here."""
        return PairProbe(self._probe_means, destination)

    async def start(self) -> None:
        """Raises OSError."""
        await self.exporter.start()

    async def close(self) -> None:
        """After the server: whoever reads here is cut off, and what is read elsewhere is given up."""
        self._opening.close()
        await self.importer.close()
        await self.exporter.close()

    def figures(self) -> dict[str, float]:
        return self.counters.totals | {
            "live_tickets": float(self.exporter.num_live_tickets),
            "block_bytes": float(self.block_bytes),
        }
