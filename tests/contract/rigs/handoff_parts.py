"""The parts of a hand-off that a test watches or commands: counters, the importer's transport and its pool's accounts.

`transports` makes the two sides of any transport over two pools.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from cluster.clock import ManualClock
from cluster.errors import HandOffFailed, HandOffReason
from cluster.messages import Epoch, LayoutFingerprint, MemberId
from cluster.observe.telemetry import Telemetry
from engine.kv.block_pool import BlockPool
from kvtransfer.counters import TransferCounters
from kvtransfer.importer.importer import Importer
from kvtransfer.memory import PoolMemory, Reservation
from kvtransfer.protocol.import_state import Tick
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
from tests.contract.rigs.host_access import ExportedPool, HostAccess
from tests.contract.rigs.proofs import KEY as KEY
from tests.contract.rigs.proofs import PROOFS
from tests.contract.rigs.socket_nccl import SocketNccl
from tests.loopback import FaultSchedule, LoopbackExporter, LoopbackImporter, LoopbackNetwork

EXPORTER = MemberId("p0", "a1")
IMPORTER = MemberId("d0", "b2")
LAYOUT = LayoutFingerprint("weights", "config", "float32", "table")
DEADLINE_S = 20.0


class Counters(TransferCounters):
    """Counters that a test can read."""

    def __init__(self) -> None:
        super().__init__(Telemetry())
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

    def moved(self, *, transport: str, num_bytes: int, exposed_s: float, total_s: float) -> None:
        self.num_bytes += num_bytes

    def read(self, *, transport: str, seconds: float) -> None:
        assert seconds >= 0

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
    """A read of the importer. `arrived` is set when its bytes have arrived; it continues when `gate` opens."""

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
        self.read_asked = asyncio.Event()  # one has begun
        self.is_indestructible = False  # destroying a channel never ends
        self.destroying = asyncio.Event()  # one is being destroyed
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
        asyncio.get_running_loop().call_soon(self._transport.read_asked.set)
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
        self._transport.destroying.set()
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
        self.announced: set[int] = set()  # hand-offs whose exporter has begun to compute

    @property
    def waiting(self) -> tuple[int, ...]:
        """The hand-offs that wait for blocks, the next one first."""
        return tuple(self._waiting)

    async def reserve(self, handoff_id: int, num_blocks: int, *, is_announced: bool) -> Reservation:
        if num_blocks > self.pool.num_blocks:
            raise HandOffFailed(HandOffReason.NOT_ENOUGH_BLOCKS, f"{num_blocks} of {self.pool.num_blocks} blocks")
        self._waiting.append(handoff_id)
        if is_announced:
            self.announced.add(handoff_id)
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

    def announce(self, handoff_id: int) -> None:
        self.announced.add(handoff_id)

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


def pass_at_importer(importer: Importer, clock: ManualClock, duration_s: float) -> None:
    """Advance an importer's clock, and let its hand-offs do what is due then."""
    clock.advance(duration_s)
    for run in tuple(importer._runs.values()):
        run._apply(Tick())


async def finish_received(importer: Importer) -> None:
    """Wait until the hand-off that began last knows that its prefill has ended. An earlier one may still be closing."""
    *_, run = importer._runs.values()
    async with asyncio.timeout(DEADLINE_S):
        while run._state.finished is None:  # noqa: ASYNC110 -- no event tells
            await asyncio.sleep(0)


def transports(
    name: str, source: PoolMemory, target: PoolMemory, schedule: FaultSchedule
) -> tuple[ExporterTransport, ImporterTransport]:
    if name == "shm":
        return ShmExporter(memory=source, proofs=PROOFS), ShmImporter(memory=target, proofs=PROOFS)
    if name == "tcp":
        here, patience_s = "127.0.0.1", DEADLINE_S
        return (
            TcpExporter(memory=source, proofs=PROOFS, host=here, advertise_host=here, send_timeout_s=patience_s),
            TcpImporter(memory=target, proofs=PROOFS, stall_timeout_s=patience_s),
        )
    if name == "nixl":
        if reason := why_not_loadable():
            pytest.skip(reason)
        return NixlExporter(memory=source, proofs=PROOFS, linger_s=DEADLINE_S), NixlImporter(
            memory=target, proofs=PROOFS, timeout_s=DEADLINE_S
        )
    if name in ("nccl", "broken nccl"):
        library = SocketNccl(fail="connect" if name == "broken nccl" else "")
        return nccl_sides(library, source, target)
    if name == "cuda_ipc":
        pages = ExportedPool(source)
        return CudaIpcExporter(memory=pages, proofs=PROOFS, access=HostAccess(source)), CudaIpcImporter(
            memory=target, proofs=PROOFS, access=HostAccess(target)
        )
    network = LoopbackNetwork()
    return LoopbackExporter(memory=source, network=network), LoopbackImporter(
        memory=target, network=network, schedule=schedule
    )


def nccl_sides(
    library: NcclLibrary, source: PoolMemory, target: PoolMemory, limits: CommunicatorLimits | None = None
) -> tuple[NcclExporter, NcclImporter]:
    limits, here = limits or CommunicatorLimits(transfer_s=30.0), "127.0.0.1"
    exporter = NcclExporter(
        memory=source, proofs=PROOFS, library=library, host=here, advertise_host=here, limits=limits
    )
    return exporter, NcclImporter(memory=target, proofs=PROOFS, library=library, limits=limits)
