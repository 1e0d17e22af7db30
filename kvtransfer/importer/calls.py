"""Calls from an importer to exporters: gRPC channels, HandOff streams, and a pool of streams that are open in advance.

Starting a call costs both sides more than sending on an open one. So when a call ends without an error, the pool starts
the next one to the same exporter and keeps it for a short time.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from kvtransfer.wire.handoff_wire import IMPORTER_METADATA
from tandem.channel import explained
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc

_MAX_IDLE = 64
_Call = grpc.aio.StreamStreamCall[kv_pb2.ImporterMessage, kv_pb2.ExporterMessage]
READY_S = 5.0  # exporters refuse a call without an Attach after ten seconds


class GrpcChannelPool:
    """Owns one gRPC channel per exporter. Unused channels are kept; past a bound, the one unused for longest is
    closed."""

    def __init__(self, connect: Callable[[str], grpc.aio.Channel]) -> None:
        """`connect` opens a channel to an address."""
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._users: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._channels)

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        self._idle.pop(address, None)
        self._users[address] = self._users.get(address, 0) + 1
        try:
            yield self._channels[address]
        finally:
            self._users[address] -= 1
            if self._users[address] == 0:
                del self._users[address]
                self._idle[address] = None
            while len(self._idle) > _MAX_IDLE:
                unused, _ = self._idle.popitem(last=False)
                await self._channels.pop(unused).close()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        self._idle.clear()


@dataclass(frozen=True, slots=True)
class CallSettings:
    """The settings that all calls of one importer share."""

    channels: GrpcChannelPool
    importer: str  # "id@incarnation"
    timeout_s: float
    linger_s: float  # for the exporter to end the call after us


@dataclass(frozen=True, slots=True)
class _Listener:
    on_message: Callable[[kv_pb2.ExporterMessage], None]
    on_ended: Callable[[str], None]  # once, with the error; empty: the call ended in order


class OutgoingCall:
    """One HandOff stream to an exporter, run as one task. `on_over` is called once, when the task ends."""

    def __init__(self, settings: CallSettings, address: str, on_over: "Callable[[OutgoingCall], None]") -> None:
        self.address = address
        self._settings = settings
        self._on_over = on_over
        self._listener: _Listener | None = None
        self.is_over = False
        self.error = ""
        # At most a handful: Attach, Settle, and a Renew for each third of a lease.
        self._outbox: asyncio.Queue[kv_pb2.ImporterMessage | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(), name=f"hand-off call to {address}")

    def serve(self, *, on_message: Callable[[kv_pb2.ExporterMessage], None], on_ended: Callable[[str], None]) -> None:
        """Serve one hand-off; a call serves only one.

        Both callbacks run on the event loop; `on_ended` runs once, with the error."""
        assert self._listener is None and not self.is_over, "a call serves one hand-off"
        self._listener = _Listener(on_message, on_ended)

    @property
    def has_served(self) -> bool:
        return self._listener is not None

    def send(self, message: kv_pb2.ImporterMessage) -> None:
        self._outbox.put_nowait(message)

    def half_close(self) -> None:
        """Send nothing more after the queued messages."""
        self._outbox.put_nowait(None)

    async def _run(self) -> None:
        """Run until the exporter ends the call, or `linger_s` after the importer half-closed it. Cancelling ends it at
        once."""
        try:
            async with self._settings.channels.use(self.address) as channel:
                call = kv_pb2_grpc.KvTransferStub(channel).HandOff(
                    timeout=self._settings.timeout_s, metadata=((IMPORTER_METADATA, self._settings.importer),)
                )
                await self._converse(call)
        except grpc.aio.AioRpcError as failure:
            self.error = f"{failure.code().name}: {explained(failure.details() or '')}"
        finally:
            self.is_over = True
            self._on_over(self)
            if self._listener is not None:
                self._listener.on_ended(self.error)

    async def _converse(self, call: _Call) -> None:
        limit = asyncio.timeout(None)
        writer = asyncio.create_task(self._write(call, limit))
        try:
            with contextlib.suppress(TimeoutError):
                async with limit:
                    async for message in call:
                        if self._listener is None:
                            return  # the ready call was idle for too long, and the exporter refused it
                        self._listener.on_message(message)
        finally:
            writer.cancel()
            try:
                await asyncio.wait([writer])
            finally:
                call.cancel()

    async def _write(self, call: _Call, limit: asyncio.Timeout) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over; its reader receives the reason
        limit.reschedule(asyncio.get_running_loop().time() + self._settings.linger_s)


class CallPool:
    def __init__(self, settings: CallSettings) -> None:
        self._settings = settings
        self._ready: dict[str, OutgoingCall] = {}  # by address
        self._timers: dict[OutgoingCall, asyncio.TimerHandle] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._ready)

    def checkout(self, address: str) -> OutgoingCall:
        """Return a call for one hand-off: the one that is ready, or a new one."""
        call = self._ready.pop(address, None)
        if call is None:
            return OutgoingCall(self._settings, address, self._over)
        self._timers.pop(call).cancel()
        return call

    async def close(self) -> None:
        self._is_closed = True
        waiting = [call.task for call in self._ready.values()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _over(self, call: OutgoingCall) -> None:
        """Handle the end of a call. A call that served a hand-off without an error is followed by a ready one."""
        if self._ready.get(call.address) is call:
            self._forget(call)
        elif call.has_served and not call.error and not self._is_closed and call.address not in self._ready:
            following = self._ready[call.address] = OutgoingCall(self._settings, call.address, self._over)
            loop = asyncio.get_running_loop()
            self._timers[following] = loop.call_later(READY_S, self._dismiss, following)

    def _dismiss(self, call: OutgoingCall) -> None:
        self._forget(call)
        call.half_close()

    def _forget(self, call: OutgoingCall) -> None:
        del self._ready[call.address]
        self._timers.pop(call).cancel()
