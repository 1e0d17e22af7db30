"""The transport `tcp`: blocks go straight from the exporter's pool into the importer's, by vectored send and receive.

A socket serves one hand-off at a time and is kept for the next one if the hand-off ends without an error. The importer
announces every read with its epoch and a number, and the exporter repeats both in its answer. A read that ends in any
other way poisons the socket: it is shut down and its reading thread joined before the destination blocks are used
again. A read fails when it has received nothing for `stall_timeout_s`: a slow link does not end it, a silent exporter
does.

Sockets block, each in its own thread: the kernel copies without the GIL, the event loop never waits, and a peer that
hangs delays only its own reads. A short read is received on the event loop (`LoopReceiver`), because waking the thread
and being woken by it would take longer. With TLS, which is mutual, the thread does every read.
"""

import asyncio
import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cluster.messages import Epoch
from cluster.settings.worker_settings import READ_STALL_TIMEOUT_S
from kvtransfer.memory import SHORT_BYTES, HostMemory, PoolMemory
from kvtransfer.transports.base import TransportError, TransportSetup
from kvtransfer.transports.proven_connections import ClientHandshake, ConnectionProofs, Opening, connect
from kvtransfer.transports.sockets import advanced, joined, limit_stalls, receive, receive_into, shut_down
from kvtransfer.transports.tcp.exporting import ANNOUNCEMENT, ANSWER, MAGIC, parse_endpoint
from kvtransfer.transports.tcp.exporting import TcpExporter as TcpExporter

_LOT_BYTES = 64 << 10  # wake the event loop for this many; fits into any socket's buffer
NAME = "tcp"
_MAX_SHORT_BLOCKS = 1024  # the most pieces that the kernel accepts in one call


class LoopReceiver:
    """Receives on the event loop over one blocking socket without TLS. At most one `receive` at a time."""

    def __init__(self, connection: socket.socket, stall_timeout_s: float) -> None:
        self._connection, self._stall_timeout_s = connection, stall_timeout_s
        self._left: list[memoryview] = []
        self._head: Callable[[], Sequence[memoryview]] | None = None  # until the head has arrived
        self._received: asyncio.Future[None] | None = None  # while one waits
        self._stall: asyncio.TimerHandle | None = None  # likewise
        self._num_left = 0  # bytes that were missing when something last arrived

    async def receive(self, head_bytes: int, num_bytes: int, body: Callable[[bytes], Sequence[memoryview]]) -> None:
        """Receive a head of `head_bytes` and then a body, by default of `num_bytes`.

        `body(head)` returns the views to fill, or raises TransportError. Raises that and OSError; ConnectionError if
        the peer ends the connection before the end or `abort` is called."""
        head = bytearray(head_bytes)
        self._left = [memoryview(head)]
        self._head = lambda: body(bytes(head))
        self._receive_available()
        if not self._left:
            return
        self._wake_at(sum(map(len, self._left)) + (num_bytes if self._head is not None else 0))
        loop = asyncio.get_running_loop()
        self._received = loop.create_future()
        loop.add_reader(self._connection, self._on_readable, self._received)
        self._expect_more(self._received)
        try:
            await self._received
        finally:
            self.abort()
        self._wake_at(1)

    def abort(self) -> None:
        """Stop writing. A waiting `receive` fails."""
        if self._received is None:
            return
        asyncio.get_running_loop().remove_reader(self._connection)
        if self._stall is not None:
            self._stall.cancel()
        if not self._received.done():
            self._received.set_exception(ConnectionAbortedError("the channel was closed"))
        self._received = None

    def _on_readable(self, received: asyncio.Future[None]) -> None:
        if received.done():
            return
        try:
            self._receive_available()
            if not self._left:
                received.set_result(None)
            elif self._head is None:
                self._wake_at(sum(map(len, self._left)))
        except (OSError, TransportError) as error:
            received.set_exception(error)

    def _expect_more(self, received: asyncio.Future[None]) -> None:
        """Check again after the timeout, and fail if nothing has arrived by then.

        The kernel reports few bytes only once there are as many as `_wake_at` requested."""
        self._num_left = sum(map(len, self._left))
        self._stall = asyncio.get_running_loop().call_later(self._stall_timeout_s, self._on_stall, received)

    def _on_stall(self, received: asyncio.Future[None]) -> None:
        num_left, had_head = self._num_left, self._head is None
        self._on_readable(received)
        if received.done():
            return
        if had_head == (self._head is None) and sum(map(len, self._left)) == num_left:
            received.set_exception(TransportError(f"nothing arrived for {self._stall_timeout_s:g} s"))
        else:
            self._expect_more(received)

    def _wake_at(self, num_bytes: int) -> None:
        """Wake the event loop when `num_bytes`, or a large part of them, have arrived, or at the end of the
        connection."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(num_bytes, _LOT_BYTES))

    def _receive_available(self) -> None:
        """Receive the available bytes. Raises OSError and the errors of `body`."""
        while self._left:
            try:
                num_bytes = self._connection.recvmsg_into(self._left, 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                return
            if num_bytes == 0:
                raise ConnectionResetError("the peer ended the connection")
            self._left = advanced(self._left, num_bytes)
            if not self._left and self._head is not None:
                head, self._head = self._head, None
                self._left = list(head())


def unavailable(setup: TransportSetup) -> str:
    return ""


def exporter(setup: TransportSetup) -> "TcpExporter":
    return TcpExporter(
        memory=setup.memory,
        proofs=setup.proofs,
        host=setup.host,
        advertise_host=setup.advertise_host,
        send_timeout_s=setup.timeout_s,
        tls=setup.server_tls,
    )


def importer(setup: TransportSetup) -> "TcpImporter":
    return TcpImporter(
        memory=setup.memory, proofs=setup.proofs, stall_timeout_s=setup.stall_timeout_s, tls=setup.client_tls
    )


@dataclass(frozen=True, slots=True)
class _Connection:
    """A socket and the thread that reads from it."""

    address: tuple[str, int]
    socket: socket.socket
    reader: ThreadPoolExecutor
    stall_timeout_s: float

    def usable(self) -> bool:
        """Return whether an idle connection is open. It expects nothing, so bytes or an end mean that it is over."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the connection. Its thread must not be reading."""
        self.socket.close()
        self.reader.shutdown(wait=False)


