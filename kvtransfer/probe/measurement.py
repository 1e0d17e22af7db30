"""How fast each way from another worker's memory to this one is, measured by reading blocks of it.

Owns the one measurement that goes on. It reads into blocks that it reserves as a hand-off does and gives back unread: a
few of those that are free, so that hand-offs beside it find room. A way that does not become quiet leaves its blocks in
quarantine until it does; where that cannot be proven, the worker is unhealthy.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from cluster import holders
from cluster.clock import Clock
from cluster.errors import InvalidRequest, Overloaded, Unavailable
from cluster.messages import Epoch, LayoutFingerprint, MemberId
from cluster.protocol.kv_wire import epoch_from_wire, fingerprint_to_wire
from cluster.protocol.received import checked, malformed
from cluster.protocol.wire import member_from_wire, unpack_ids
from cluster.serving.rpc_errors import error_from_rpc
from cluster.settings.transfer_settings import TRANSPORTS
from kvtransfer.importer.block_source import BlockSource
from kvtransfer.importer.channel_reads import PIECE_BYTES
from kvtransfer.importer.pairs import PairBook
from kvtransfer.importer.read_fit import Estimate, ReadFit
from kvtransfer.probe.opening import MAX_BYTES, sign_probe
from kvtransfer.transports.available import Available
from kvtransfer.transports.base import Channel, ImporterTransport, TransportError
from tandem.v1 import kv_pb2, kv_pb2_grpc, worker_pb2

_CALL_S = 5.0
_RESERVE_S = 1.0
_OPEN_S = 5.0  # for a channel
_READ_S = 5.0
_QUIET_S = 3.0
_WARM_UP_S = 0.25  # per way; what is measured then takes about three times as long
_SHARE_OF_FREE = 4  # one block of so many that are free
_SMALL_READS = 5
_LARGE_READS = 2

# How a read can fail; the latter two are memory and device.
_READ_ERRORS = (TransportError, OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class ProbeMeans:
    """What a worker gives to its measurements."""

    member: MemberId
    layout: LayoutFingerprint
    key: bytes
    block_bytes: int  # on the wire
    transports: Available
    connect: Callable[[str], grpc.aio.Channel]
    pairs: PairBook  # learns from each measurement too
    clock: Clock
    unhealthy: Callable[[str], None]  # of blocks that only a restart of the process gives back


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a measurement may write: this worker's own pool."""

    blocks: BlockSource
    new_id: Callable[[], int]  # a number that no hand-off has
    num_free: Callable[[], Awaitable[int]]


@dataclass(slots=True, eq=False)
class _Lent:
    """Blocks reserved for one measurement, and ways that may still write to them."""

    probe_id: int
    block_ids: tuple[int, ...] = ()
    unquiet: list[asyncio.Task[None]] = field(default_factory=list)


