"""Tests that a read from a TCP exporter that keeps its connection open and sends nothing more fails soon, wherever it
stops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import torch

from engine.kv.pool import KvPool
from kvtransfer.transports.base import Channel, TransportError
from kvtransfer.transports.tcp import transport as tcp
from kvtransfer.transports.tcp.exporting import ANNOUNCEMENT, ANSWER, pack_endpoint, parse_endpoint
from kvtransfer.transports.tcp.transport import TcpExporter, TcpImporter
from tests.certificates import certificates_of_the_run
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.namespaces import FarHost, far_host
from tests.contract.rigs.processes.forked_process import Process, process
from tests.contract.rigs.processes.short_exporter_process import EPOCH, NUM_BLOCKS, exporting
from tests.contract.rigs.proofs import PROOFS

_SOON_S = 30.0
_STALL_S = 1.5
_LAYERS = 600
_BLOCK_BYTES = _LAYERS * 256


class Relay:
    """A relay between an importer and its exporter. After `cut_after` bytes nothing passes, and neither side is
    notified."""

    def __init__(self) -> None:
        self._left = {"up": 1 << 40, "down": 1 << 40}  # bytes that still pass: to the exporter, to the importer
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, endpoint: bytes) -> bytes:
        """Start the relay and return the endpoint for the importer."""
        (host, port), token = parse_endpoint(endpoint)

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            other_reader, other_writer = await asyncio.open_connection(host, port)
            for way, source, target in (("up", reader, other_writer), ("down", other_reader, writer)):
                task = asyncio.create_task(self._copy(way, source, target))
                self._tasks.add(task)

        self._server = await asyncio.start_server(forward, "127.0.0.1")
        return pack_endpoint(token, "127.0.0.1", self._server.sockets[0].getsockname()[1])

    def cut_after(self, way: str, num_bytes: int) -> None:
        self._left[way] = num_bytes

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _copy(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                passing = data[: self._left[way]]
                self._left[way] -= len(passing)
                writer.write(passing)
                await writer.drain()
            writer.close()


@asynccontextmanager
async def relayed(reader: str, source: KvPool, target: KvPool) -> AsyncIterator[tuple[TcpImporter, bytes, Relay]]:
    tls = certificates_of_the_run().loaded() if reader == "tls" else None
    host = "127.0.0.1"
    exporter = TcpExporter(
        memory=source,
        proofs=PROOFS,
        host=host,
        advertise_host=host,
        send_timeout_s=1.0,
        tls=tls.server_context if tls is not None else None,
    )
    importer = TcpImporter(
        memory=target, proofs=PROOFS, stall_timeout_s=_STALL_S, tls=tls.wrap_client if tls is not None else None
    )
    await exporter.start()
    relay = Relay()
    try:
        yield importer, await relay.start(exporter.grant(EPOCH)), relay
    finally:
        await importer.close()
        await relay.stop()
        await exporter.close()


@pytest.mark.parametrize("readers", [("loop", "tls"), ("thread",)], ids="-".join)
async def test_a_read_fails_soon_wherever_its_exporter_falls_silent(
    readers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "thread" in readers:
        monkeypatch.setattr(tcp, "SHORT_BYTES", 0)
    cuts = [
        *(("up", num_bytes) for num_bytes in (0, ANNOUNCEMENT.size // 2)),
        *(("down", num_bytes) for num_bytes in (0, ANSWER.size // 2, ANSWER.size, ANSWER.size + 1, 100_000)),
        ("down", ANSWER.size + 2 * _BLOCK_BYTES - 1),
    ]
    await asyncio.gather(*(_silent_from(reader, *cut) for reader in readers for cut in cuts))


async def _silent_from(reader: str, way: str, num_bytes: int) -> None:
    source, target = random_pool(4, seed=1, layers=_LAYERS), random_pool(4, seed=2, layers=_LAYERS)
    assert source.block_bytes == _BLOCK_BYTES
    async with relayed(reader, source, target) as (importer, endpoint, relay), asyncio.timeout(_SOON_S):
        channel = await importer.open_channel(EPOCH, endpoint)
        await channel.read([0, 1], [2, 3])
        relay.cut_after(way, num_bytes)
        with pytest.raises(TransportError):
            await channel.read([0, 1], [2, 3])
        await channel.destroy()
        relay.cut_after(way, 1 << 40)
        again = await importer.open_channel(EPOCH, endpoint)
        await again.read([2, 3], [0, 1])
        assert torch.equal(target.raw, source.raw[[2, 3, 0, 1]])


async def test_a_read_ends_soon_when_the_link_is_cut_under_it() -> None:
    """The link is cut for half a second or permanently, while the read is requested or while its bytes are sent."""
    target = random_pool(NUM_BLOCKS, seed=2)
    importer = TcpImporter(memory=target, proofs=PROOFS, stall_timeout_s=1.0)
    source = random_pool(NUM_BLOCKS, seed=1)
    with far_host() as far:
        async with process(exporting, far.side.address, namespace=far.side.namespace) as exporter:
            endpoint = await _endpoint(exporter)
            for outage_s in (0.1, 0.5, None):
                await _read_through_an_outage(importer, endpoint, far, outage_s)
                async with asyncio.timeout(_SOON_S):
                    channel = await _opened(importer, endpoint)
                    await channel.read([0, 3], [5, 2])
                    await channel.finish()
                assert torch.equal(target.raw[[5, 2]], source.raw[[0, 3]])
            await importer.close()


async def test_an_exporter_that_could_not_start_a_thread_accepts_again_when_it_can() -> None:
    target, source = random_pool(NUM_BLOCKS, seed=2), random_pool(NUM_BLOCKS, seed=1)
    importer = TcpImporter(memory=target, proofs=PROOFS)
    try:
        async with process(exporting, "127.0.0.1") as exporter:
            endpoint = await _endpoint(exporter)
            async with asyncio.timeout(_SOON_S):
                assert await exporter.ask("short") == ("short",)
                with pytest.raises(TransportError):
                    await importer.open_channel(EPOCH, endpoint)
                assert await exporter.ask("whole") == ("whole",)
                channel = await importer.open_channel(EPOCH, endpoint)
                await channel.read([0, 3], [5, 2])
                assert torch.equal(target.raw[[5, 2]], source.raw[[0, 3]])
    finally:
        await importer.close()


async def _endpoint(exporter: Process) -> bytes:
    endpoint = await exporter.answer()
    assert isinstance(endpoint, bytes)
    return endpoint


async def _read_through_an_outage(importer: TcpImporter, endpoint: bytes, far: FarHost, outage_s: float | None) -> None:
    channel = await importer.open_channel(EPOCH, endpoint)
    await channel.read([1], [1])
    far.cut()
    try:
        async with asyncio.timeout(_SOON_S):
            reading = asyncio.create_task(channel.read([0], [0]))
            await asyncio.wait([reading], timeout=outage_s)
    finally:
        far.heal()
    async with asyncio.timeout(_SOON_S):
        with suppress(TransportError):
            await reading
    await channel.destroy()


async def _opened(importer: TcpImporter, endpoint: bytes) -> Channel:
    """Open a channel, and retry until the restored link works."""
    while True:
        with suppress(TransportError):
            return await importer.open_channel(EPOCH, endpoint)