class TcpImporter:
    """Opens channels to exporters. It owns the idle connections; a channel owns the one that it uses."""

    def __init__(
        self,
        *,
        memory: PoolMemory,
        proofs: ConnectionProofs,
        stall_timeout_s: float = READ_STALL_TIMEOUT_S,
        tls: ClientHandshake | None = None,
    ) -> None:
        self._memory = HostMemory(memory)
        self._stall_timeout_s = stall_timeout_s
        self._block_bytes = memory.block_bytes
        self._proofs, self._tls = proofs, tls
        self._idle: dict[tuple[str, int], list[_Connection]] = {}
        self._channels: set[TcpChannel] = set()
        self._closed = False

    @property
    def name(self) -> str:
        return NAME

    def endpoint(self) -> bytes:
        return b""

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> "TcpChannel":
        address, token = parse_endpoint(exporter_endpoint)
        connection = self._take_idle(address)
        if connection is None:
            opening = Opening(self._proofs, NAME, epoch.exporter)
            connection = await _connected(address, opening, self._tls, self._stall_timeout_s)
        channel = TcpChannel(connection, epoch, token, self._memory, self._block_bytes, self._ended)
        self._channels.add(channel)
        return channel

    async def close(self) -> None:
        self._closed = True
        for channel in tuple(self._channels):
            await channel.destroy()
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _take_idle(self, address: tuple[str, int]) -> _Connection | None:
        connections = self._idle.get(address, [])
        while connections:
            connection = connections.pop()
            if connection.usable():
                return connection
            connection.close()
        self._idle.pop(address, None)
        return None

    def _ended(self, channel: "TcpChannel", reusable: _Connection | None) -> None:
        self._channels.discard(channel)
        if reusable is None:
            return
        if self._closed:
            reusable.close()
        else:
            self._idle.setdefault(reusable.address, []).append(reusable)
            self._drop_dead()

    def _drop_dead(self) -> None:
        """Close dead idle connections. An exporter that ended is not asked again, so they are searched whenever one is
        added."""
        for address, connections in tuple(self._idle.items()):
            for connection in tuple(connections):
                if not connection.usable():
                    connections.remove(connection)
                    connection.close()
            if not connections:
                del self._idle[address]


