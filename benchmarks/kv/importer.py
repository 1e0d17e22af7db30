"""The importer's process: times each column of the table over one transport."""

import asyncio
import json
import os
import random
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from benchmarks.kv.device_copy import DeviceCopy
from benchmarks.kv.memcpy import Memcpy
from benchmarks.kv.nixl import BareImporter
from benchmarks.kv.parties import EPOCH, IMPORTER, KEY, LAYOUT, PROMPT_HASH, load_tls, means_of, module_of
from benchmarks.kv.shapes import BLOCK_SIZE, Shape, check_arrived, target_pool
from benchmarks.kv.sockets import LOOPS, TLS_LOOPS, PlainClient
from cluster.auth.member_channel import open_member_channel
from cluster.clock import MonotonicClock
from cluster.observe.telemetry import Telemetry
from cluster.settings.worker_settings import TransferSettings
from engine.kv.pool import KvPool
from kvtransfer.counters import TransferCounters
from kvtransfer.importer.importer import ExpectedPrompt, Importer
from kvtransfer.importer.reads import BlockReader
from kvtransfer.memory import Reservation
from kvtransfer.transports.base import Channel
from kvtransfer.wire.wire_format import NativeFormat

COLUMNS = ("data path", "verified", "hand-off")
Prepare = Callable[[Shape, random.Random], Callable[[], None]]  # what a limit's clock runs over

_START_TIMEOUT_S = 60.0
_LINE_BYTES = 1 << 20
_WARM_BLOCKS = 16


