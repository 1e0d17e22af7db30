"""A gRPC channel that uses other credentials when they change, which gRPC's own channels cannot.

Calls that begin after a change use a new connection. Calls in flight end on the connection where they began, which is
closed after the last of them. Owns those connections, never the credentials.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc


class RenewedChannel(grpc.aio.Channel):
    def __init__(self, connect: Callable[[], grpc.aio.Channel], version: Callable[[], int]) -> None:
        """`connect` returns a channel with the present credentials, and `version` changes with them."""
        self._connect, self._version = connect, version
        self._opened = _Opened(connect(), version())
        self._former: set[_Opened] = set()  # with calls in flight
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for opened in (self._opened, *self._former):
            await opened.channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._present().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._present().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._present().channel.channel_ready()

    def unary_unary(self, method: str, *codec: Any, **more: Any) -> Any:
        return self._calls("unary_unary", method, codec, more)

    def unary_stream(self, method: str, *codec: Any, **more: Any) -> Any:
        return self._calls("unary_stream", method, codec, more)

    def stream_unary(self, method: str, *codec: Any, **more: Any) -> Any:
        return self._calls("stream_unary", method, codec, more)

    def stream_stream(self, method: str, *codec: Any, **more: Any) -> Any:
        return self._calls("stream_stream", method, codec, more)

    def _calls(self, kind: str, method: str, codec: tuple[Any, ...], more: dict[str, Any]) -> Any:
        opened, begin_call = self._opened, getattr(self._opened.channel, kind)(method, *codec, **more)

        def begin(*arguments: Any, **options: Any) -> Any:
            nonlocal opened, begin_call
            now = self._present()
            if now is not opened:
                opened, begin_call = now, getattr(now.channel, kind)(method, *codec, **more)
            call = begin_call(*arguments, **options)
            now.num_calls += 1
            call.add_done_callback(lambda _: self._ended(now))
            return call

        return begin

    def _present(self) -> "_Opened":
        version = self._version()
        if version != self._opened.version:
            former, self._opened = self._opened, _Opened(self._connect(), version)
            self._former.add(former)
            self._close_unused(former)
        return self._opened

    def _ended(self, opened: "_Opened") -> None:
        opened.num_calls -= 1
        self._close_unused(opened)

    def _close_unused(self, opened: "_Opened") -> None:
        if opened in self._former and not opened.num_calls:
            self._former.discard(opened)
            closing = asyncio.create_task(opened.channel.close(), name="close a channel with former credentials")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


class _Opened:
    """A connection, the version of its credentials, and its calls in flight."""

    def __init__(self, channel: grpc.aio.Channel, version: int) -> None:
        self.channel, self.version = channel, version
        self.num_calls = 0
