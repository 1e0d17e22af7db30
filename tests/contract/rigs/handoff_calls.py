"""HandOff calls inside one process: the real servicer and the real stub, and queues between them where gRPC would be.

Messages are serialized on the way, so that the two sides share nothing. A call can be severed, as by a dead peer.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvtransfer.exporter.service import KvTransferServicer
from tandem.internal.v1 import kv_pb2

_GONE = grpc.aio.AioRpcError(
    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="the peer is gone"
)


class Calls:
    """All calls to one worker. Stands in for a gRPC channel to it."""

    def __init__(self, servicer: KvTransferServicer) -> None:
        self._servicer = servicer
        self._live: set[Call] = set()
        self._is_dead = False

    def stream_stream(self, method: str, **serializers: Any) -> Any:
        def begin(*, timeout: float, metadata: tuple[tuple[str, str], ...]) -> Call:
            call = Call(self._servicer, metadata, ended=self._live.discard)
            self._live.add(call)
            if self._is_dead:
                call.sever()
            return call

        return begin

    def unary_unary(self, method: str, **serializers: Any) -> Any:
        return None

    async def close(self) -> None:
        pass

    def sever(self, number: int) -> None:
        """Break one of the calls."""
        calls = sorted(self._live, key=lambda call: call.number)
        if calls:
            calls[number % len(calls)].sever()

    def die(self) -> None:
        """End the worker's process without a successor at its address."""
        self._is_dead = True
        for call in tuple(self._live):
            call.sever()


class Call:
    """Both ends of one call."""

    _count = 0

    def __init__(self, servicer: KvTransferServicer, metadata: tuple[tuple[str, str], ...], ended: Any) -> None:
        Call._count += 1
        self.number = Call._count
        self._metadata, self._ended = metadata, ended
        self._to_exporter: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._to_importer: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._is_severed = False
        self._serving = asyncio.create_task(self._serve(servicer))

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def write(self, message: kv_pb2.ImporterMessage) -> None:
        if self._serving.done():
            raise asyncio.InvalidStateError("the call is over")
        self._to_exporter.put_nowait(message.SerializeToString())

    async def done_writing(self) -> None:
        self._to_exporter.put_nowait(None)

    def cancel(self) -> None:
        self._serving.cancel()

    def sever(self) -> None:
        self._is_severed = True
        self._serving.cancel()
        self._to_importer.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[kv_pb2.ExporterMessage]:
        while (message := await self._to_importer.get()) is not None and not self._is_severed:
            yield kv_pb2.ExporterMessage.FromString(message)
        if self._is_severed:
            raise _GONE

    async def _serve(self, servicer: KvTransferServicer) -> None:
        try:
            async for message in servicer.HandOff(self._requests(), self):  # type: ignore[arg-type]
                self._to_importer.put_nowait(message.SerializeToString())
        finally:
            self._to_importer.put_nowait(None)
            self._ended(self)

    async def _requests(self) -> AsyncIterator[kv_pb2.ImporterMessage]:
        while (message := await self._to_exporter.get()) is not None:
            yield kv_pb2.ImporterMessage.FromString(message)
