"""Two workers' halves of a hand-off with everything real between them: pools, gRPC on loopback, transports.

Stands in for the two step threads: `Prefill` reserves, seals and finishes blocks of the source pool, `DecodeBlocks`
is the importer's view of the target pool. Both keep accounts in the engine's BlockPool, so `check()` is the real one.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
import torch

from cluster.clock import Clock, ManualClock, MonotonicClock
from cluster.errors import HandOffFailed, HandOffReason
from cluster.member import OUR_VERSIONS, ProtocolRange
from cluster.messages import Epoch, LayoutFingerprint, MemberId
from cluster.settings.transfer_settings import TransferSettings
from engine.kv.block_pool import BlockPool
from engine.kv.pool import KvPool
from kvtransfer.digests import KNOWN_DIGESTS
from kvtransfer.exporter.exporter import Exporter, FirstToken, TailBlock
from kvtransfer.exporter.service import KvTransferServicer
from kvtransfer.importer.importer import ExpectedPrompt, ImportedBlocks, Importer
from kvtransfer.importer.links import LinkTable
from kvtransfer.memory import PoolMemory, Reservation
from kvtransfer.transports.base import Channel, ExporterTransport, ImporterTransport, TransportError
from kvtransfer.transports.cuda.transport import CudaIpcExporter, CudaIpcImporter
from kvtransfer.transports.nccl.communicator_life import CommunicatorLimits
from kvtransfer.transports.nccl.exporting import NcclExporter
from kvtransfer.transports.nccl.library import NcclLibrary
from kvtransfer.transports.nccl.transport import NcclImporter
from kvtransfer.transports.nixl.agent import why_not_loadable
from kvtransfer.transports.nixl.exporting import NixlExporter
from kvtransfer.transports.nixl.transport import NixlImporter
from kvtransfer.transports.shm.transport import ShmExporter, ShmImporter
from kvtransfer.transports.tcp.transport import TcpExporter, TcpImporter
from kvtransfer.wire.wire_format import WireDtype
from tandem.internal.v1 import kv_pb2_grpc
from tests.contract.host_access import ExportedPool, HostAccess
from tests.contract.kv_pools import BLOCK_SIZE, random_pool
from tests.contract.socket_nccl import SocketNccl
from tests.loopback import Fault, FaultSchedule, LoopbackExporter, LoopbackImporter, LoopbackNetwork

KEY = b"k" * 32
EXPORTER = MemberId("p0", "a1")
IMPORTER = MemberId("d0", "b2")
LAYOUT = LayoutFingerprint("weights", "config", "float32", "table")
DEADLINE_S = 60.0


class Counters:
    """TransferCounters that a test can read."""

    def __init__(self) -> None:
        self.handoffs: Counter[tuple[str, str, str, str]] = Counter()
        self.fallbacks: list[tuple[str, str, str]] = []
        self.num_bytes = 0
        self.num_verified = self.num_unverified = 0
        self.num_digest_failures = 0
        self.num_quarantined = 0
        self.num_lapses = 0
        self.exported = asyncio.Event()  # an exporter's hand-off has ended

    def handoff(self, *, side: str, transport: str, outcome: str, reason: str) -> None:
        if side == "exporter":
            self.exported.set()
        self.handoffs[side, transport, outcome, str(reason)] += 1

    def moved(self, *, transport: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def checked(self, *, num_verified: int, num_unverified: int) -> None:
        self.num_verified += num_verified
        self.num_unverified += num_unverified

    def digest_failure(self, *, transport: str) -> None:
        self.num_digest_failures += 1

    def fallback(self, *, broken: str, taken: str, reason: str) -> None:
        self.fallbacks.append((broken, taken, str(reason)))

    def quarantined(self, change: int) -> None:
        self.num_quarantined += change

    def lease_lapse(self) -> None:
        self.num_lapses += 1


@dataclass
class Read:
    """One read of the importer. It is `arrived` when its bytes are there, and goes on when `gate` opens."""

    local_block_ids: tuple[int, ...]
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)


class WatchedTransport:
    """Any importer transport whose reads are shown to the test, held before they are reported, or damaged in flight."""

    def __init__(self, inner: ImporterTransport) -> None:
        self._inner = inner
        self.reads: list[Read] = []
        self.read_arrived = asyncio.Event()
        self.is_holding = False
        self.is_holding_back = False  # reads begin only when `begin` is set
        self.read_held_back = asyncio.Event()
        self.begin = asyncio.Event()
        self.is_indestructible = False  # destroying a channel never ends
        self.is_unopenable = False  # there is no way to the exporter
        self.num_failing = 0  # reads that are still to fail
        self.num_damaged = 0  # reads still to be damaged
        self.damage: Callable[[int], None] = lambda block_id: None

    @property
    def name(self) -> str:
        return self._inner.name

    def endpoint(self) -> bytes:
        return self._inner.endpoint()

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> "WatchedChannel":
        self.endpoint_seen = exporter_endpoint
        if self.is_unopenable:
            raise TransportError("no way there")
        return WatchedChannel(self, await self._inner.open_channel(epoch, exporter_endpoint))

    async def close(self) -> None:
        await self._inner.close()


class WatchedChannel:
    def __init__(self, transport: WatchedTransport, inner: Channel) -> None:
        self._transport, self._inner = transport, inner

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        read = Read(tuple(local_block_ids))
        if not self._transport.is_holding:
            read.gate.set()
        self._transport.reads.append(read)
        if self._transport.is_holding_back:
            self._transport.read_held_back.set()
            await self._transport.begin.wait()
        await self._inner.read(remote_block_ids, local_block_ids)
        if self._transport.num_failing:
            self._transport.num_failing -= 1
            raise TransportError("connection reset")
        if self._transport.num_damaged:
            self._transport.num_damaged -= 1
            self._transport.damage(local_block_ids[0])
        read.arrived.set()
        self._transport.read_arrived.set()
        await read.gate.wait()

    async def destroy(self) -> None:
        if self._transport.is_indestructible:
            await asyncio.get_running_loop().create_future()
        await self._inner.destroy()

    async def finish(self) -> None:
        await self._inner.finish()


class DecodeBlocks:
    """A BlockSource over a BlockPool: whole reservations, first come, first served."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.changed = asyncio.Condition()
        self._waiting: list[int] = []
        self.granted: dict[int, tuple[int, ...]] = {}
        self.cached: dict[int, tuple[int, ...]] = {}  # by hand-off: leading blocks that it shares
        self.asked = asyncio.Event()

    async def reserve(self, handoff_id: int, num_blocks: int) -> Reservation:
        if num_blocks > self.pool.num_blocks:
            raise HandOffFailed(HandOffReason.NOT_ENOUGH_BLOCKS, f"{num_blocks} of {self.pool.num_blocks} blocks")
        self._waiting.append(handoff_id)
        self.asked.set()
        try:
            cached = self.cached.get(handoff_id, ())
            while self._waiting[0] != handoff_id or (fresh := self.pool.reserve(num_blocks - len(cached))) is None:
                async with self.changed:
                    await self.changed.wait()
        finally:
            self._waiting.remove(handoff_id)
        self.pool.add_references(cached)
        self.granted[handoff_id] = cached + fresh
        return Reservation(cached + fresh, len(cached))

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        block_ids = self.granted.pop(handoff_id, ())
        assert quarantined <= set(block_ids)
        self.pool.quarantine(sorted(quarantined), handoff_id)
        self.pool.drop_references([block_id for block_id in block_ids if block_id not in quarantined])
        self._wake()

    def release_quarantined(self, block_ids: frozenset[int]) -> None:
        self.pool.end_quarantine(sorted(block_ids))
        self._wake()

    def finish(self, handoff_id: int) -> None:
        """End its sequences."""
        self.discard(handoff_id, frozenset())

    def _wake(self) -> None:
        async def wake() -> None:
            async with self.changed:
                self.changed.notify_all()

        self._task = asyncio.create_task(wake())


