"""Receiving on the event loop itself, for answers so short that waking a thread and being woken by it takes longer.

Owns nothing but a wait in progress, which fails when nothing has arrived for `stall_timeout_s`. Nothing is written
except on the event loop's thread, between two of its turns.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.host.sockets import advanced

_LOT_BYTES = 64 << 10  # worth being woken for; fits into any socket's buffer


class LoopReceiver:
    """Over one blocking socket without TLS. At most one `receive` at a time."""

    def __init__(self, connection: socket.socket, stall_timeout_s: float) -> None:
        self._connection, self._stall_timeout_s = connection, stall_timeout_s
        self._left: list[memoryview] = []
        self._head: Callable[[], Sequence[memoryview]] | None = None  # until it has come
        self._received: asyncio.Future[None] | None = None  # while one waits
        self._stall: asyncio.TimerHandle | None = None  # likewise
        self._num_left = 0  # bytes that were missing when something last arrived

    async def receive(self, head_bytes: int, num_bytes: int, body: Callable[[bytes], Sequence[memoryview]]) -> None:
        """A head of so many bytes, for which `body` tells where the rest goes, `num_bytes` if all is well, or raises
        TransportError. Raises that, OSError, and ConnectionError when the peer ends before, or it is aborted."""
        head = bytearray(head_bytes)
        self._left = [memoryview(head)]
        self._head = lambda: body(bytes(head))
        self._take()
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
        """Nothing is written any more; a `receive` that waits fails."""
        if self._received is None:
            return
        asyncio.get_running_loop().remove_reader(self._connection)
        if self._stall is not None:
            self._stall.cancel()
        if not self._received.done():
            self._received.set_exception(ConnectionAbortedError("given up"))
        self._received = None

    def _on_readable(self, received: asyncio.Future[None]) -> None:
        if received.done():
            return
        try:
            self._take()
            if not self._left:
                received.set_result(None)
            elif self._head is None:
                self._wake_at(sum(map(len, self._left)))
        except (OSError, TransportError) as error:
            received.set_exception(error)

    def _expect_more(self, received: asyncio.Future[None]) -> None:
        """Looks again after the timeout, and fails if nothing has arrived by then: the kernel reports a few bytes only
        once there are as many as `_wake_at` asked for."""
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
        """The loop is woken when so many are there, or a good part of them, or the end."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(num_bytes, _LOT_BYTES))

    def _take(self) -> None:
        """What is there already. Raises what `body` raises, OSError."""
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