class TcpChannel:
    """Reads the blocks of one hand-off over a TCP connection: a Channel."""

    def __init__(
        self,
        connection: _Connection,
        epoch: Epoch,
        token: bytes,
        memory: HostMemory,
        block_bytes: int,
        ended: "Callable[[TcpChannel, _Connection | None], None]",  # with the connection if it may be used again
    ) -> None:
        self._connection: _Connection | None = connection
        self._epoch, self._token = epoch, token
        self._memory, self._block_bytes = memory, block_bytes
        self._ended = ended
        self._is_tls = isinstance(connection.socket, ssl.SSLSocket)
        self._receiver = LoopReceiver(connection.socket, connection.stall_timeout_s)
        self._address = connection.address
        self._number = 0
        self._is_reading = False  # in flight, or ended by anything but success
        self._thread_read: Future[None] | None = None  # likewise, of a read on the connection's thread

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        assert len(remote_block_ids) == len(local_block_ids)
        if self._connection is None or self._is_reading:
            raise TransportError("the channel is closed or poisoned")
        self._number += 1
        announcement = ANNOUNCEMENT.pack(
            MAGIC, self._epoch.ticket_id, self._epoch.attempt, self._number, self._token, len(remote_block_ids)
        ) + struct.pack(f"<{len(remote_block_ids)}I", *remote_block_ids)
        self._is_reading = True
        try:
            if self._is_short(len(local_block_ids)):
                await self._receive_on_loop(self._connection.socket, announcement, local_block_ids)
            else:
                self._thread_read = self._connection.reader.submit(
                    self._receive_on_thread, self._connection.socket, announcement, tuple(local_block_ids)
                )
                await asyncio.wrap_future(self._thread_read)
        except OSError as error:
            raise TransportError(f"reading from {self._address}: {error}") from error
        self._thread_read, self._is_reading = None, False

    async def destroy(self) -> None:
        connection = self._connection
        if connection is None:
            return
        self._receiver.abort()
        shut_down(connection.socket)
        if self._thread_read is not None:
            await joined(self._thread_read)
        if self._connection is not None:  # not by another call meanwhile
            self._connection = None
            connection.close()
            self._ended(self, None)

    async def finish(self) -> None:
        if self._is_reading:
            await self.destroy()
        elif self._connection is not None:
            connection, self._connection = self._connection, None
            self._ended(self, connection)

    def _is_short(self, num_blocks: int) -> bool:
        few = num_blocks <= _MAX_SHORT_BLOCKS and num_blocks * self._block_bytes <= SHORT_BYTES
        return few and self._memory.is_pool and not self._is_tls

    async def _receive_on_loop(
        self, connection: socket.socket, announcement: bytes, local_block_ids: Sequence[int]
    ) -> None:
        if connection.send(announcement, socket.MSG_DONTWAIT) < len(announcement):
            raise TransportError("the exporter does not read announcements")  # they fit into any idle socket

        def body(answer: bytes) -> list[memoryview]:
            self._check_answer(answer, len(local_block_ids))
            return self._memory.incoming(local_block_ids).views()

        await self._receiver.receive(ANSWER.size, len(local_block_ids) * self._block_bytes, body)

    def _receive_on_thread(
        self, connection: socket.socket, announcement: bytes, local_block_ids: tuple[int, ...]
    ) -> None:
        connection.sendall(announcement)
        answer = receive(connection, ANSWER.size)
        if answer is None:
            raise TransportError("the exporter closed the connection")
        self._check_answer(answer, len(local_block_ids))
        rows = self._memory.incoming(local_block_ids)
        receive_into(connection, rows.views())
        self._memory.arrived(rows, local_block_ids)

    def _check_answer(self, answer: bytes, num_blocks: int) -> None:
        magic, ticket_id, attempt, answered, refused, num_bytes = ANSWER.unpack(answer)
        expected = (MAGIC, self._epoch.ticket_id, self._epoch.attempt, self._number)
        if (magic, ticket_id, attempt, answered) != expected:
            raise TransportError("the exporter answered another read")
        if refused:
            raise TransportError("the exporter has not admitted this epoch, or has no such blocks")
        if num_bytes != num_blocks * self._block_bytes:
            raise TransportError(
                f"the exporter announced {num_bytes} bytes for {num_blocks} blocks of {self._block_bytes}"
            )


async def _connected(
    address: tuple[str, int], opening: Opening, tls: ClientHandshake | None, stall_timeout_s: float
) -> _Connection:
    try:
        connection = await connect(address, opening, tls)
        limit_stalls(connection, stall_timeout_s)
        return _Connection(address, connection, ThreadPoolExecutor(1, "kv-tcp-read"), stall_timeout_s)
    except OSError as error:
        raise TransportError(f"connecting to {address}: {error}") from error
