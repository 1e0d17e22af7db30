"""NCCL between GPUs of any hosts, with cupy: one communicator of two ranks per link, made when it is first needed.

    communicator_life   the life of one communicator, pure: states, deadlines, when to try again
    messages            the messages of the two sides on the control connection
    link                one connection and communicator, on the thread that owns them
    exporting           the exporter's side: rank 0
    transport           the importer's side: rank 1 (this file)
    library             the protocols of the library, and cupy

NCCL is two-sided and has no tags: every transfer is announced, with its epoch and a number, on the control connection,
and a failure ends the communicator. No communicator spans more than one link, so a member that joins or leaves affects
its own links only. The library is called on one thread per link. Hand-offs with one exporter read one after the other,
in the exporter's order.
"""

import asyncio
import contextlib
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory, runs
from kvtransfer.transports.base import TransportError, TransportSetup
from kvtransfer.transports.nccl import messages
from kvtransfer.transports.nccl.communicator_life import CommunicatorLife, CommunicatorLimits
from kvtransfer.transports.nccl.exporting import ENDPOINT, IMPORTER, NcclExporter
from kvtransfer.transports.nccl.exporting import NAME as NAME
from kvtransfer.transports.nccl.library import (
    IMPORTER_RANK,
    NcclFailed,
    NcclLibrary,
    Piece,
    cupy_nccl,
    why_not_loadable,
)
from kvtransfer.transports.nccl.link import LoneThread, NcclLink, error_text
from kvtransfer.transports.proven_connections import ConnectionProofs, Opening, connect

_Address = tuple[str, int]

_MAX_PEERS = 32  # communicators that are kept: each holds device memory
_MAX_STUCK = 4  # threads lost in the library; then this process makes no more communicators


class NcclImporter:
    """Owns the links, by exporter process."""

    def __init__(
        self, *, memory: PoolMemory, proofs: ConnectionProofs, library: NcclLibrary, limits: CommunicatorLimits
    ) -> None:
        self._proofs = proofs
        self._memory, self._library, self._limits = memory, library, limits
        self._identity = secrets.token_bytes(messages.IDENTITY_BYTES)
        self._slot = threading.Lock()
        self._peers: OrderedDict[_Address, _PeerLink] = OrderedDict()  # the longest unused first
        self._channels: set[NcclChannel] = set()

    @property
    def name(self) -> str:
        return NAME

    def endpoint(self) -> bytes:
        """Return the importer's endpoint; empty if the library cannot be used, so that no exporter chooses it."""
        if self._num_stuck() >= _MAX_STUCK:
            return b""
        try:
            return IMPORTER.pack(self._identity, self._library.version()) + self._library.device()
        except NcclFailed:
            return b""

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> "NcclChannel":
        address, token = _parse_endpoint(exporter_endpoint)
        entry = messages.Entry(epoch.ticket_id, epoch.attempt, token)
        if self._num_stuck() >= _MAX_STUCK:
            raise TransportError("too many calls hang in NCCL")
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _PeerLink(address, self._library, self._limits, self._slot)
        self._peers.move_to_end(address)
        try:
            hello = messages.Hello(self._identity, self._library.version(), entry)
        except NcclFailed as error:
            raise TransportError(f"NCCL: {error}") from error
        link, thread = await peer.usable_link(hello, Opening(self._proofs, NAME, epoch.exporter))
        channel = NcclChannel(link, thread, entry, self._memory, self._limits, self._channels.discard)
        self._channels.add(channel)
        self._close_idle_peers()
        return channel

    async def close(self) -> None:
        for channel in tuple(self._channels):
            await channel.destroy()
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))
        self._peers.clear()

    def _num_stuck(self) -> int:
        now_s = time.monotonic()
        return sum(peer.is_stuck(now_s) for peer in self._peers.values())

    def _close_idle_peers(self) -> None:
        """Close the links that were unused for longest, if there are more than the bound."""
        used = {id(channel.link) for channel in self._channels}
        idle = [address for address, peer in self._peers.items() if peer.is_idle and id(peer.link) not in used]
        for address in idle[: max(0, len(self._peers) - _MAX_PEERS)]:
            self._peers.pop(address).close_link()


