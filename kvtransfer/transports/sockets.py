"""Blocking sockets, used from threads that may wait: whole messages, vectored, and ends that wake a waiting thread."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import Future

_MAX_VIEWS = 512  # per system call; the kernel takes 1024
_CONNECT_TIMEOUT_S = 5.0


async def connect(address: tuple[str, int]) -> socket.socket:
    """A blocking TCP socket. Raises OSError."""
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, resolved = (await loop.getaddrinfo(*address, type=socket.SOCK_STREAM))[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, resolved)
        connection.setblocking(True)
        tune(connection)
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


def shut_down(connection: socket.socket) -> None:
    """Ends both directions, which wakes whoever waits on it; the descriptor stays until its thread is joined."""
    with contextlib.suppress(OSError):  # not connected any more
        connection.shutdown(socket.SHUT_RDWR)


def receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    """Exactly so many bytes; None when the peer ended the connection before the first. Raises OSError."""
    data = bytearray(num_bytes)
    if not _fill(connection, [memoryview(data)]):
        return None
    return bytes(data)


def receive_into(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fills every view. Raises OSError, ConnectionError when the peer ends before that."""
    if not _fill(connection, list(views)):
        raise ConnectionResetError("the peer ended the connection")


def send(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Raises OSError."""
    left = list(views)
    while left:
        left = _advanced(left, connection.sendmsg(left[:_MAX_VIEWS]))


async def joined(future: "Future[None]") -> None:
    """Waits until the thread's work has ended in whatever way; what it raised was told to whoever started it."""
    waiter = asyncio.wrap_future(future)
    await asyncio.wait([waiter])
    if not waiter.cancelled():
        waiter.exception()


def _fill(connection: socket.socket, views: list[memoryview]) -> bool:
    """False: the peer ended before the first byte."""
    left = [view for view in views if len(view)]
    started = False
    while left:
        num_bytes = connection.recvmsg_into(left[:_MAX_VIEWS])[0]
        if num_bytes == 0:
            if started:
                raise ConnectionResetError("the peer ended the connection in the middle of a message")
            return False
        started = True
        left = _advanced(left, num_bytes)
    return True


def _advanced(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The views without their first bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
