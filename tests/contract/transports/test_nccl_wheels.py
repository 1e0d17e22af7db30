"""The `nccl` transport over the real library: as far as it goes without a GPU, and all the way on one."""

import asyncio
import inspect
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtransfer.transports.base import TransportError, TransportSetup
from kvtransfer.transports.nccl import transport as nccl
from kvtransfer.transports.nccl.library import (
    EXPORTER_RANK,
    CupyCommunicator,
    CupyNccl,
    NcclFailed,
    Piece,
    why_not_loadable,
)
from kvtransfer.transports.nccl.messages import UNIQUE_ID_BYTES
from kvtransfer.transports.nccl.transport import NcclImporter
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.nccl_sides import NUM_BLOCKS, epoch, until
from tests.contract.rigs.processes.nccl_process import LIMITS, NUM_EPOCHS, device_pool
from tests.contract.rigs.proofs import PROOFS

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0

pytestmark = pytest.mark.skipif(bool(why_not_loadable()), reason=f"needs the extra `cuda`: {why_not_loadable()}")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def why_not_two_ranks() -> str:
    """Return why the library refuses two ranks in two processes on one GPU."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    version = CupyNccl(0).version()
    return "" if version >= 2_30_00 else f"two ranks on one GPU need NCCL 2.30, this is {version}"


two_ranks = pytest.mark.skipif(bool(why_not_two_ranks()), reason=why_not_two_ranks() or "can run")


@asynccontextmanager
async def exporter_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, list[bytes]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.contract.rigs.processes.nccl_process",
        cwd=ROOT,
        env=os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process, [bytes.fromhex((await process.stdout.readline()).decode()) for _ in range(NUM_EPOCHS)]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_the_library_names_its_version_and_makes_unique_ids() -> None:
    library = CupyNccl(0)
    assert library.version() >= 2_18_00
    first, second = library.unique_id(), library.unique_id()
    assert len(first) == len(second) == UNIQUE_ID_BYTES and first != second


def test_a_pool_in_host_memory_is_not_offered() -> None:
    means = TransportSetup(
        member=epoch(1).exporter,
        proofs=PROOFS,
        memory=random_pool(2, seed=1),
        host="::",
        advertise_host="::1",
        timeout_s=1.0,
    )
    assert nccl.unavailable(means) == "the pool is not on a GPU"


def test_every_call_of_a_communicator_reaches_the_library_with_its_arguments() -> None:
    """The communicator was never initialised: the library itself refuses each call, and no group stays open
    afterwards."""
    from cupy.cuda import nccl as library

    empty = library.NcclCommunicator.__new__(library.NcclCommunicator)
    stream, scratch = SimpleNamespace(ptr=0, done=True), SimpleNamespace(ptr=1 << 40)
    communicator = CupyCommunicator(empty, EXPORTER_RANK, threading.Lock(), stream, scratch)
    pieces = [Piece((1 << 47) - (1 << 34), 1 << 34), Piece(1 << 40, 1)]  # addresses and sizes beyond 32 bits
    for call in (
        communicator.warm,
        lambda: communicator.send(pieces),
        lambda: communicator.receive(pieces),
        communicator.is_done,
    ):
        with pytest.raises(NcclFailed, match="NCCL_ERROR_INVALID_ARGUMENT"):
            call()
    communicator.abort()
    assert communicator.is_done()
    library.groupStart()
    library.groupEnd()


def test_cupy_streams_and_memory_have_the_attributes_that_tandem_uses() -> None:
    import cupy

    assert cupy.cuda.ExternalStream(5).ptr == 5
    assert hasattr(cupy.cuda.Stream, "done") and "non_blocking" in (inspect.getdoc(cupy.cuda.Stream) or "")
    assert hasattr(cupy.cuda.MemoryPointer, "ptr") and callable(cupy.cuda.alloc) and hasattr(cupy.cuda.Device, "use")


@without_gpu
def test_a_constructor_without_a_gpu_fails_by_name() -> None:
    library = CupyNccl(0)
    with pytest.raises(NcclFailed):
        library.connect(library.unique_id(), EXPORTER_RANK)
    with pytest.raises(NcclFailed):
        library.device()


@without_gpu
async def test_both_processes_return_in_time_when_a_communicator_cannot_be_created() -> None:
    """The processes connect, agree and exchange the unique id; creating the communicator fails because there is no
    device.
    """
    importer = NcclImporter(memory=random_pool(NUM_BLOCKS, seed=2), proofs=PROOFS, library=CupyNccl(0), limits=LIMITS)
    assert importer.endpoint() == b""  # and so no exporter would have chosen it
    async with exporter_process() as (process, endpoints):
        begun_s = time.monotonic()
        with pytest.raises(TransportError, match="NCCL"):
            await importer.open_channel(epoch(1), endpoints[1])
        with pytest.raises(TransportError, match="not used until its backoff ends"):
            await importer.open_channel(epoch(2), endpoints[2])
        assert time.monotonic() - begun_s < LIMITS.agree_s + LIMITS.initialise_s
        another = NcclImporter(
            memory=random_pool(NUM_BLOCKS, seed=2), proofs=PROOFS, library=CupyNccl(0), limits=LIMITS
        )
        with pytest.raises(TransportError, match="NCCL"):  # the exporter's threads are free for the next one
            await another.open_channel(epoch(3), endpoints[3])
        assert process.stdin is not None
        process.stdin.close()
        assert await process.wait() == 0
        await another.close()
    await importer.close()


@pytest.mark.cuda
@with_gpu
def test_a_communicator_sends_runs_to_itself_by_address() -> None:
    """A communicator of one rank can send to itself on one GPU, if one group contains both calls."""
    import cupy
    from cupy.cuda import nccl as library

    ours = CupyNccl(0)
    with cupy.cuda.Device(0):
        communicator = library.NcclCommunicator(1, ours.unique_id(), 0)
        stream, scratch = cupy.cuda.Stream(non_blocking=True), cupy.cuda.alloc(1 << 20)
        ring = CupyCommunicator(communicator, 0, ours._calls, stream, scratch)
        ring._peer = 0
        source, target = device_pool(seed=1), device_pool(seed=2)
        size = source.block_bytes

        def pieces(base: int, runs: list[tuple[int, int]]) -> list[Piece]:
            return [Piece(base + first * size, length * size) for first, length in runs]

        library.groupStart()
        ring.send(pieces(source.raw.data_ptr(), [(3, 2), (9, 1)]))
        ring.receive(pieces(target.raw.data_ptr(), [(0, 2), (5, 1)]))
        library.groupEnd()
        deadline_s = time.monotonic() + DEADLINE_S
        while not ring.is_done():
            assert time.monotonic() < deadline_s
        assert torch.equal(target.raw[[0, 1, 5]], source.raw[[3, 4, 9]])
        ring.abort()
        assert ring.is_done()
        again = library.NcclCommunicator(1, ours.unique_id(), 0)  # an abort leaves the device as it was
        again.abort()


@pytest.mark.cuda
@two_ranks
async def test_blocks_move_between_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    target = device_pool(seed=2)
    importer = NcclImporter(memory=target, proofs=PROOFS, library=CupyNccl(0), limits=LIMITS)
    async with exporter_process() as (_, endpoints):
        expected = random_pool(NUM_BLOCKS, seed=1).raw
        for number in (1, 2):
            channel = await importer.open_channel(epoch(number), endpoints[number])
            await channel.read([3, 4, 9, 0], [8, 9, 1, 2])
            assert torch.equal(target.raw[[8, 9, 1, 2]].cpu(), expected[[3, 4, 9, 0]])
            await channel.finish()
        await importer.close()


@pytest.mark.cuda
@two_ranks
async def test_a_killed_exporter_ends_the_read_and_the_next_link_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    target = device_pool(seed=2)
    importer = NcclImporter(memory=target, proofs=PROOFS, library=CupyNccl(0), limits=LIMITS)
    async with exporter_process() as (process, endpoints):
        channel = await importer.open_channel(epoch(1), endpoints[1])
        await channel.read([1], [1])
        process.kill()
        with pytest.raises(TransportError):
            await channel.read(list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS)))
        await channel.destroy()
        link = channel.link
        await until(link.quiet.is_set)
    async with exporter_process() as (_, endpoints):
        channel = await importer.open_channel(epoch(2), endpoints[2])
        await channel.read([5], [6])
        assert torch.equal(target.raw[6].cpu(), random_pool(NUM_BLOCKS, seed=1).raw[5])
        await importer.close()


@pytest.mark.cuda
@two_ranks
async def test_a_receive_without_a_sender_is_aborted_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort must end a kernel that waits on the device for its peer."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    importer = NcclImporter(memory=device_pool(seed=2), proofs=PROOFS, library=CupyNccl(0), limits=LIMITS)
    async with exporter_process() as (process, endpoints):
        channel = await importer.open_channel(epoch(1), endpoints[1])
        process.send_signal(19)  # SIGSTOP: it will not send
        communicator = channel.link._communicator
        assert communicator is not None
        address = channel._raw.data_ptr()
        pair = channel._thread
        await asyncio.wrap_future(pair.submit(lambda: communicator.receive([Piece(address, channel._block_bytes)])))
        assert not await asyncio.wrap_future(pair.submit(communicator.is_done))
        begun_s = time.monotonic()
        channel.link.poison("the test")
        await asyncio.wrap_future(pair.submit(lambda: channel.link.abort("the test")))
        assert time.monotonic() - begun_s < LIMITS.abort_s
        await importer.close()
