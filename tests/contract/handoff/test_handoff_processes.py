"""An exporter in another process, stopped in mid-read and then killed: nothing hangs, nothing leaks."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from cluster.clock import ManualClock
from cluster.errors import HandOffFailed, HandOffReason
from cluster.settings.worker_settings import TransferSettings
from engine.kv.pool import KvPool
from kvtransfer.importer.importer import ExpectedPrompt, ImportedBlocks, Importer
from kvtransfer.transports.base import ImporterTransport
from kvtransfer.transports.shm.transport import ShmImporter
from kvtransfer.transports.tcp.transport import TcpImporter
from kvtransfer.wire.wire_format import NativeFormat
from tests.contract.rigs.handoff_parts import (
    DEADLINE_S,
    IMPORTER,
    KEY,
    LAYOUT,
    Counters,
    DecodeBlocks,
    WatchedTransport,
    pass_at_importer,
)
from tests.contract.rigs.kv_pools import BLOCK_SIZE, random_pool
from tests.contract.rigs.processes.exporter_process import NUM_BLOCKS, NUM_TOKENS, PROMPT_HASH
from tests.contract.rigs.proofs import PROOFS

ROOT = Path(__file__).parents[3]


class Side:
    """An importer with its own pool."""

    def __init__(self, make: Callable[[KvPool], ImporterTransport]) -> None:
        self.pool, self.clock = random_pool(NUM_BLOCKS, seed=2), ManualClock()
        self.watched = WatchedTransport(make(self.pool))
        self.watched.is_holding_back = True
        self.blocks, self.counters = DecodeBlocks(NUM_BLOCKS), Counters()
        self.importer = Importer(
            member=IMPORTER,
            wire=NativeFormat(self.pool),
            layout=LAYOUT,
            block_size=BLOCK_SIZE,
            keys=KEY,
            settings=TransferSettings(),
            transports=[self.watched],
            clock=self.clock,
            counters=self.counters,
        )

    def start(self, signed: bytes) -> asyncio.Task[ImportedBlocks]:
        expected = ExpectedPrompt(NUM_TOKENS, PROMPT_HASH, 1)
        return asyncio.create_task(
            self.importer.import_blocks(handoff_id=1, signed_ticket=signed, expected=expected, blocks=self.blocks)
        )

    def check_clean(self) -> None:
        self.blocks.pool.check()
        assert self.blocks.pool.num_free == NUM_BLOCKS and self.counters.num_quarantined == 0


@asynccontextmanager
async def exporter_process(temporary: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[bytes]]]:
    """Run an exporter in a process. `temporary`: the folder for files that a killed process leaves behind."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.contract.rigs.processes.exporter_process",
        cwd=ROOT,
        env=os.environ | {"TMPDIR": temporary},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        yield process, [bytes.fromhex(ticket.decode()) for ticket in line.split()]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _reason(importing: asyncio.Task[ImportedBlocks]) -> HandOffReason:
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(HandOffFailed) as caught:
            await importing
    return caught.value.handoff_reason


async def test_importers_fail_when_their_exporter_is_stopped_and_killed_in_mid_transfer() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        async with exporter_process(temporary) as (process, (tcp_ticket, shm_ticket)):
            await _stop_and_kill(process, tcp_ticket, shm_ticket)


async def _until_stopped(pid: int) -> None:
    """Wait until every thread of the process is stopped. A thread that still runs would answer a read."""
    threads = Path(f"/proc/{pid}/task")
    async with asyncio.timeout(DEADLINE_S):
        while {(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads.iterdir()} != {"T"}:  # noqa: ASYNC110
            await asyncio.sleep(0)  # the kernel reports it only when asked


async def _stop_and_kill(process: asyncio.subprocess.Process, tcp_ticket: bytes, shm_ticket: bytes) -> None:
    tcp = Side(lambda pool: TcpImporter(memory=pool, proofs=PROOFS, stall_timeout_s=DEADLINE_S))
    shm = Side(lambda pool: ShmImporter(memory=pool, proofs=PROOFS))
    over_tcp, over_shm = tcp.start(tcp_ticket), shm.start(shm_ticket)
    assert process.stdin is not None
    process.stdin.write(b"seal\n")
    async with asyncio.timeout(DEADLINE_S):
        await tcp.watched.read_held_back.wait()
        await shm.watched.read_held_back.wait()
    process.send_signal(signal.SIGSTOP)
    await _until_stopped(process.pid)

    shm.watched.begin.set()  # memory can be read while its owner is stopped
    async with asyncio.timeout(DEADLINE_S):
        await shm.watched.read_arrived.wait()

    tcp.watched.begin.set()
    await tcp.watched.read_asked.wait()
    pass_at_importer(tcp.importer, tcp.clock, TransferSettings().read_timeout_s)
    assert await _reason(over_tcp) is HandOffReason.READ_TIMEOUT  # the exporter neither answers nor fails
    assert tcp.blocks.pool.counts()["quarantined"] == 2

    assert not over_shm.done()
    process.kill()
    assert await _reason(over_shm) is HandOffReason.EXPORTER_LOST
    read = shm.watched.reads[0].local_block_ids
    assert torch.equal(shm.pool.raw[list(read)], random_pool(NUM_BLOCKS, seed=1).raw[[2, 3]])
    for side in (tcp, shm):
        await side.importer.close()
        side.check_clean()