@dataclass
class Prefill:
    """One prefill at the exporter: the work of the step thread, at the test's pace."""

    rig: "Rig"
    ticket_id: bytes
    signed: bytes
    num_tokens: int
    num_choices: int
    prompt_hash: bytes
    block_ids: tuple[int, ...]  # in the prompt's order; the last is the tail if the prompt does not fill it
    num_sealed: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def expected(self) -> ExpectedPrompt:
        return ExpectedPrompt(self.num_tokens, self.prompt_hash, self.num_choices)

    @property
    def num_full(self) -> int:
        return self.num_tokens // BLOCK_SIZE

    def seal(self, num_blocks: int) -> None:
        first, last = self.num_sealed, self.num_sealed + num_blocks
        assert last <= self.num_full
        self.rig.exporter.seal(self.ticket_id, first_index=first, block_ids=self.block_ids[first:last])
        self.num_sealed = last

    def finish(self, ended: Sequence[bool] | None = None) -> None:
        num_valid = self.num_tokens % BLOCK_SIZE
        ends = ended or [False] * self.num_choices
        self.rig.exporter.finish(
            self.ticket_id,
            first_tokens=[FirstToken(100 + choice, end) for choice, end in enumerate(ends)],
            tail=TailBlock(self.block_ids[-1], num_valid) if num_valid else None,
        )

    def compute(self) -> None:
        """Compute the whole prompt at once."""
        if self.num_full > self.num_sealed:
            self.seal(self.num_full - self.num_sealed)
        self.finish()