class PairProbe:
    def __init__(self, means: ProbeMeans, destination: Destination) -> None:
        self._means, self._destination = means, destination
        self._is_running = False
        self._lent: set[_Lent] = set()
        self._lingering: set[asyncio.Task[None]] = set()

    def owners(self) -> Iterator[str]:
        """Holders of blocks that live here."""
        return (holders.hand_off(lent.probe_id) for lent in self._lent)

    async def measure(self, request: worker_pb2.MeasurePairRequest) -> worker_pb2.MeasurePairResponse:
        """Raises Overloaded (one is running here or there, or no blocks are free), Unavailable, HandOffFailed (layouts
        differ, keys differ), InvalidRequest."""
        exporter = member_from_wire(request.exporter)
        if exporter == self._means.member:
            raise InvalidRequest("a worker and itself are no pair")
        if self._is_running:
            raise Overloaded(f"{self._means.member} measures another pair at the moment", retry_after_s=1.0)
        self._is_running = True
        try:
            wanted = request.max_blocks or max(1, MAX_BYTES // self._means.block_bytes)
            async with self._reserved(wanted) as lent, self._opened(exporter, request.address) as opened:
                return await self._measure(exporter, opened, lent)
        finally:
            self._is_running = False

    @asynccontextmanager
    async def _reserved(self, wanted: int) -> AsyncIterator[_Lent]:
        source = self._destination.blocks
        num_free = await self._destination.num_free()
        num_blocks = min(wanted, num_free // _SHARE_OF_FREE)
        if num_blocks == 0:
            raise Overloaded(f"{num_free} blocks are free here; a measurement takes a {_SHARE_OF_FREE}th of them")
        lent = _Lent(self._destination.new_id())
        self._lent.add(lent)
        try:
            try:
                async with asyncio.timeout(_RESERVE_S):
                    reservation = await source.reserve(lent.probe_id, num_blocks)
            except TimeoutError:
                raise Overloaded(f"no {num_blocks} blocks became free within {_RESERVE_S} s") from None
            lent.block_ids = reservation.block_ids[reservation.num_cached :]
            yield lent
        finally:
            self._give_back(lent)

    def _give_back(self, lent: _Lent) -> None:
        """Without an await: however often the measurement is cancelled, blocks that are not proven quiet go to
        quarantine."""
        source = self._destination.blocks
        source.discard(lent.probe_id, frozenset(lent.block_ids if lent.unquiet else ()))
        if not lent.unquiet:
            self._lent.discard(lent)
            return

        async def until_quiet() -> None:
            for ending in lent.unquiet:
                await ending  # one that raises proves nothing: then the blocks stay where they are
            source.quiet(frozenset(lent.block_ids))
            self._lent.discard(lent)

        self._keep(asyncio.create_task(until_quiet(), name="a probe becomes quiet"))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._lingering.add(task)
        task.add_done_callback(self._on_lingered)

    def _on_lingered(self, task: "asyncio.Task[None]") -> None:
        self._lingering.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._means.unhealthy(f"the channel of a probe cannot be proven quiet: {task.exception()}")

    @asynccontextmanager
    async def _opened(self, exporter: MemberId, address: str) -> AsyncIterator[kv_pb2.OpenProbeResponse]:
        """The exporter's answer; afterwards it hears that we are done."""
        means = self._means
        request = kv_pb2.OpenProbeRequest(
            importer=str(means.member),
            signature=sign_probe(means.key, str(means.member), exporter, address),
            layout=fingerprint_to_wire(means.layout),
            transports=list(means.transports.names),
            endpoints={transport.name: transport.endpoint() for transport in means.transports.importers},
        )
        async with means.connect(address) as channel:
            open_probe = kv_pb2_grpc.KvTransferStub(channel).OpenProbe
            try:
                opened = checked(await open_probe(request, timeout=_CALL_S))
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from error
            try:
                yield opened
            finally:
                del request.transports[:]
                with contextlib.suppress(grpc.aio.AioRpcError):  # it ends by itself too
                    await open_probe(request, timeout=_CALL_S)

    async def _measure(
        self, exporter: MemberId, opened: kv_pb2.OpenProbeResponse, lent: _Lent
    ) -> worker_pb2.MeasurePairResponse:
        if not opened.HasField("epoch") or not opened.block_ids:
            raise malformed(opened, "epoch and block_ids must be set")
        epoch, remote = epoch_from_wire(opened.epoch), unpack_ids(opened.block_ids)
        if epoch.exporter != exporter:
            raise Unavailable(f"{epoch.exporter} answers at the address of {exporter}")
        theirs = {path.transport: path for path in opened.paths}
        ours = {transport.name: transport for transport in self._means.transports.importers}
        num_blocks = min(len(remote), len(lent.block_ids))
        answer = worker_pb2.MeasurePairResponse(num_bytes=num_blocks * self._means.block_bytes)
        for name in dict.fromkeys([*ours, *TRANSPORTS]):
            path = answer.paths.add(transport=name)
            path.reason = self._why_not(name, exporter, theirs.get(name), lent)
            if not path.reason:
                try:
                    way = _Way(ours[name], epoch, theirs[name].endpoint, remote[:num_blocks])
                    estimate = await self._time(way, lent)
                except (*_READ_ERRORS, TimeoutError) as error:
                    path.reason = str(error) or f"a read did not end within {_READ_S:g} s"
                    self._means.pairs.open_failed(exporter, name, self._means.clock.now_s())
                else:
                    path.bytes_per_s, path.latency_s = estimate.bytes_per_s, estimate.latency_s
        return answer

    def _why_not(self, name: str, exporter: MemberId, path: kv_pb2.ProbePath | None, lent: _Lent) -> str:
        here = self._means.transports.missing.get(name, "")
        there = path.reason if path is not None else "not part of its version"
        if here and here == there:
            return here
        reasons = ((self._means.member, here), (exporter, there))
        if reason := "; ".join(f"on {member.id}: {reason}" for member, reason in reasons if reason):
            return reason
        return "not measured: an earlier way is not quiet yet" if lent.unquiet else ""

    async def _time(self, way: "_Way", lent: _Lent) -> Estimate:
        """Raises one of _READ_ERRORS, TimeoutError."""
        async with asyncio.timeout(_OPEN_S):  # cancelled as it opens, a transport closes what it has opened
            channel = await way.transport.open(way.epoch, way.endpoint)
        is_clean = False
        try:
            estimate = await self._read_and_fit(way, channel, lent.block_ids)
            is_clean = True
            return estimate
        finally:
            ending = asyncio.create_task(_released(channel) if is_clean else channel.destroy())
            lent.unquiet.append(ending)  # before the wait, which may be cancelled
            await asyncio.wait([ending], timeout=_QUIET_S)
            if ending.done() and not ending.cancelled() and ending.exception() is None:
                lent.unquiet.remove(ending)

    async def _read_and_fit(self, way: "_Way", channel: Channel, local: Sequence[int]) -> Estimate:
        largest = await self._warm_up(way, channel, local)
        sizes = [largest] * _LARGE_READS
        sizes += [largest >> shift for shift in (2, 4, 6) if largest >> shift > 1]
        sizes += [1] * _SMALL_READS
        fit = ReadFit()
        for num_blocks in sizes:
            for piece, seconds in await self._read(channel, way.remote[:num_blocks], local[:num_blocks]):
                num_bytes = piece * self._means.block_bytes
                fit.add(num_bytes, seconds)
                self._means.pairs.read_completed(
                    way.epoch.exporter, way.transport.name, num_bytes, seconds, self._means.clock.now_s()
                )
        estimate = fit.estimate()
        assert estimate is not None, "fewer reads than an estimate needs"
        return estimate

    async def _warm_up(self, way: "_Way", channel: Channel, local: Sequence[int]) -> int:
        """Blocks of the largest read that time allows: connections are made and pages touched by then."""
        spent_s, num_blocks = 0.0, 1
        while True:
            pieces = await self._read(channel, way.remote[:num_blocks], local[:num_blocks])
            spent_s += sum(seconds for _, seconds in pieces)
            if spent_s >= _WARM_UP_S or num_blocks == len(way.remote):
                return num_blocks
            num_blocks = min(2 * num_blocks, len(way.remote))

    async def _read(self, channel: Channel, remote: Sequence[int], local: Sequence[int]) -> list[tuple[int, float]]:
        """In pieces, as hand-offs read: blocks and seconds of each."""
        piece_blocks = max(1, PIECE_BYTES // self._means.block_bytes)
        pieces = []
        for start in range(0, len(remote), piece_blocks):
            began_s = self._means.clock.now_s()
            async with asyncio.timeout(_READ_S):
                await channel.read(remote[start : start + piece_blocks], local[start : start + piece_blocks])
            num_blocks = min(piece_blocks, len(remote) - start)
            pieces.append((num_blocks, self._means.clock.now_s() - began_s))
        return pieces


async def _released(channel: Channel) -> None:
    """Every read of it has completed: an error says nothing about the blocks."""
    with contextlib.suppress(*_READ_ERRORS):
        await channel.release()


@dataclass(frozen=True, slots=True)
class _Way:
    transport: ImporterTransport
    epoch: Epoch
    endpoint: bytes
    remote: tuple[int, ...]  # blocks to read
