"""The link check: measures how fast each transport reads from another worker's memory into this worker's.

At most one check runs at a time. It reads into blocks that it reserves as a hand-off does and returns unused. It takes
only a share of the free blocks, so that concurrent hand-offs find room. While a failed read may still write to its
blocks they stay in quarantine; if that can never be ruled out, the worker is reported as unhealthy.

`LinkCheckAccess` is the other side: it lets one other worker at a time read this worker's pool for a few seconds.
Nothing is allocated, pinned or written for that: the other worker reads the present content of the blocks and discards
it. Only members of the cluster may request a link check; they sign their id with the cluster's keys.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from cluster import holders
from cluster.auth.keys import ClusterKeys, Purpose
from cluster.clock import Clock
from cluster.errors import HandOffFailed, HandOffReason, InvalidRequest, Overloaded, Unavailable
from cluster.member import fingerprint_difference
from cluster.messages import Epoch, LayoutFingerprint, MemberId
from cluster.protocol.received import checked, malformed
from cluster.protocol.tickets import TICKET_ID_BYTES
from cluster.protocol.wire import (
    epoch_from_wire,
    epoch_to_wire,
    fingerprint_from_wire,
    fingerprint_to_wire,
    member_from_wire,
    pack_ids,
    unpack_ids,
)
from cluster.serving.rpc_errors import error_from_rpc
from cluster.settings.worker_settings import TRANSPORTS
from kvtransfer.importer.links import DOES_NOT_REACH, Estimate, LinkSpeedFit, LinkTable
from kvtransfer.importer.reads import PIECE_BYTES
from kvtransfer.memory import BlockSource, PoolMemory
from kvtransfer.transports.available import Available
from kvtransfer.transports.base import Channel, ImporterTransport, TransportError
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc, worker_pb2

OPEN_S = 12.0
MAX_BYTES = 64 << 20


class LinkCheckAccess:
    """Grants link checks to other workers, one at a time. Owns the check in progress and its end. Use it on the event
    loop.
    """

    def __init__(
        self,
        *,
        member: MemberId,
        address: str,  # the address under which other workers reach it
        memory: PoolMemory,  # the memory that transports serve
        layout: LayoutFingerprint,
        keys: ClusterKeys,
        transports: Available,
        open_s: float = OPEN_S,
    ) -> None:
        self._member, self._address, self._memory = member, address, memory
        self._layout, self._keys, self._transports, self._open_s = layout, keys, transports, open_s
        self._epoch: Epoch | None = None
        self._importer: MemberId | None = None
        self._end: asyncio.TimerHandle | None = None

    def start(self, request: kv_pb2.OpenLinkCheckRequest) -> kv_pb2.OpenLinkCheckResponse:
        """Start a link check. A worker's new request ends its former one; a request without transports only ends it.

        Raises HandOffFailed (BAD_SIGNATURE, LAYOUT_MISMATCH), MalformedMessage, Overloaded (another worker's is open).
        """
        importer = self._checked(checked(request))
        if self._importer not in (None, importer):
            raise Overloaded(
                f"{self._importer} is measuring its link to {self._member} already; try again",
                retry_after_s=self._left_s(),
            )
        self.close()
        if not request.transports:
            return kv_pb2.OpenLinkCheckResponse()
        epoch = Epoch(self._member, secrets.token_bytes(TICKET_ID_BYTES), 0)
        self._epoch, self._importer = epoch, importer
        self._end = asyncio.get_running_loop().call_later(self._open_s, self.close)
        num_blocks = min(self._memory.num_blocks, max(1, MAX_BYTES // self._memory.block_bytes))
        return kv_pb2.OpenLinkCheckResponse(
            epoch=epoch_to_wire(epoch),
            paths=self._paths(request, epoch),
            block_ids=pack_ids(range(num_blocks)),
            open_s=self._open_s,
        )

    def close(self) -> None:
        """End the link check in progress, if any: it starts no further reads."""
        if self._end is not None:
            self._end.cancel()
        if self._epoch is not None:
            for transport in self._transports.exporters:
                transport.revoke(self._epoch)
        self._end = self._epoch = self._importer = None

    def _checked(self, request: kv_pb2.OpenLinkCheckRequest) -> MemberId:
        signed = link_check_text(request.importer, self._member, self._address)
        if not self._keys.verify(Purpose.LINK_CHECKS, signed, request.signature):
            detail = f"the link check of {self._member} is not signed with this cluster's key"
            raise HandOffFailed(HandOffReason.BAD_SIGNATURE, detail)
        difference = fingerprint_difference(self._layout, fingerprint_from_wire(request.layout))
        if difference:
            raise HandOffFailed(HandOffReason.LAYOUT_MISMATCH, difference)
        return member_from_wire(request.importer)

    def _left_s(self) -> float:
        now_s = asyncio.get_running_loop().time()
        return max(0.0, self._end.when() - now_s) if self._end is not None else 0.0

    def _paths(self, request: kv_pb2.OpenLinkCheckRequest, epoch: Epoch) -> list[kv_pb2.LinkCheckPath]:
        """Return one entry per transport. The order has no meaning: the importer's order counts."""
        offered = {transport.name: transport for transport in self._transports.exporters}
        paths = []
        for name in dict.fromkeys([*offered, *TRANSPORTS]):
            path = kv_pb2.LinkCheckPath(transport=name)
            if name not in offered:
                path.reason = self._transports.missing.get(name, "not part of this version")
            elif name in request.transports and offered[name].reachable(request.endpoints[name]):
                path.endpoint = offered[name].grant(epoch)
            elif name in request.transports:
                path.reason = DOES_NOT_REACH
            paths.append(path)
        return paths


def link_check_text(importer: str, exporter: MemberId, address: str) -> bytes:
    """Return the text that an importer signs and sends with its id.

    It is valid for this exporter at this address only: an attacker who directs a worker to another address receives no
    signature that the exporter would accept.
    """
    return "\0".join((importer, str(exporter), address)).encode()


_CALL_S = 5.0
_RESERVE_S = 1.0
_OPEN_S = 5.0  # for a channel
_READ_S = 5.0
_QUIET_S = 3.0
_WARM_UP_S = 0.25  # per transport; the measurement after it takes about three times as long
_SHARE_OF_FREE = 4  # a link check uses one of this many free blocks
_SMALL_READS = 5
_LARGE_READS = 2

# The errors of a failed read; the latter two concern memory and device.
_READ_ERRORS = (TransportError, OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class LinkCheckContext:
    """The parts of a worker that its link checks use."""

    member: MemberId
    layout: LayoutFingerprint
    keys: ClusterKeys
    block_bytes: int  # on the wire
    transports: Available
    connect: Callable[[str], grpc.aio.Channel]
    links: LinkTable  # records each measurement
    clock: Clock
    unhealthy: Callable[[str], None]  # reports blocks that only a restart of the process frees


@dataclass(frozen=True, slots=True)
class Destination:
    """The blocks that a link check may write to: those of this worker's own pool."""

    blocks: BlockSource
    new_id: Callable[[], int]  # returns a number that no hand-off uses
    num_free: Callable[[], Awaitable[int]]


@dataclass(slots=True, eq=False)
class _CheckBlocks:
    """Blocks reserved for one link check, and channels that may still write to them."""

    check_id: int
    block_ids: tuple[int, ...] = ()
    unquiet: list[asyncio.Task[None]] = field(default_factory=list)


class LinkCheck:
    def __init__(self, context: LinkCheckContext, destination: Destination) -> None:
        self._context, self._destination = context, destination
        self._is_running = False
        self._reservations: set[_CheckBlocks] = set()
        self._quiet_tasks: set[asyncio.Task[None]] = set()

    def owners(self) -> Iterator[str]:
        """Return the holders of blocks that this object tracks."""
        return (holders.hand_off(check.check_id) for check in self._reservations)

    async def measure(self, request: worker_pb2.CheckLinkRequest) -> worker_pb2.CheckLinkResponse:
        """Measure every transport from `request.exporter` to this worker.

        Raises Overloaded (a check runs on either worker, or no blocks are free), Unavailable, HandOffFailed (layouts or
        keys differ), InvalidRequest."""
        exporter = member_from_wire(request.exporter)
        if exporter == self._context.member:
            raise InvalidRequest("a worker has no link to itself")
        if self._is_running:
            raise Overloaded(f"{self._context.member} is measuring another link; try again", retry_after_s=1.0)
        self._is_running = True
        try:
            wanted = request.max_blocks or max(1, MAX_BYTES // self._context.block_bytes)
            async with self._reserved(wanted) as reserved, self._opened(exporter, request.address) as opened:
                return await self._measure(exporter, opened, reserved)
        finally:
            self._is_running = False

    @asynccontextmanager
    async def _reserved(self, wanted: int) -> AsyncIterator[_CheckBlocks]:
        source = self._destination.blocks
        num_free = await self._destination.num_free()
        num_blocks = min(wanted, num_free // _SHARE_OF_FREE)
        if num_blocks == 0:
            raise Overloaded(f"{num_free} blocks are free here; a link check uses one in {_SHARE_OF_FREE} of them")
        reserved = _CheckBlocks(self._destination.new_id())
        self._reservations.add(reserved)
        try:
            try:
                async with asyncio.timeout(_RESERVE_S):
                    reservation = await source.reserve(reserved.check_id, num_blocks, is_announced=True)
            except TimeoutError:
                raise Overloaded(f"fewer than {num_blocks} blocks became free within {_RESERVE_S} s") from None
            reserved.block_ids = reservation.block_ids[reservation.num_cached :]
            yield reserved
        finally:
            self._give_back(reserved)

    def _give_back(self, reserved: _CheckBlocks) -> None:
        """Return the blocks to the pool, those that may still be written to by way of quarantine.

        It does not await, so that it completes however often the check is cancelled."""
        source = self._destination.blocks
        source.discard(reserved.check_id, frozenset(reserved.block_ids if reserved.unquiet else ()))
        if not reserved.unquiet:
            self._reservations.discard(reserved)
            return

        async def until_quiet() -> None:
            for ending in reserved.unquiet:
                await ending  # if it raises, the blocks stay in quarantine
            source.release_quarantined(frozenset(reserved.block_ids))
            self._reservations.discard(reserved)

        self._keep(asyncio.create_task(until_quiet(), name="link check becomes quiet"))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._quiet_tasks.add(task)
        task.add_done_callback(self._on_quiet_task_done)

    def _on_quiet_task_done(self, task: "asyncio.Task[None]") -> None:
        self._quiet_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._context.unhealthy(f"the channel of a link check may still write: {task.exception()}")

    @asynccontextmanager
    async def _opened(self, exporter: MemberId, address: str) -> AsyncIterator[kv_pb2.OpenLinkCheckResponse]:
        """Yield the exporter's response, and end the check with a second request."""
        context = self._context
        request = kv_pb2.OpenLinkCheckRequest(
            importer=str(context.member),
            signature=context.keys.sign(Purpose.LINK_CHECKS, link_check_text(str(context.member), exporter, address)),
            layout=fingerprint_to_wire(context.layout),
            transports=list(context.transports.names),
            endpoints={transport.name: transport.endpoint() for transport in context.transports.importers},
        )
        async with context.connect(address) as channel:
            open_link_check = kv_pb2_grpc.KvTransferStub(channel).OpenLinkCheck
            try:
                opened = checked(await open_link_check(request, timeout=_CALL_S))
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from error
            try:
                yield opened
            finally:
                del request.transports[:]
                with contextlib.suppress(grpc.aio.AioRpcError):  # the exporter also ends it by a timeout
                    await open_link_check(request, timeout=_CALL_S)

    async def _measure(
        self, exporter: MemberId, opened: kv_pb2.OpenLinkCheckResponse, reserved: _CheckBlocks
    ) -> worker_pb2.CheckLinkResponse:
        if not opened.HasField("epoch") or not opened.block_ids:
            raise malformed(opened, "epoch and block_ids must be set")
        epoch, remote = epoch_from_wire(opened.epoch), unpack_ids(opened.block_ids)
        if epoch.exporter != exporter:
            raise Unavailable(f"{epoch.exporter} answers at the address of {exporter}")
        theirs = {path.transport: path for path in opened.paths}
        ours = {transport.name: transport for transport in self._context.transports.importers}
        num_blocks = min(len(remote), len(reserved.block_ids))
        answer = worker_pb2.CheckLinkResponse(num_bytes=num_blocks * self._context.block_bytes)
        for name in dict.fromkeys([*ours, *TRANSPORTS]):
            path = answer.paths.add(transport=name)
            path.reason = self._why_not(name, exporter, theirs.get(name), reserved)
            if not path.reason:
                try:
                    link_path = _LinkPath(ours[name], epoch, theirs[name].endpoint, remote[:num_blocks])
                    estimate = await self._time(link_path, reserved)
                except (*_READ_ERRORS, TimeoutError) as error:
                    path.reason = str(error) or f"a read did not end within {_READ_S:g} s"
                    self._context.links.record_failure(exporter, name, self._context.clock.now_s())
                else:
                    path.bytes_per_s, path.latency_s = estimate.bytes_per_s, estimate.latency_s
        return answer

    def _why_not(self, name: str, exporter: MemberId, path: kv_pb2.LinkCheckPath | None, reserved: _CheckBlocks) -> str:
        here = self._context.transports.missing.get(name, "")
        there = path.reason if path is not None else "not part of its version"
        if here and here == there:
            return here
        reasons = ((self._context.member, here), (exporter, there))
        if reason := "; ".join(f"on {member.id}: {reason}" for member, reason in reasons if reason):
            return reason
        return "not measured: a read by an earlier transport may still write" if reserved.unquiet else ""

    async def _time(self, path: "_LinkPath", reserved: _CheckBlocks) -> Estimate:
        """Measure one transport. Raises one of _READ_ERRORS, TimeoutError."""
        async with asyncio.timeout(_OPEN_S):  # a transport that is cancelled here closes its connections
            channel = await path.transport.open_channel(path.epoch, path.endpoint)
        is_clean = False
        try:
            estimate = await self._read_and_fit(path, channel, reserved.block_ids)
            is_clean = True
            return estimate
        finally:
            ending = asyncio.create_task(_released(channel) if is_clean else channel.destroy())
            reserved.unquiet.append(ending)  # recorded before the wait, which may be cancelled
            await asyncio.wait([ending], timeout=_QUIET_S)
            if ending.done() and not ending.cancelled() and ending.exception() is None:
                reserved.unquiet.remove(ending)

    async def _read_and_fit(self, path: "_LinkPath", channel: Channel, local: Sequence[int]) -> Estimate:
        largest = await self._warm_up(path, channel, local)
        sizes = [largest] * _LARGE_READS
        sizes += [largest >> shift for shift in (2, 4, 6) if largest >> shift > 1]
        sizes += [1] * _SMALL_READS
        fit = LinkSpeedFit()
        for num_blocks in sizes:
            for piece, seconds in await self._read(channel, path.remote[:num_blocks], local[:num_blocks]):
                num_bytes = piece * self._context.block_bytes
                fit.add(num_bytes, seconds)
                self._context.links.record_read(
                    path.epoch.exporter, path.transport.name, num_bytes, seconds, self._context.clock.now_s()
                )
        estimate = fit.estimate()
        assert estimate is not None, "fewer reads than an estimate needs"
        return estimate

    async def _warm_up(self, path: "_LinkPath", channel: Channel, local: Sequence[int]) -> int:
        """Connect and touch pages by reads of growing size; return the number of blocks of the largest one."""
        spent_s, num_blocks = 0.0, 1
        while True:
            pieces = await self._read(channel, path.remote[:num_blocks], local[:num_blocks])
            spent_s += sum(seconds for _, seconds in pieces)
            if spent_s >= _WARM_UP_S or num_blocks == len(path.remote):
                return num_blocks
            num_blocks = min(2 * num_blocks, len(path.remote))

    async def _read(self, channel: Channel, remote: Sequence[int], local: Sequence[int]) -> list[tuple[int, float]]:
        """Read in pieces, as hand-offs do. Return the number of blocks and the seconds of each piece."""
        piece_blocks = max(1, PIECE_BYTES // self._context.block_bytes)
        pieces = []
        for start in range(0, len(remote), piece_blocks):
            began_s = self._context.clock.now_s()
            async with asyncio.timeout(_READ_S):
                await channel.read(remote[start : start + piece_blocks], local[start : start + piece_blocks])
            num_blocks = min(piece_blocks, len(remote) - start)
            pieces.append((num_blocks, self._context.clock.now_s() - began_s))
        return pieces


async def _released(channel: Channel) -> None:
    """Release the channel. Every read of it has completed, so an error does not concern the blocks."""
    with contextlib.suppress(*_READ_ERRORS):
        await channel.finish()


@dataclass(frozen=True, slots=True)
class _LinkPath:
    transport: ImporterTransport
    epoch: Epoch
    endpoint: bytes
    remote: tuple[int, ...]  # blocks to read