class ExporterProcess:
    """The exporter's process: its first message, and hand-offs on request."""

    def __init__(self, process: asyncio.subprocess.Process, hello: dict[str, Any]) -> None:
        self._process, self.hello = process, hello

    async def offer(self, block_ids: list[int]) -> bytes:
        """Return a signed ticket for blocks that are sealed and digested."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"offer": block_ids}).encode() + b"\n")
        return bytes.fromhex((await _answer(self._process))["ticket"])


class ChosenBlocks:
    """A BlockSource that reserves exactly the blocks of a sample."""

    def __init__(self, block_ids: tuple[int, ...]) -> None:
        self._block_ids = block_ids

    async def reserve(self, handoff_id: int, num_blocks: int, *, is_announced: bool) -> Reservation:
        assert num_blocks == len(self._block_ids)
        return Reservation(self._block_ids)

    def announce(self, handoff_id: int) -> None:
        pass

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        pass

    def release_quarantined(self, block_ids: frozenset[int]) -> None:
        pass


class Moves:
    """Each method moves one sample of a shape and returns its seconds. Owns the connections of the limits."""

    def __init__(self, process: ExporterProcess, pool: KvPool, channel: Channel, importer: Importer) -> None:
        self._process, self._pool, self._channel, self._importer = process, pool, channel, importer
        self._wire = NativeFormat(pool)
        self._verifier = ThreadPoolExecutor(1, "kv-verify")
        self._dice = random.Random(7)
        self._num_handoffs = 0

    async def warm_up(self) -> None:
        """Read every block once, because a page of host memory exists only after its first write. Device memory needs
        no warm-up."""
        some = range(_WARM_BLOCKS if self._pool.raw.is_cuda else self._pool.num_blocks)
        await self._channel.read(some, some)

    async def data_path(self, shape: Shape) -> float:
        remote, local = self._picks(shape)
        began_s = time.perf_counter()
        await self._channel.read(remote, local)
        seconds = time.perf_counter() - began_s
        check_arrived(self._pool, remote[-16:], local[-16:])
        return seconds

    async def verified(self, shape: Shape) -> float:
        reads = BlockReader(self._channel, self._wire, self._verifier, lambda num_bytes, seconds: None)
        remote, local = self._picks(shape)
        began_s = time.perf_counter()
        await reads.read(remote, local)
        return time.perf_counter() - began_s

    async def hand_off(self, shape: Shape) -> float:
        """Time a hand-off from Attach to admission, with prefill complete."""
        remote, local = self._picks(shape)
        signed = await self._process.offer(remote)
        self._num_handoffs += 1
        began_s = time.perf_counter()
        await self._importer.import_blocks(
            handoff_id=self._num_handoffs,
            signed_ticket=signed,
            expected=ExpectedPrompt(len(remote) * BLOCK_SIZE, PROMPT_HASH, 1),
            blocks=ChosenBlocks(tuple(local)),
        )
        return time.perf_counter() - began_s

    def timed(self, shape: Shape, limits: Mapping[str, Prepare]) -> Mapping[str, Callable[[], Awaitable[float]]]:
        """Take one sample of each column and of each limit, by name."""
        columns = zip(COLUMNS, (self.data_path, self.verified, self.hand_off), strict=True)
        ours = {name: partial(move, shape) for name, move in columns}
        return ours | {name: partial(self.limit, shape, prepare) for name, prepare in limits.items()}

    async def limit(self, shape: Shape, prepare: Prepare) -> float:
        move = prepare(shape, self._dice)
        began_s = time.perf_counter()
        move()
        return time.perf_counter() - began_s

    def _picks(self, shape: Shape) -> tuple[list[int], list[int]]:
        num_blocks = self._pool.num_blocks
        return shape.pick(num_blocks, self._dice), shape.pick(num_blocks, self._dice)


@asynccontextmanager
async def moves_over(
    transport: str, num_blocks: int, certificates: str, device: str, verify: str = "all"
) -> AsyncIterator[tuple[Moves, dict[str, Prepare]]]:
    """Return the moves, and the preparation of each limit by its name."""
    async with _exporter_process(transport, num_blocks, certificates, device, verify) as process:
        tls = load_tls(certificates)
        pool = target_pool(num_blocks, device, transport)
        means = means_of(IMPORTER, pool, tls)
        side = module_of(transport).importer(means)
        importer = Importer(
            member=IMPORTER,
            wire=NativeFormat(pool),
            layout=LAYOUT,
            block_size=BLOCK_SIZE,
            keys=KEY,
            settings=TransferSettings(kv_verify=verify),
            transports=[side],
            clock=MonotonicClock(),
            counters=TransferCounters(Telemetry()),
            connect=partial(open_member_channel, keys=KEY, caller=str(IMPORTER), tls=tls),
        )
        channel = await side.open_channel(EPOCH, bytes.fromhex(process.hello["endpoint"]))
        moves = Moves(process, pool, channel, importer)
        await moves.warm_up()
        yield moves, _limits(transport, process.hello, pool, tls.client_context() if tls is not None else None)
        await channel.finish()
        await importer.close()


def _limits(transport: str, hello: dict[str, Any], pool: KvPool, context: ssl.SSLContext | None) -> dict[str, Prepare]:
    if pool.raw.is_cuda:
        copies = DeviceCopy(pool)
        return {"device copy": copies.prepare, "our kernel": copies.prepare_kernel}
    if transport == "shm":
        return {"memcpy": Memcpy(hello["pid"], hello["memfd"], pool).prepare}
    if transport == "nixl":
        return {"bare NIXL": BareImporter(bytes.fromhex(hello["bare_nixl"]), hello["address"], pool).prepare}
    return {
        loop.name: PlainClient(loop, hello["plain_port"], pool, context).prepare
        for loop in (TLS_LOOPS if context is not None else LOOPS)
    }


@asynccontextmanager
async def _exporter_process(
    transport: str, num_blocks: int, certificates: str, device: str, verify: str
) -> AsyncIterator[ExporterProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.kv.exporter", "--transport", transport, "--blocks", str(num_blocks)),
        *("--certificates", certificates, "--device", device, "--verify", verify),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
    )
    assert process.stdin is not None
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            hello = await _answer(process)
        yield ExporterProcess(process, hello)
    finally:
        process.stdin.close()
        await process.wait()


async def _answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.startswith(b"{"):  # libraries print, too
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise RuntimeError("the exporter's process ended")
