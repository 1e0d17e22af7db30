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
# choose a read is half as fast. A real link needs the kernel's. Set once: changes between reads make them slower.
_LOCAL_BUFFER_BYTES = 256 << 10


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


def limit_stalls(connection: socket.socket, timeout_s: float) -> None:
    """From now on a blocking call raises OSError once it has made no progress for `timeout_s`."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(timeout_s)  # it is read by records: each is progress
        return
    # The kernel's own timeouts: with Python's, the socket would no longer block, and a call would return early.
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _packed_time(timeout_s))


def shut_down(connection: socket.socket) -> None:
    """Ends both directions, which wakes whoever waits on it; the descriptor stays until its thread is joined."""
    with contextlib.suppress(OSError):  # not connected any more
        # Not SSLSocket's own: that would leave the thread reading what is still encrypted.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    """Exactly so many bytes; None when the peer ended the connection before the first. Raises OSError."""
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    data = connection.recv(num_bytes, flags)
    if not data:
        return None
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data), flags)
        if not more:
            raise ConnectionResetError("the peer ended the connection in the middle of a message")
        data += more
    return data


def receive_into(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fills every view. Raises OSError, ConnectionError when the peer ends before that."""
    for first in range(0, len(views), _MAX_VIEWS):
        left = list(views[first : first + _MAX_VIEWS])
        while left:
            if isinstance(connection, ssl.SSLSocket):
                num_bytes = connection.recv_into(left[0])  # what one record holds
            else:
                num_bytes = connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            if num_bytes == 0:
                raise ConnectionResetError("the peer ended the connection")
            left = advanced(left, num_bytes)


def send(connection: socket.socket, views: Sequence[memoryview], timeout_s: float) -> None:
    """All of it. Raises OSError; also when the peer takes nothing for so long."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(timeout_s)
        for view in views:
            connection.sendall(view)
        connection.settimeout(None)
        return
    # The kernel's own timeout, not Python's: with that one, a call would return whenever the buffer is full.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _packed_time(timeout_s))
    for first in range(0, len(views), _MAX_VIEWS):
        left = list(views[first : first + _MAX_VIEWS])
        while left:
            left = advanced(left, connection.sendmsg(left))


def _packed_time(seconds: float) -> bytes:
    """As `struct timeval`."""
    microseconds = max(1, round(seconds * 1e6))  # zero would mean no timeout
    return struct.pack("ll", *divmod(microseconds, 1_000_000))


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
