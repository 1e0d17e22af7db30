"""TCP: blocks straight from the exporter's pool into the importer's, by vectored send and receive.

A socket serves one hand-off at a time and is kept for the next one when it ends clean. Every read is announced with
its epoch and a number and answered with the same; a read that ends any other way poisons the socket, which is shut
down and its reader joined before anyone may touch the destination blocks. A read that has received nothing for
`stall_timeout_s` fails: a slow link is no reason to stop it, a silent exporter is.

Sockets block, each in a thread of its own: the kernel copies without the interpreter's lock, the event loop never
waits, and a peer that hangs stops nobody else. A short read is received on the event loop, as it arrives: waking the
thread and being woken by it would take longer. With TLS, which is mutual, every read is the thread's.
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
from cluster.settings.transfer_settings import READ_STALL_TIMEOUT_S
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError, TransportMeans
from kvtransfer.transports.host.host_memory import SHORT_BYTES, HostMemory
from kvtransfer.transports.host.sockets import connect, joined, limit_stalls, receive, receive_into, shut_down
from kvtransfer.transports.tcp.exporting import TcpExporter as TcpExporter
from kvtransfer.transports.tcp.loop_receiver import LoopReceiver
from kvtransfer.transports.tcp.messages import ANNOUNCEMENT, ANSWER, MAGIC, parse_endpoint

NAME = "tcp"

_MAX_SHORT_BLOCKS = 1024  # the kernel takes so many pieces at once


def unavailable(means: TransportMeans) -> str:
    return ""


def exporter(means: TransportMeans) -> "TcpExporter":
    return TcpExporter(
        memory=means.memory,
        host=means.host,
        advertise_host=means.advertise_host,
        send_timeout_s=means.timeout_s,
        tls=means.server_tls,
    )


def importer(means: TransportMeans) -> "TcpImporter":
    return TcpImporter(memory=means.memory, stall_timeout_s=means.stall_timeout_s, tls=means.client_tls)


@dataclass(frozen=True, slots=True)
class _Connection:
    """A socket and the one thread that reads from it."""

    address: tuple[str, int]
    socket: socket.socket
    reader: ThreadPoolExecutor
    stall_timeout_s: float

    def usable(self) -> bool:
        """Nothing is expected on an idle connection: bytes or an end mean that it is over."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Only when its thread is not reading."""
        self.socket.close()
        self.reader.shutdown(wait=False)


class TcpImporter:
    """Opens channels to exporters. Owns the idle connections; a channel owns the one it uses."""

    def __init__(
        self,
        *,
        memory: PoolMemory,
        stall_timeout_s: float = READ_STALL_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._memory = HostMemory(memory)
        self._stall_timeout_s = stall_timeout_s
        self._block_bytes = memory.block_bytes
        self._tls = tls
        self._idle: dict[tuple[str, int], list[_Connection]] = {}
        self._channels: set[TcpChannel] = set()
        self._closed = False

    @property
    def name(self) -> str:
        return NAME

    def endpoint(self) -> bytes:
        return b""

    async def open(self, epoch: Epoch, exporter_endpoint: bytes) -> "TcpChannel":
        address, token = parse_endpoint(exporter_endpoint)
        connection = self._take_idle(address)
        if connection is None:
            connection = await _connected(address, self._tls, self._stall_timeout_s)
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
        """Nobody asks again for what was left of an exporter that has ended: it is looked for with every new one."""
        for address, connections in tuple(self._idle.items()):
            for connection in tuple(connections):
                if not connection.usable():
                    connections.remove(connection)
                    connection.close()
            if not connections:
                del self._idle[address]


class TcpChannel:
    """See Channel in base.py."""

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

    async def release(self) -> None:
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
            raise TransportError("the exporter does not take announcements")  # they fit into any idle socket

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
            raise TransportError("an answer to another read")
        if refused:
            raise TransportError("the exporter does not know this epoch, or has no such blocks")
        if num_bytes != num_blocks * self._block_bytes:
            raise TransportError(f"{num_bytes} bytes for {num_blocks} blocks of {self._block_bytes}")


async def _connected(address: tuple[str, int], tls: ssl.SSLContext | None, stall_timeout_s: float) -> _Connection:
    try:
        connection = await connect(address, tls)
        limit_stalls(connection, stall_timeout_s)
        return _Connection(address, connection, ThreadPoolExecutor(1, "kv-tcp-read"), stall_timeout_s)
    except OSError as error:
        raise TransportError(f"connecting to {address}: {error}") from error
