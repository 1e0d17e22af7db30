"""The importer's end of one HandOff stream: sends in order, and hands what arrives to the hand-off's machine."""

import asyncio
import contextlib
from collections.abc import Callable

import grpc

from kvtransfer.exporter_channels import ExporterChannels
from kvtransfer.handoff_wire import IMPORTER_METADATA
from tandem.channel import explained
from tandem.v1 import kv_pb2, kv_pb2_grpc

_Call = grpc.aio.StreamStreamCall[kv_pb2.ImporterMessage, kv_pb2.ExporterMessage]


class ImportCall:
    """Runs as one task. `on_message` and `on_ended` are called on the event loop, `on_ended` once, with the error."""

    def __init__(
        self,
        *,
        channels: ExporterChannels,
        address: str,
        importer: str,
        timeout_s: float,
        linger_s: float,
        on_message: Callable[[kv_pb2.ExporterMessage], None],
        on_ended: Callable[[str], None],
    ) -> None:
        self._channels, self._address, self._importer = channels, address, importer
        self._timeout_s, self._linger_s = timeout_s, linger_s
        self._on_message, self._on_ended = on_message, on_ended
        # At most a handful: Attach, Settle, and a Renew for each third of a lease.
        self._outbox: asyncio.Queue[kv_pb2.ImporterMessage | None] = asyncio.Queue()

    def send(self, message: kv_pb2.ImporterMessage) -> None:
        self._outbox.put_nowait(message)

    def half_close(self) -> None:
        """Nothing more will be sent; what was sent before still goes out."""
        self._outbox.put_nowait(None)

    async def run(self) -> None:
        """Until the exporter ends the call, or has had time to after we did. Cancelling it ends the call at once."""
        error = ""
        try:
            async with self._channels.use(self._address) as channel:
                call = kv_pb2_grpc.KvTransferStub(channel).HandOff(
                    timeout=self._timeout_s, metadata=((IMPORTER_METADATA, self._importer),)
                )
                await self._converse(call)
        except grpc.aio.AioRpcError as failure:
            error = f"{failure.code().name}: {explained(failure.details() or '')}"
        finally:
            self._on_ended(error)

    async def _converse(self, call: _Call) -> None:
        limit = asyncio.timeout(None)
        writer = asyncio.create_task(self._write(call, limit))
        try:
            with contextlib.suppress(TimeoutError):
                async with limit:
                    async for message in call:
                        self._on_message(message)
        finally:
            writer.cancel()
            await asyncio.wait([writer])
            call.cancel()

    async def _write(self, call: _Call, limit: asyncio.Timeout) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over; whoever reads from it learns why
        limit.reschedule(asyncio.get_running_loop().time() + self._linger_s)
