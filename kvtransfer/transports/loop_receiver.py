"""Receiving on the event loop itself, for messages so short that waking a thread and being woken by it takes longer.

Owns nothing but a wait in progress. Nothing is written except on the event loop's thread, between two of its turns.
"""

import asyncio
import socket
from collections.abc import Sequence

from kvtransfer.transports.sockets import advanced

_LOT_BYTES = 64 << 10  # worth being woken for; fits into any socket's buffer


class LoopReceiver:
    """Over one blocking socket without TLS. At most one `fill` at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left: list[memoryview] = []
        self._filled: asyncio.Future[None] | None = None  # while one waits

    async def fill(self, views: Sequence[memoryview]) -> None:
        """Fills every view. Raises OSError, ConnectionError when the peer ends before that, or it is aborted."""
        self._left = list(views)
        self._take()
        if not self._left:
            return
        self._want(sum(map(len, self._left)))
        loop = asyncio.get_running_loop()
        self._filled = loop.create_future()
        loop.add_reader(self._connection, self._on_readable, self._filled)
        try:
            await self._filled
        finally:
            self.abort()
        self._want(1)

    def abort(self) -> None:
        """Nothing is written any more; a `fill` that waits fails."""
        if self._filled is None:
            return
        asyncio.get_running_loop().remove_reader(self._connection)
        if not self._filled.done():
            self._filled.set_exception(ConnectionAbortedError("given up"))
        self._filled = None

    def _on_readable(self, filled: asyncio.Future[None]) -> None:
        if filled.done():
            return
        try:
            self._take()
        except OSError as error:
            filled.set_exception(error)
        else:
            if self._left:
                self._want(sum(map(len, self._left)))
            else:
                filled.set_result(None)

    def _want(self, num_bytes: int) -> None:
        """The loop is woken when so many are there, or a good part of them, or the end."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(num_bytes, _LOT_BYTES))

    def _take(self) -> None:
        """What is there already."""
        while self._left:
            try:
                num_bytes = self._connection.recvmsg_into(self._left, 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                return
            if num_bytes == 0:
                raise ConnectionResetError("the peer ended the connection")
            self._left = advanced(self._left, num_bytes)