@dataclass
class Rig:
    source: KvPool
    target: KvPool
    exporter: Exporter
    importer: Importer
    watched: WatchedTransport
    exporter_transport: ExporterTransport
    exporter_blocks: BlockPool
    decode: DecodeBlocks
    counters: Counters
    address: str
    arriving: PoolMemory  # what the importer's transports fill
    prefills: dict[bytes, Prefill] = field(default_factory=dict)
    unhealthy: asyncio.Event = field(default_factory=asyncio.Event)
    alternatives: list[WatchedTransport] = field(default_factory=list)
    schedule: FaultSchedule = field(default_factory=FaultSchedule)
    wire_dtype: str = "native"
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    imports: list[asyncio.Task[ImportedBlocks]] = field(default_factory=list)
    links: LinkTable = field(default_factory=lambda: LinkTable(()))  # the importer's

    def prefill(self, num_tokens: int, *, num_choices: int = 1, attempt: int = 1) -> Prefill:
        """Queue and accept a prefill. Its blocks are reserved, and nothing is computed."""
        free = self.exporter_blocks.reserve(-(-num_tokens // BLOCK_SIZE))
        assert free is not None
        block_ids = tuple(self.dice.sample(free, len(free)))
        prompt_hash = self.dice.randbytes(16)
        issued = self.exporter.issue(
            request_id=f"request-{len(self.prefills)}",
            attempt=attempt,
            importer=IMPORTER,
            num_tokens=num_tokens,
            prompt_hash=prompt_hash,
            num_choices=num_choices,
        )
        self.exporter_blocks.begin_lease(block_ids)
        prefill = Prefill(self, issued.ticket_id, issued.signed, num_tokens, num_choices, prompt_hash, block_ids)
        self.prefills[issued.ticket_id] = prefill
        return prefill

    def release(self, ticket_id: bytes) -> None:
        """Do the work of Release on the step thread. A second Release for one ticket would be illegal in the
        BlockPool."""
        prefill = self.prefills[ticket_id]
        self.exporter_blocks.end_lease(prefill.block_ids)
        self.exporter_blocks.drop_references(prefill.block_ids)
        prefill.released.set()

    def start_import(
        self, prefill: Prefill, handoff_id: int = 1, *, signed: bytes = b""
    ) -> asyncio.Task[ImportedBlocks]:
        importing = asyncio.create_task(
            self.importer.import_blocks(
                handoff_id=handoff_id,
                signed_ticket=signed or prefill.signed,
                expected=prefill.expected,
                blocks=self.decode,
            )
        )
        self.imports.append(importing)
        return importing

    async def read_arrived(self) -> Read:
        """Return the newest read as soon as its bytes are in the target pool. If every import has failed, raise the
        last one's error."""
        arrived = asyncio.create_task(self.watched.read_arrived.wait())
        running = {importing for importing in self.imports if not importing.done()}
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not arrived.done():
                    done, _ = await asyncio.wait({arrived, *running}, return_when=asyncio.FIRST_COMPLETED)
                    running -= done
                    failed = done - {arrived}
                    if not arrived.done() and not running and failed:
                        await failed.pop()
        finally:
            arrived.cancel()
        self.watched.read_arrived.clear()
        return self.watched.reads[-1]

    async def failure(
        self, importing: asyncio.Task[ImportedBlocks], *, handoff_id: int = 1, match: str | None = None
    ) -> HandOffReason:
        """Return why the import failed. Nothing is reserved for it afterwards."""
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(HandOffFailed, match=match) as caught:
                await importing
        assert handoff_id not in self.decode.granted
        return caught.value.handoff_reason

    async def machine_idle(self) -> None:
        """Wait until the importer has verified everything that has arrived."""
        await asyncio.wrap_future(self.importer._verifier.submit(lambda: None))
        await asyncio.sleep(0)

    async def digested(self) -> None:
        """Wait until the exporter has digests of all sealed blocks."""
        while self.exporter._is_digesting:
            await asyncio.wrap_future(self.exporter._digester.submit(lambda: None))
            await asyncio.sleep(0)

    async def given_up(self, prefill: Prefill) -> None:
        """Release the blocks of a prefill whose importer failed or is gone. They are kept for another importer until
        the prefill is cancelled."""
        async with asyncio.timeout(DEADLINE_S):
            await self.counters.exported.wait()
            assert not prefill.released.is_set()
            self.exporter.fail(prefill.ticket_id, reason=HandOffReason.CANCELLED, detail="")
            await prefill.released.wait()

    async def all_quiet(self) -> None:
        """Wait until no read can still write."""
        async with asyncio.timeout(DEADLINE_S):
            while self.decode.pool.counts()["quarantined"]:
                async with self.decode.changed:
                    await self.decode.changed.wait()

    def flip_a_bit(self, block_id: int) -> None:
        self.arriving.raw[block_id, -1] ^= 4

    def sent(self) -> torch.Tensor:
        """Return the source's blocks as every importer should receive them."""
        copy = KvPool(self.source.layout, self.source.num_blocks)
        copy.raw.copy_(self.source.raw)
        wire = WireDtype(self.wire_dtype).format(copy, copy.layout)
        wire.encode(range(copy.num_blocks))
        wire.decode(range(copy.num_blocks))
        return copy.raw

    def holds(self, prefill: Prefill, imported: ImportedBlocks) -> bool:
        """Return whether every block is present and equal byte for byte."""
        sent, num_full = self.sent(), prefill.num_full
        same = bool(
            (self.target.raw[list(imported.sealed_block_ids)] == sent[list(prefill.block_ids[:num_full])]).all()
        )
        tail = sent[prefill.block_ids[-1]]
        return same and all(
            bool((self.target.raw[block_id] == tail).all())
            for block_id, first in zip(imported.tail_block_ids, imported.first_tokens, strict=False)
            if not first.ended
        )

    def let_leases_lapse(self, exporter_clock: ManualClock) -> None:
        """Advance the clock past the leases of failed imports: the exporter releases their blocks when the lease ends,
        after five seconds."""
        exporter_clock.advance(TransferSettings().lease_s)
        self.exporter.reap()

    def check_clean(self) -> None:
        """Check that nothing is held, leased or quarantined on either side."""
        for pool in (self.exporter_blocks, self.decode.pool):
            pool.check()
            assert pool.counts()["free"] == pool.num_blocks, pool.counts()
        assert self.exporter.num_live_tickets == 0
        assert self.counters.num_quarantined == 0


def transports(
    name: str, source: PoolMemory, target: PoolMemory, schedule: FaultSchedule
) -> tuple[ExporterTransport, ImporterTransport]:
    if name == "shm":
        return ShmExporter(memory=source), ShmImporter(memory=target)
    if name == "tcp":
        exporter = TcpExporter(memory=source, host="127.0.0.1", advertise_host="127.0.0.1", send_timeout_s=5.0)
        return exporter, TcpImporter(memory=target)
    if name == "nixl":
        if reason := why_not_loadable():
            pytest.skip(reason)
        return NixlExporter(memory=source, linger_s=5.0), NixlImporter(memory=target, timeout_s=DEADLINE_S)
    if name in ("nccl", "broken nccl"):
        library = SocketNccl(fail="connect" if name == "broken nccl" else "")
        return nccl_sides(library, source, target)
    if name == "cuda_ipc":
        pages = ExportedPool(source)
        return CudaIpcExporter(memory=pages, access=HostAccess(source)), CudaIpcImporter(
            memory=target, access=HostAccess(target)
        )
    network = LoopbackNetwork()
    return LoopbackExporter(memory=source, network=network), LoopbackImporter(
        memory=target, network=network, schedule=schedule
    )


def nccl_sides(
    library: NcclLibrary, source: PoolMemory, target: PoolMemory, limits: CommunicatorLimits | None = None
) -> tuple[NcclExporter, NcclImporter]:
    limits, here = limits or CommunicatorLimits(transfer_s=30.0), "127.0.0.1"
    exporter = NcclExporter(memory=source, library=library, host=here, advertise_host=here, limits=limits)
    return exporter, NcclImporter(memory=target, library=library, limits=limits)


@asynccontextmanager
async def handoff_rig(
    transport: str,
    *,
    alternatives: Sequence[str] = (),  # further transports, after the first
    num_blocks: int = 32,
    num_decode_blocks: int | None = None,
    settings: TransferSettings | None = None,
    importer_settings: TransferSettings | None = None,  # None: the same
    exporter_clock: Clock | None = None,
    importer_layout: LayoutFingerprint = LAYOUT,
    exporter_protocol: ProtocolRange = OUR_VERSIONS,
    importer_protocol: ProtocolRange = OUR_VERSIONS,
    exporter_digests: Sequence[str] = KNOWN_DIGESTS,
    importer_digests: Sequence[str] = KNOWN_DIGESTS,
    wire_dtype: str = "native",
    exporter_member: MemberId = EXPORTER,
    wall_clock: Callable[[], float] = lambda: 1_000.0,
    faults: Mapping[int, Fault] | None = None,
) -> AsyncIterator[Rig]:
    settings = settings or TransferSettings()
    source, target = random_pool(num_blocks, seed=1), random_pool(num_blocks, seed=2)
    schedule, unhealthy = FaultSchedule(faults), asyncio.Event()
    if wire_dtype != "native":
        source.tensor.normal_(generator=torch.Generator().manual_seed(3))
    wires = [WireDtype(wire_dtype).format(pool, pool.layout) for pool in (source, target)]
    memories = wires[0].memory, wires[1].memory
    exporter_side, importer_side = transports(transport, *memories, schedule)
    others = [transports(name, *memories, schedule) for name in alternatives]
    watched_others = [WatchedTransport(side) for _, side in others]
    watched, counters, decode = (
        WatchedTransport(importer_side),
        Counters(),
        DecodeBlocks(num_decode_blocks or num_blocks),
    )
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    exporter = Exporter(
        member=exporter_member,
        address=f"127.0.0.1:{port}",
        wire=wires[0],
        layout=LAYOUT,
        key=KEY,
        settings=settings,
        transports=[exporter_side, *(side for side, _ in others)],
        release=lambda ticket_id: rig.release(ticket_id),
        clock=exporter_clock or MonotonicClock(),
        counters=counters,
        wall_clock=wall_clock,
        protocol=exporter_protocol,
        digests=exporter_digests,
    )
    links = LinkTable([watched.name, *(other.name for other in watched_others)])
    importer = Importer(
        member=IMPORTER,
        links=links,
        wire=wires[1],
        layout=importer_layout,
        block_size=BLOCK_SIZE,
        key=KEY,
        settings=importer_settings or settings,
        transports=[watched, *watched_others],
        clock=MonotonicClock(),
        counters=counters,
        unhealthy=lambda text: unhealthy.set(),
        protocol=importer_protocol,
        digests=importer_digests,
    )
    rig = Rig(
        source,
        target,
        exporter,
        importer,
        watched,
        exporter_side,
        BlockPool(num_blocks),
        decode,
        counters,
        f"127.0.0.1:{port}",
        wires[1].memory,
        unhealthy=unhealthy,
        alternatives=watched_others,
        schedule=schedule,
        wire_dtype=wire_dtype,
        links=links,
    )
    kv_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(exporter=exporter), server)
    await exporter.start()
    await server.start()
    try:
        yield rig
    finally:
        await importer.close()
        await exporter.close()
        await server.stop(None)
        source.close()
        target.close()