class _PeerLink:
    """The link to one exporter process, its thread, and its failures. Use it on the event loop."""

    def __init__(
        self, address: _Address, library: NcclLibrary, limits: CommunicatorLimits, slot: threading.Lock
    ) -> None:
        self._address, self._library, self._limits, self._slot = address, library, limits, slot
        self._life = CommunicatorLife(limits)
        self.link: NcclLink | None = None
        self._thread: LoneThread | None = None
        self._making: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return self._making is None and (self.link is None or self.link.is_usable or self.link.quiet.is_set())

    def is_stuck(self, now_s: float) -> bool:
        """Return whether a call of this link hangs in the library."""
        return self.link is not None and not self.link.quiet.is_set() and not self._life.is_promising(now_s)

    async def usable_link(self, hello: messages.Hello, opening: Opening) -> tuple[NcclLink, LoneThread]:
        """Return the link and its thread, and make them first if necessary. Raises TransportError.

        Several callers may wait for one communicator; a cancelled one does not stop the others."""
        if self.link is None or not self.link.is_usable:
            if self._making is None:
                self._making = asyncio.create_task(self._make(hello, opening))
                self._making.add_done_callback(self._made)
            try:
                await asyncio.shield(self._making)
            except asyncio.CancelledError:
                if self._making is None or not self._making.cancelled():
                    raise
                raise TransportError("the importer is closing") from None
        assert self.link is not None and self._thread is not None
        return self.link, self._thread

    def close_link(self) -> None:
        """End the link without waiting for it."""
        if self.link is not None and self._thread is not None:
            link = self.link
            link.poison("it was unused for too long")
            self._thread.submit(lambda: link.abort("", failed=False))
            self._thread.end()

    async def close(self) -> None:
        """End the link and wait for it, for at most `abort_s` if a call hangs in the library."""
        if self._making is not None:
            self._making.cancel()
        self.close_link()
        if self.link is not None:
            await asyncio.to_thread(self.link.quiet.wait, self._limits.abort_s)

    def _made(self, making: "asyncio.Task[None]") -> None:
        self._making = None
        if not making.cancelled():
            making.exception()  # raised to the waiting callers

    async def _make(self, hello: messages.Hello, opening: Opening) -> None:
        limits = self._limits
        if self.link is not None and not await asyncio.to_thread(self.link.quiet.wait, limits.grace_s):
            raise TransportError(f"the last communicator with {self._address} has not ended")
        if not self._life.is_promising(time.monotonic()):
            raise TransportError(f"NCCL with {self._address} is not used until its backoff ends: {self._life.why}")
        try:
            connection = await connect(self._address, opening)
        except OSError as error:
            raise TransportError(f"connecting to {self._address}: {error}") from error
        if self._thread is not None:
            self._thread.end()
        link = self.link = NcclLink(connection, self._library, self._life, self._slot)
        self._thread = LoneThread("kv-nccl-link", idle=link.look, idle_s=limits.look_s)
        agreeing = self._thread.submit(lambda: _agree(link, hello, limits))
        deadline_s = time.monotonic() + limits.agree_s + limits.initialise_s + limits.warm_s
        while not await _ends_within(agreeing, limits.look_s):
            if link.is_abandoned:
                link.poison("the exporter is gone")
                raise TransportError(f"the exporter {self._address} ended the connection while NCCL initialised")
            if time.monotonic() >= deadline_s:
                link.poison("NCCL did not initialise in time")
                raise TransportError(f"NCCL with {self._address} did not initialise in time")
        agreeing.result()


class NcclChannel:
    """The Channel of `nccl`."""

    def __init__(
        self,
        link: NcclLink,
        thread: LoneThread,
        entry: messages.Entry,
        memory: PoolMemory,
        limits: CommunicatorLimits,
        ended: "Callable[[NcclChannel], None]",
    ) -> None:
        self.link = link
        self._thread, self._entry, self._limits, self._ended = thread, entry, limits, ended
        self._raw = memory.raw  # keeps the memory alive as long as a thread may write to it
        self._block_bytes, self._num_blocks = memory.block_bytes, memory.num_blocks
        self._open = True
        self._read: Future[None] | None = None  # in flight, or ended by anything but success

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        assert len(remote_block_ids) == len(local_block_ids)
        assert all(0 <= block_id < self._num_blocks for block_id in local_block_ids)
        if not self._open or self._read is not None:
            raise TransportError("the channel is closed or poisoned")
        stretches = list(runs(remote_block_ids, local_block_ids)) if remote_block_ids else []
        remote = tuple(messages.Run(source, length) for source, _, length in stretches)
        base, size = self._raw.data_ptr(), self._block_bytes
        pieces = [Piece(base + target * size, length * size) for _, target, length in stretches]
        self._read = self._thread.submit(lambda: self._receive(remote, pieces))
        await asyncio.wrap_future(self._read)
        self._read = None

    async def destroy(self) -> None:
        """Destroy the channel.

        A transfer in progress gets `grace_s` to end by itself, which proves that nothing is written any more and keeps
        the link."""
        self._open = False
        read, limits = self._read, self._limits
        if read is not None and not read.cancel() and not await _ends_within(read, limits.grace_s):
            self.link.poison("a hand-off abandoned its read")
            await _ends_within(read, None)
        self._ended(self)

    async def finish(self) -> None:
        await self.destroy()

    def _receive(self, remote: tuple[messages.Run, ...], pieces: Sequence[Piece]) -> None:
        """Receive on the link's thread. Any failure except a refusal ends the communicator before it is raised."""
        try:
            number = self.link.next_number
            _ask(self.link.connection, messages.Read(self._entry, number, remote), pieces, self._limits.transfer_s)
            self.link.receive(number, pieces)
        except messages.Refusal:
            raise
        except Exception as error:  # any error: the library may have begun to write
            self.link.abort(error_text(error))
            raise TransportError(error_text(error)) from error


