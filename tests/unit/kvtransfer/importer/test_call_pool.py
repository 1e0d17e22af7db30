"""Calls opened in advance for the next hand-off: one per recently used exporter, for a limited time, and never one that
has ended.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from kvtransfer.importer import calls
from kvtransfer.importer.calls import CallPool, CallSettings, GrpcChannelPool, OutgoingCall
from tandem.internal.v1 import kv_pb2

ADDRESS = "exporter:1"


class _Stream:
    """The exporter's end of a call: it sends one response for every message, and ends after the importer's last
    message.
    """

    def __init__(self) -> None:
        self.heard: list[kv_pb2.ImporterMessage] = []
        self.is_broken = False
        self._news: asyncio.Queue[bool] = asyncio.Queue()

    async def write(self, message: kv_pb2.ImporterMessage) -> None:
        self.heard.append(message)
        self._news.put_nowait(True)

    async def done_writing(self) -> None:
        self._news.put_nowait(False)

    def end(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self._news.put_nowait(False)

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[kv_pb2.ExporterMessage]:
        while await self._news.get():
            yield kv_pb2.ExporterMessage(settled=kv_pb2.Settled(valid=True))
        if self.is_broken:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


class _Exporter:
    """Stands in for a gRPC channel."""

    def __init__(self) -> None:
        self.streams: list[_Stream] = []
        self._begun: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)  # by how many there are then

    def stream_stream(self, method: str, **serializers: Any) -> Any:
        def begin(**settings: Any) -> _Stream:
            self.streams.append(_Stream())
            self._begun[len(self.streams)].set()
            return self.streams[-1]

        return begin

    async def until(self, num_streams: int) -> None:
        async with asyncio.timeout(10):
            await self._begun[num_streams].wait()

    def unary_unary(self, method: str, **serializers: Any) -> Any:
        return None

    async def close(self) -> None:
        pass


class _Bench:
    def __init__(self) -> None:
        self.exporter = _Exporter()
        channels = GrpcChannelPool(lambda address: cast(grpc.aio.Channel, self.exporter))
        self.calls = CallPool(CallSettings(channels=channels, importer="decode-0@b", timeout_s=60.0, linger_s=5.0))

    async def hand_off(self, *, is_broken: bool = False) -> OutgoingCall:
        """Make a hand-off, from its first message to the end of its call."""
        call = self.calls.checkout(ADDRESS)
        answered, ended = asyncio.Event(), asyncio.Event()
        call.serve(on_message=lambda message: answered.set(), on_ended=lambda error: ended.set())
        call.send(kv_pb2.ImporterMessage(attach=kv_pb2.Attach()))
        async with asyncio.timeout(10):
            await answered.wait()
            if is_broken:
                next(stream for stream in self.exporter.streams if stream.heard).end(is_broken=True)
            else:
                call.half_close()
            await ended.wait()
        return call

    async def until_none_waits(self) -> None:
        waiting = self.calls._ready[ADDRESS]
        async with asyncio.timeout(10):
            await waiting.task


@pytest.fixture
async def bench() -> AsyncIterator[_Bench]:
    bench = _Bench()
    yield bench
    await bench.calls.close()


async def test_the_second_hand_off_uses_a_call_opened_in_advance(bench: _Bench) -> None:
    await bench.hand_off()
    await bench.exporter.until(2)

    await bench.hand_off()

    assert [len(stream.heard) for stream in bench.exporter.streams[:2]] == [1, 1]


async def test_no_more_than_one_call_waits_for_an_exporter(bench: _Bench) -> None:
    await asyncio.gather(*(bench.hand_off() for _ in range(5)))

    assert len(bench.calls) == 1


async def test_an_unused_waiting_call_is_ended_in_order(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "READY_S", 0.001)
    await bench.hand_off()
    waiting = bench.calls._ready[ADDRESS]
    await waiting.task

    assert len(bench.calls) == 0 and waiting.is_over and not waiting.error
    assert not bench.exporter.streams[1].heard


async def test_a_waiting_call_that_its_exporter_ended_is_not_used(bench: _Bench) -> None:
    await bench.hand_off()
    await bench.exporter.until(2)
    bench.exporter.streams[1].end(is_broken=True)
    await bench.until_none_waits()

    await bench.hand_off()

    assert [len(stream.heard) for stream in bench.exporter.streams[:3]] == [1, 0, 1]


async def test_a_lost_exporter_has_no_waiting_call(bench: _Bench) -> None:
    await bench.hand_off(is_broken=True)

    assert len(bench.calls) == 0 and len(bench.exporter.streams) == 1


async def test_no_call_waits_after_close(bench: _Bench) -> None:
    await bench.hand_off()
    await bench.calls.close()

    assert len(bench.calls) == 0
