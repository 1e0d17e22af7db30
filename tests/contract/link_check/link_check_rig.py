"""Two workers between which a link check runs, over real transports and gRPC, and transports that fail on purpose."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from cluster.auth.keys import ClusterKeys, Purpose
from cluster.clock import MonotonicClock
from cluster.messages import Epoch, MemberId
from cluster.observe.telemetry import Telemetry
from cluster.protocol.wire import fingerprint_to_wire
from cluster.serving.rpc_errors import error_from_rpc
from cluster.serving.serving import GrpcServer, open_channel
from cluster.settings.worker_settings import TransferSettings
from engine.kv.pool import KvPool
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.exporter.service import KvTransferServicer
from kvtransfer.importer.links import LinkTable
from kvtransfer.link_check import OPEN_S, Destination, LinkCheck, LinkCheckAccess, LinkCheckContext, link_check_text
from kvtransfer.transports.available import Available
from kvtransfer.transports.base import Channel, ExporterTransport, ImporterTransport
from kvtransfer.wire.wire_format import NativeFormat
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc, worker_pb2
from tests.contract.rigs.handoff_parts import EXPORTER, IMPORTER, KEY, LAYOUT, Counters, DecodeBlocks, transports
from tests.contract.rigs.kv_pools import random_pool
from tests.loopback import Fault, FaultSchedule

DEADLINE_S = 20.0


NUM_BLOCKS = 64


STRANGER = MemberId("d9", "z")


class StuckTransport:
    """A transport whose reads never end, and which cannot prove that they have."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    @property
    def name(self) -> str:
        return "tcp"

    def endpoint(self) -> bytes:
        return b""

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> Channel:
        return self

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        await asyncio.Event().wait()

    async def destroy(self) -> None:
        await self.let_go.wait()

    async def finish(self) -> None:
        raise AssertionError("a poisoned channel was released")

    async def close(self) -> None:
        pass


@dataclass
class Rig:
    source: KvPool
    target: KvPool
    exporter_sides: tuple[ExporterTransport, ...]
    opening: LinkCheckAccess
    means: LinkCheckContext
    blocks: DecodeBlocks
    address: str
    links: LinkTable
    schedule: FaultSchedule
    unhealthy: list[str]

    def probe(self, num_free: Callable[[], Awaitable[int]] | None = None) -> LinkCheck:
        async def free() -> int:
            return self.blocks.pool.counts()["free"]

        ids = iter(range(1000, 2000))
        return LinkCheck(self.means, Destination(self.blocks, lambda: next(ids), num_free or free))

    async def measure(self, max_blocks: int = 0, exporter: MemberId = EXPORTER) -> dict[str, worker_pb2.MeasuredPath]:
        request = worker_pb2.CheckLinkRequest(exporter=str(exporter), address=self.address, max_blocks=max_blocks)
        async with asyncio.timeout(DEADLINE_S):
            answer = await self.probe().measure(request)
        return {path.transport: path for path in answer.paths}

    def request(
        self, importer: MemberId = IMPORTER, key: ClusterKeys = KEY, address: str = ""
    ) -> kv_pb2.OpenLinkCheckRequest:
        return kv_pb2.OpenLinkCheckRequest(
            importer=str(importer),
            signature=key.sign(Purpose.LINK_CHECKS, link_check_text(str(importer), EXPORTER, address or self.address)),
            layout=fingerprint_to_wire(LAYOUT),
            transports=["tcp"],
            endpoints={"tcp": b""},
        )

    async def start_check(self, request: kv_pb2.OpenLinkCheckRequest) -> kv_pb2.OpenLinkCheckResponse:
        """Start a link check. Raises the exporter's error."""
        async with open_channel(self.address) as channel:
            try:
                answer: kv_pb2.OpenLinkCheckResponse = await kv_pb2_grpc.KvTransferStub(channel).OpenLinkCheck(
                    request, timeout=DEADLINE_S
                )
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from error
        return answer

    def check(self) -> None:
        """Check that every block is free and the pool's accounts agree."""
        self.blocks.pool.check()
        assert self.blocks.pool.counts()["free"] == NUM_BLOCKS


@asynccontextmanager
async def probe_rig(
    *names: str,
    missing_here: dict[str, str] | None = None,
    missing_there: dict[str, str] | None = None,
    importer_sides: Sequence[ImporterTransport] | None = None,
    faults: dict[int, Fault] | None = None,
    open_s: float = OPEN_S,
) -> AsyncIterator[Rig]:
    source, target = random_pool(NUM_BLOCKS, seed=1), random_pool(NUM_BLOCKS, seed=2)
    schedule = FaultSchedule(faults)
    sides = [transports(name, source, target, schedule) for name in names or ("shm", "tcp")]
    exporters = tuple(exporter for exporter, _ in sides)
    importers = tuple(importer for _, importer in sides) if importer_sides is None else tuple(importer_sides)
    server = GrpcServer(service_names=[], telemetry=Telemetry())
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    exporter = _exporter(source, address, exporters)
    opening = LinkCheckAccess(
        member=EXPORTER,
        address=address,
        memory=source,
        layout=LAYOUT,
        keys=KEY,
        transports=Available(exporters, (), missing_there or {}),
        open_s=open_s,
    )
    kv_pb2_grpc.add_KvTransferServicer_to_server(
        KvTransferServicer(exporter=exporter, link_checks=opening), server.grpc
    )
    links, unhealthy = LinkTable([importer.name for importer in importers]), list[str]()
    means = LinkCheckContext(
        member=IMPORTER,
        layout=LAYOUT,
        keys=KEY,
        block_bytes=target.block_bytes,
        transports=Available((), importers, missing_here or {}),
        connect=open_channel,
        links=links,
        clock=MonotonicClock(),
        unhealthy=unhealthy.append,
    )
    await exporter.start()
    await server.start()
    try:
        blocks = DecodeBlocks(NUM_BLOCKS)
        yield Rig(source, target, exporters, opening, means, blocks, address, links, schedule, unhealthy)
    finally:
        for importer in importers:
            await importer.close()
        await server.stop(0.0)
        opening.close()
        await exporter.close()


def _exporter(source: KvPool, address: str, transports: Sequence[ExporterTransport]) -> Exporter:
    return Exporter(
        member=EXPORTER,
        address=address,
        wire=NativeFormat(source),
        layout=LAYOUT,
        keys=KEY,
        settings=TransferSettings(),
        transports=transports,
        release=lambda ticket_id: None,
        clock=MonotonicClock(),
        counters=Counters(),
    )


class FarAway:
    """The shm transport of a worker on another host."""

    def __init__(self, inner: ImporterTransport) -> None:
        self._inner = inner
        self.name, self.open_channel, self.close = inner.name, inner.open_channel, inner.close

    def endpoint(self) -> bytes:
        return b"another host"