def _ask(connection: socket.socket, read: messages.Read, pieces: Sequence[Piece], timeout_s: float) -> None:
    """Announce a read and check the answer. Raises Refusal, TransportError, OSError."""
    connection.settimeout(timeout_s)
    messages.send(connection, read)
    answer = messages.expect(connection, messages.Answer)
    asked = (read.entry.ticket_id, read.entry.attempt, read.number)
    if (answer.ticket_id, answer.attempt, answer.number) != asked:
        raise TransportError("the exporter answered another read")
    if answer.refusal:
        raise messages.Refusal(answer.refusal)
    if answer.num_bytes != sum(piece.num_bytes for piece in pieces):
        wanted = sum(piece.num_bytes for piece in pieces)
        raise TransportError(f"the exporter announced {answer.num_bytes} bytes, and the read needs {wanted}")


def _agree(link: NcclLink, hello: messages.Hello, limits: CommunicatorLimits) -> None:
    """Make the communicator on the link's thread. Raises TransportError; then the link has ended."""
    try:
        link.begin()
        _make_communicator(link, hello, limits)
    except messages.Refusal:
        link.withdraw()
        link.abort("")
        raise
    except Exception as error:  # any error: a link that has not ended allows no other one
        link.abort(error_text(error))
        raise TransportError(error_text(error)) from error


def _make_communicator(link: NcclLink, hello: messages.Hello, limits: CommunicatorLimits) -> None:
    connection = link.connection
    connection.settimeout(limits.agree_s)
    messages.send(connection, hello)
    ready = messages.expect(connection, messages.Ready)
    if ready.version != hello.version:
        raise TransportError(f"this worker has NCCL {hello.version}, and the exporter has {ready.version}")
    messages.send(connection, ready)
    link.agreed()
    unique_id = messages.expect(connection, messages.UniqueId).unique_id
    link.connect(unique_id, IMPORTER_RANK)
    connection.settimeout(link.time_left_s())
    messages.expect(connection, messages.Warm)
    messages.send(connection, messages.Warm())
    link.warmed()


async def _ends_within(future: "Future[None]", timeout_s: float | None) -> bool:
    """Wait for a future, with a timeout. Return whether it ended, successfully or not."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: "Future[None]") -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(tell)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    return future.done()


def _parse_endpoint(endpoint: bytes) -> tuple[_Address, bytes]:
    try:
        token, port = ENDPOINT.unpack_from(endpoint)
        return (endpoint[ENDPOINT.size :].decode(), port), token
    except (struct.error, UnicodeDecodeError) as error:
        raise TransportError("the endpoint is damaged or belongs to another transport") from error


def unavailable(setup: TransportSetup) -> str:
    return why_not_loadable() if setup.memory.raw.is_cuda else "the pool is not on a GPU"


def not_worth_it(setup: TransportSetup) -> str:
    """Return why the transport is used only if --kv-transports names it."""
    return "the cluster uses TLS and NCCL does not encrypt" if setup.server_tls is not None else ""


def exporter(setup: TransportSetup) -> NcclExporter:
    return NcclExporter(
        memory=setup.memory,
        proofs=setup.proofs,
        library=cupy_nccl(_device_index(setup)),
        host=setup.host,
        advertise_host=setup.advertise_host,
        limits=CommunicatorLimits(transfer_s=setup.timeout_s),
    )


def importer(setup: TransportSetup) -> NcclImporter:
    return NcclImporter(
        memory=setup.memory,
        proofs=setup.proofs,
        library=cupy_nccl(_device_index(setup)),
        limits=CommunicatorLimits(transfer_s=setup.timeout_s),
    )


def _device_index(setup: TransportSetup) -> int:
    return setup.memory.raw.get_device()
