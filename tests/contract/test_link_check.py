"""A pair measured over real transports and gRPC: what is told, who is let in, and that no block is lost or touched."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import pytest

from cluster.clock import MonotonicClock
from cluster.errors import HandOffFailed, HandOffReason, InvalidRequest, Overloaded, TandemError, Unavailable
from cluster.messages import Epoch, MemberId
from cluster.observe.telemetry import Telemetry
from cluster.protocol.wire import epoch_from_wire, fingerprint_to_wire
from cluster.serving.rpc_errors import error_from_rpc
from cluster.serving.serving import GrpcServer, open_channel
from cluster.settings.transfer_settings import TransferSettings
from engine.kv.pool import KvPool
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.exporter.link_check_access import OPEN_S, LinkCheckAccess, sign_link_check
from kvtransfer.exporter.service import KvTransferServicer
from kvtransfer.importer import link_check as probe_module
from kvtransfer.importer.link_check import Destination, LinkCheck, LinkCheckContext
from kvtransfer.importer.links import LinkTable
from kvtransfer.transports.available import Available
from kvtransfer.transports.base import Channel, ExporterTransport, ImporterTransport, TransportError
from kvtransfer.wire.wire_format import NativeFormat
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc, worker_pb2
from tests.contract.handoff_rig import EXPORTER, IMPORTER, KEY, LAYOUT, Counters, DecodeBlocks, transports
from tests.contract.kv_pools import random_pool
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
        self, importer: MemberId = IMPORTER, key: bytes = KEY, address: str = ""
    ) -> kv_pb2.OpenLinkCheckRequest:
        return kv_pb2.OpenLinkCheckRequest(
            importer=str(importer),
            signature=sign_link_check(key, str(importer), EXPORTER, address or self.address),
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
    exporter = Exporter(
        member=EXPORTER,
        address=address,
        wire=NativeFormat(source),
        layout=LAYOUT,
        key=KEY,
        settings=TransferSettings(),
        transports=exporters,
        release=lambda ticket_id: None,
        clock=MonotonicClock(),
        counters=Counters(),
    )
    opening = LinkCheckAccess(
        member=EXPORTER,
        address=address,
        memory=source,
        layout=LAYOUT,
        key=KEY,
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
        key=KEY,
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


async def test_every_shared_transport_is_measured_best_first() -> None:
    async with probe_rig() as rig:
        paths = await rig.measure()
        assert list(paths) == ["shm", "tcp", "cuda_ipc", "nccl", "nixl"]
        for name in ("shm", "tcp"):
            assert paths[name].reason == "" and paths[name].bytes_per_s > 0 and paths[name].latency_s >= 0
        figures = {figure.transport: figure for figure in rig.links.speeds()}
        assert set(figures) == {"shm", "tcp"}, "hand-offs and placement learn from it"
        rig.check()


async def test_blocks_of_other_sequences_are_not_changed() -> None:
    async with probe_rig() as rig:
        others = rig.blocks.pool.reserve(NUM_BLOCKS // 2)
        assert others is not None
        before = rig.target.raw[list(others)].clone(), rig.source.raw.clone()
        paths = await rig.measure()
        assert paths["tcp"].bytes_per_s > 0
        assert bool((rig.target.raw[list(others)] == before[0]).all())
        assert bool((rig.source.raw == before[1]).all())
        read = sum(bool((rig.target.raw[block] == rig.source.raw[block]).all()) for block in range(NUM_BLOCKS))
        assert read <= NUM_BLOCKS // 2 // 4, "a quarter of what is free, at most"
        rig.blocks.pool.release(list(others))
        rig.check()


async def test_a_missing_transport_is_reported_with_reason_and_side() -> None:
    here = {"nccl": "cupy is not installed", "nixl": "no RDMA device here"}
    there = {"nccl": "cupy is not installed", "cuda_ipc": "no GPU here"}
    async with probe_rig(missing_here=here, missing_there=there) as rig:
        paths = await rig.measure()
        assert paths["nccl"].reason == "cupy is not installed"
        assert paths["cuda_ipc"].reason == "on p0: no GPU here"
        assert paths["nixl"].reason == "on d0: no RDMA device here; on p0: not part of this version"


async def test_a_transport_that_does_not_connect_the_workers_is_reported() -> None:
    async with probe_rig() as rig:
        elsewhere = FarAway(rig.means.transports.importers[0])
        rig.means = replace(rig.means, transports=Available((), (elsewhere, *rig.means.transports.importers[1:])))
        paths = await rig.measure()
        assert "does not connect the two" in paths["shm"].reason
        assert paths["tcp"].reason == ""


class FarAway:
    """The shm transport of a worker on another host."""

    def __init__(self, inner: ImporterTransport) -> None:
        self._inner = inner
        self.name, self.open_channel, self.close = inner.name, inner.open_channel, inner.close

    def endpoint(self) -> bytes:
        return b"another host"


async def test_a_transport_that_fails_in_a_link_check_is_reported_and_the_next_is_measured() -> None:
    async with probe_rig("loopback", "tcp", faults={0: Fault.KILL}) as rig:
        paths = await rig.measure()
        assert paths["loopback"].reason == "the exporter is dead"
        assert paths["tcp"].bytes_per_s > 0
        assert not rig.links.is_usable(EXPORTER, "loopback", rig.means.clock.now_s())
        rig.check()


async def test_a_read_that_never_ends_fails_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_READ_S", 0.05)
    async with probe_rig("loopback", "tcp", faults={0: Fault.DROP}) as rig:
        paths = await rig.measure()
        assert "did not end" in paths["loopback"].reason
        assert paths["tcp"].bytes_per_s > 0
        rig.check()


async def test_blocks_stay_in_quarantine_until_the_link_checks_read_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_module, "_READ_S", 0.05)
    monkeypatch.setattr(probe_module, "_QUIET_S", 0.05)
    stuck = StuckTransport()
    async with probe_rig("tcp", "shm", importer_sides=[stuck]) as rig:
        rig.means = replace(rig.means, transports=Available((), (stuck, *rig.means.transports.importers[1:])))
        paths = await rig.measure(max_blocks=4)
        assert "did not end" in paths["tcp"].reason
        assert "may still write" in paths["shm"].reason
        assert rig.blocks.pool.counts()["quarantined"] == 4
        stuck.let_go.set()
        async with asyncio.timeout(DEADLINE_S), rig.blocks.changed:
            await rig.blocks.changed.wait_for(lambda: not rig.blocks.pool.counts()["quarantined"])
        rig.check()


async def test_a_link_check_without_free_blocks_measures_nothing() -> None:
    async with probe_rig() as rig:
        taken = rig.blocks.pool.reserve(NUM_BLOCKS - 3)
        assert taken is not None
        with pytest.raises(Overloaded, match="3 blocks are free here"):
            await rig.measure()
        rig.blocks.pool.release(list(taken))
        rig.check()


async def test_a_link_check_whose_free_blocks_were_reserved_by_others_ends_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_module, "_RESERVE_S", 0.05)

    async def stale() -> int:
        return NUM_BLOCKS

    async with probe_rig() as rig:
        taken = rig.blocks.pool.reserve(NUM_BLOCKS - 3)
        assert taken is not None
        request = worker_pb2.CheckLinkRequest(exporter=str(EXPORTER), address=rig.address)
        with pytest.raises(Overloaded, match="no 16 blocks became free"):
            await rig.probe(stale).measure(request)
        rig.blocks.pool.release(list(taken))
        rig.check()


async def test_a_link_check_without_a_valid_signature_is_refused() -> None:
    async with probe_rig("tcp") as rig:
        for forged in (
            rig.request(key=b"x" * 32),
            rig.request(address="127.0.0.1:9"),  # signed by a member for a link check of another exporter
            kv_pb2.OpenLinkCheckRequest(importer=str(STRANGER), transports=["tcp"], layout=fingerprint_to_wire(LAYOUT)),
        ):
            with pytest.raises(HandOffFailed) as refused:
                await rig.start_check(forged)
            assert refused.value.handoff_reason is HandOffReason.BAD_SIGNATURE
        stolen = rig.request()
        stolen.importer = str(STRANGER)
        with pytest.raises(HandOffFailed, match="bad_signature"):
            await rig.start_check(stolen)
        assert (await rig.start_check(rig.request())).paths, "and its member is let in"


async def test_another_layout_is_refused_with_both_values() -> None:
    async with probe_rig() as rig:
        rig.means = replace(rig.means, layout=replace(LAYOUT, dtype="bfloat16"))
        with pytest.raises(HandOffFailed, match="layout_mismatch: dtype: float32 here, bfloat16 there"):
            await rig.measure()
        rig.check()


async def test_one_link_check_is_open_at_a_time_and_ends_with_its_importer() -> None:
    async with probe_rig("tcp") as rig:
        opened = await rig.start_check(rig.request())
        with pytest.raises(Overloaded, match="d0@b2 is measuring its link to p0@a1"):
            await rig.start_check(rig.request(STRANGER))
        assert (await rig.start_check(rig.request())).epoch != opened.epoch, "its own link check opens again"
        done = rig.request()
        del done.transports[:]
        assert not (await rig.start_check(done)).paths
        assert (await rig.start_check(rig.request(STRANGER))).paths


async def test_a_revoked_epochs_open_channel_reads_nothing_more() -> None:
    async with probe_rig("tcp") as rig:
        opened = await rig.start_check(rig.request())
        endpoint = next(path.endpoint for path in opened.paths if path.transport == "tcp")
        tcp = rig.means.transports.importers[0]
        channel = await tcp.open_channel(epoch_from_wire(opened.epoch), endpoint)
        await channel.read([0], [0])
        rig.opening.close()
        with pytest.raises(TransportError):
            await channel.read([1], [1])
        await channel.destroy()


async def test_a_link_check_ends_at_its_time_limit() -> None:
    async with probe_rig("tcp", open_s=0.05) as rig:
        await rig.start_check(rig.request())
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    await rig.start_check(rig.request(STRANGER))
                except Overloaded:
                    continue
                break


async def test_one_link_check_runs_at_a_time() -> None:
    async with probe_rig() as rig:
        started, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> int:
            started.set()
            await go_on.wait()
            return NUM_BLOCKS

        probe = rig.probe(slow)
        request = worker_pb2.CheckLinkRequest(exporter=str(EXPORTER), address=rig.address)
        first = asyncio.create_task(probe.measure(request))
        await started.wait()
        with pytest.raises(Overloaded, match="measuring another link"):
            await probe.measure(request)
        go_on.set()
        async with asyncio.timeout(DEADLINE_S):
            assert (await first).paths
        rig.check()


@pytest.mark.parametrize(
    ("exporter", "address", "kind"),
    [("p0", "", InvalidRequest), (str(IMPORTER), "", InvalidRequest), (str(EXPORTER), "127.0.0.1:1", Unavailable)],
)
async def test_an_unreachable_exporter_is_named(exporter: str, address: str, kind: type[TandemError]) -> None:
    async with probe_rig() as rig:
        request = worker_pb2.CheckLinkRequest(exporter=exporter, address=address or rig.address)
        with pytest.raises(kind):
            await rig.probe().measure(request)
        rig.check()


async def test_a_cancelled_link_check_leaves_nothing_behind() -> None:
    async with probe_rig("loopback", faults={0: Fault.STOP}) as rig:
        request = worker_pb2.CheckLinkRequest(exporter=str(EXPORTER), address=rig.address)
        measuring = asyncio.create_task(rig.probe().measure(request))
        async with asyncio.timeout(DEADLINE_S):
            await rig.schedule.holding.wait()
        assert rig.blocks.granted
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await measuring
        rig.check()
        assert (await rig.start_check(rig.request(STRANGER))).paths, "the exporter has heard it"
