"""The two sides of a NIXL read, each in a process of its own that test_nixl.py starts."""

import asyncio
import os
import signal
import threading
from multiprocessing.connection import Connection

import torch

from cluster.messages import Epoch, MemberId
from kvtransfer.transports.base import Channel, TransportError
from kvtransfer.transports.nixl.exporting import NixlExporter
from kvtransfer.transports.nixl.transport import NixlChannel, NixlImporter
from tests.contract.rigs.processes.forked_process import DEADLINE_S
from tests.contract.rigs.proofs import PROOFS

NUM_BLOCKS = 2048
BLOCK_BYTES = 65536
EPOCH = Epoch(MemberId("p0", "a1"), b"t" * 16, 1)
CAUGHT_S = 3.0  # the deadline of a read that does not end; all else takes what a busy machine needs


class BytePool:
    """PoolMemory of equal bytes, large enough for a read to be interrupted in the middle."""

    def __init__(self, byte: int, device: str = "cpu") -> None:
        """Create the pool; on a GPU in ordinary memory, because the UCX in NIXL's wheel passes exported pages to no
        other process."""
        self.num_blocks, self.block_bytes = NUM_BLOCKS, BLOCK_BYTES
        self.memfd: int | None = None
        self.raw = torch.full((NUM_BLOCKS, BLOCK_BYTES), byte, dtype=torch.uint8, device=device)
        if self.raw.is_cuda:
            torch.cuda.synchronize()

    def holds(self, byte: int) -> bool:
        return bool((self.raw == byte).all())

    async def stop_in_mid_read(self, read: "asyncio.Task[None]", exporter_id: int) -> bool:
        """Stop the exporting process when the first bytes of the read have arrived in this pool of zeros. Return False,
        with the process running, if this process looked too late: then the rest may be on its way."""
        await self.first_bytes(read)
        os.kill(exporter_id, signal.SIGSTOP)
        if not read.done() and not self.raw[NUM_BLOCKS // 2, 0]:
            return True
        os.kill(exporter_id, signal.SIGCONT)
        return False

    async def first_bytes(self, read: "asyncio.Task[None]") -> None:
        """Wait until a part of the read has arrived in this pool of zeros, or the read has ended."""
        ended = threading.Event()
        read.add_done_callback(lambda _: ended.set())

        def look() -> None:
            while not self.raw[0, 0] and not ended.wait(0.0002):
                pass

        await asyncio.to_thread(look)


def limit_reads(channel: Channel, timeout_s: float) -> None:
    """Set how long reads by this channel's link may take, that in flight too. Set it once a read was caught: one that
    ends before its bytes have come takes an emulated exporter with it, and on a busy machine they may take long."""
    assert isinstance(channel, NixlChannel)
    channel._link._timeout_s = timeout_s


def exporting(connection: "Connection[object, object]", byte: float) -> None:
    """Announce the endpoint and serve."""
    asyncio.run(_export(connection, BytePool(int(byte))))


def exporting_gpu_memory(connection: "Connection[object, object]", byte: float) -> None:
    asyncio.run(_export(connection, BytePool(int(byte), "cuda")))


def importing(connection: "Connection[object, object]", _: float) -> None:
    """Perform commands: `open` an endpoint; `read` until the first bytes have arrived; `stop` the exporting process
    then; `limit` a read in flight to `CAUGHT_S`; wait for the `end` of the read; `destroy` the channel; `fill` the
    pool; answer whether the pool `holds` only this byte.
    """
    asyncio.run(_import(connection))


async def _export(connection: "Connection[object, object]", pool: BytePool) -> None:
    exporter = NixlExporter(memory=pool, proofs=PROOFS, linger_s=5.0)
    await exporter.start()
    connection.send(exporter.grant(EPOCH))
    await asyncio.Event().wait()


async def _import(connection: "Connection[object, object]") -> None:
    importer = _Importer()
    while True:
        words = await asyncio.to_thread(connection.recv)
        try:
            connection.send(await importer.obey(words))
        except TransportError as error:
            connection.send(f"error: {error}")


class _Importer:
    def __init__(self) -> None:
        self._pool = BytePool(0)
        self._transport = NixlImporter(memory=self._pool, proofs=PROOFS, timeout_s=DEADLINE_S)
        self._channel: Channel | None = None
        self._read: asyncio.Task[None] | None = None

    async def obey(self, words: object) -> object:
        match words:
            case ("open", bytes() as endpoint):
                self._channel = await self._transport.open_channel(EPOCH, endpoint)
            case ("read",):
                await self._pool.first_bytes(self._begin())
            case ("stop", int() as exporter_id):
                return await self._pool.stop_in_mid_read(self._begin(), exporter_id)
            case ("limit",):
                assert self._channel is not None
                limit_reads(self._channel, CAUGHT_S)
            case ("end",):
                assert self._read is not None
                await self._read
            case ("destroy",):
                assert self._channel is not None
                await self._channel.destroy()
            case ("fill", int() as byte):
                self._pool.raw.fill_(byte)
            case ("holds", int() as byte):
                return self._pool.holds(byte)
        return "ok"

    def _begin(self) -> "asyncio.Task[None]":
        assert self._channel is not None
        blocks = list(range(NUM_BLOCKS))
        self._read = asyncio.create_task(self._channel.read(blocks, blocks))
        return self._read
