"""The importer's end of one HandOff stream: sends in order, and hands what arrives to the hand-off that it serves.

Open from the start, whether or not there is a hand-off yet: until then the exporter has nothing to say on it.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from kvtransfer.importer.exporter_channels import ExporterChannels
from kvtransfer.wire.handoff_wire import IMPORTER_METADATA
from tandem.channel import explained
from tandem.v1 import kv_pb2, kv_pb2_grpc

_Call = grpc.aio.StreamStreamCall[kv_pb2.ImporterMessage, kv_pb2.ExporterMessage]


@dataclass(frozen=True, slots=True)
class CallMeans:
    """What every call of one importer uses."""

    channels: ExporterChannels
    importer: str  # "id@incarnation"
    timeout_s: float
    linger_s: float  # for the exporter to end the call after us


@dataclass(frozen=True, slots=True)
class _Listener:
    on_message: Callable[[kv_pb2.ExporterMessage], None]
    on_ended: Callable[[str], None]  # once, with the error; empty: the call ended in order


class ImportCall:
    """Runs as one task. `on_over`: called once, when the task ends."""

    def __init__(self, means: CallMeans, address: str, on_over: "Callable[[ImportCall], None]") -> None:
        self.address = address
        self._means = means
        self._on_over = on_over
        self._listener: _Listener | None = None
        self.is_over = False
        self.error = ""
        # At most a handful: Attach, Settle, and a Renew for each third of a lease.
        self._outbox: asyncio.Queue[kv_pb2.ImporterMessage | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(), name=f"hand-off call to {address}")

    def serve(self, *, on_message: Callable[[kv_pb2.ExporterMessage], None], on_ended: Callable[[str], None]) -> None:
        """One hand-off, once. Both are called on the event loop, `on_ended` once, with the error."""
        assert self._listener is None and not self.is_over, "a call serves one hand-off"
        self._listener = _Listener(on_message, on_ended)

    @property
    def has_served(self) -> bool:
        return self._listener is not None

    def send(self, message: kv_pb2.ImporterMessage) -> None:
        self._outbox.put_nowait(message)

    def half_close(self) -> None:
        """Nothing more will be sent; what was sent before still goes out."""
        self._outbox.put_nowait(None)

    async def _run(self) -> None:
        """Until the exporter ends the call, or has had time to after we did. Cancelling it ends the call at once."""
        try:
            async with self._means.channels.use(self.address) as channel:
                call = kv_pb2_grpc.KvTransferStub(channel).HandOff(
                    timeout=self._means.timeout_s, metadata=((IMPORTER_METADATA, self._means.importer),)
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
                            return  # it was ready for too long: the exporter refuses whoever does not attach
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
            return  # the call is over; whoever reads from it learns why
        limit.reschedule(asyncio.get_running_loop().time() + self._means.linger_s)
