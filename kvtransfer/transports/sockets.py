"""Blocking sockets, plain or TLS, used from threads that may wait: whole messages, and ends that wake who waits."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Sequence
from concurrent.futures import Future

_MAX_VIEWS = 1024  # per system call: what the kernel takes
_CONNECT_TIMEOUT_S = 5.0
# Between two processes of one host, what is on its way should stay in a cache: with the buffers that the kernel would
# choose it is half as fast. A real link needs those.
_LOCAL_BUFFER_BYTES = 512 << 10


async def connect(address: tuple[str, int], tls: ssl.SSLContext | None = None) -> socket.socket:
    """A blocking TCP socket, with TLS if a context is given. Raises OSError; ssl.SSLError is one."""
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, resolved = (await loop.getaddrinfo(*address, type=socket.SOCK_STREAM))[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, resolved)
        tune(connection)
        connection.settimeout(_CONNECT_TIMEOUT_S)
        if tls is not None:
            connection = await asyncio.to_thread(tls.wrap_socket, connection, server_hostname=address[0])
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def tune(connection: socket.socket) -> None:
    """Small messages at once; a host that vanished is noticed within a minute or two."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if connection.getsockname()[0] == connection.getpeername()[0]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOCAL_BUFFER_BYTES)


def limit_waits(connection: socket.socket, timeout_s: float | None) -> None:
    """A send or receive that makes no progress for so long raises OSError; None: waits for ever."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(timeout_s)
        return
    # Left to the kernel, a call goes on until all is done; Python's own timeout would make it return piece by piece.
    packed = struct.pack("ll", int(timeout_s or 0), round(((timeout_s or 0) % 1) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)


def shut_down(connection: socket.socket) -> None:
    """Ends both directions, which wakes whoever waits on it; the descriptor stays until its thread is joined."""
    with contextlib.suppress(OSError):  # not connected any more
        # Not SSLSocket's own: that would leave the thread reading what is still encrypted.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    """Exactly so many bytes; None when the peer ended the connection before the first. Raises OSError."""
    data = bytearray(num_bytes)
    if not _fill(connection, [memoryview(data)]):
        return None
    return bytes(data)


def receive_into(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fills every view. Raises OSError, ConnectionError when the peer ends before that."""
    if not _fill(connection, views):
        raise ConnectionResetError("the peer ended the connection")


def send(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Raises OSError."""
    if isinstance(connection, ssl.SSLSocket):
        for view in views:
            connection.sendall(view)
        return
    for first in range(0, len(views), _MAX_VIEWS):
        left = list(views[first : first + _MAX_VIEWS])
        while left:
            left = advanced(left, connection.sendmsg(left))


def advanced(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The views without their first bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


async def joined(future: "Future[None]") -> None:
    """Waits until the thread's work has ended in whatever way; what it raised was told to whoever started it."""
    waiter = asyncio.wrap_future(future)
    await asyncio.wait([waiter])
    if not waiter.cancelled():
        waiter.exception()


def _fill(connection: socket.socket, views: Sequence[memoryview]) -> bool:
    """False: the peer ended before the first byte."""
    is_first = True
    for first in range(0, len(views), _MAX_VIEWS):
        left = list(views[first : first + _MAX_VIEWS])
        while left:
            num_bytes = _receive_some(connection, left)
            if num_bytes == 0 and is_first:
                return False
            if num_bytes == 0:
                raise ConnectionResetError("the peer ended the connection in the middle of a message")
            is_first = False
            left = advanced(left, num_bytes)
    return True


def _receive_some(connection: socket.socket, views: list[memoryview]) -> int:
    """All of them, unless the peer ends or waits too long; with TLS what one record holds."""
    if isinstance(connection, ssl.SSLSocket):
        return connection.recv_into(views[0])
    return connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
