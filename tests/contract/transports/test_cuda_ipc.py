"""Tests of the `cuda_ipc` transport: the hand-over of the pool's pages, and the state after the exporter's death.

Here with a file in host memory in place of a GPU's pages; on a GPU between two processes.
"""

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch

from cluster.messages import Epoch
from engine.kv.pool import KvPool
from kvtransfer.digests import digest_blocks
from kvtransfer.transports.base import DigestingChannel, TransportError, TransportSetup
from kvtransfer.transports.cuda import transport as cuda_ipc
from kvtransfer.transports.cuda.transport import CudaAccess, CudaIpcExporter, CudaIpcImporter, Mapping
from tests.contract.rigs.host_access import ExportedPool, HostAccess
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.processes.cuda_ipc_process import EPOCH, LAYOUT, NUM_BLOCKS, patterned_pool
from tests.contract.rigs.proofs import PROOFS
from tests.faults.injection import SubmitFaults, Where

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@asynccontextmanager
async def two_sides(
    source: KvPool, target: KvPool
) -> AsyncIterator[tuple[CudaIpcExporter, CudaIpcImporter, HostAccess]]:
    exporter = CudaIpcExporter(memory=ExportedPool(source), proofs=PROOFS, access=HostAccess(source))
    access = HostAccess(target)
    importer = CudaIpcImporter(memory=target, proofs=PROOFS, access=access)
    await exporter.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield exporter, importer, access
    finally:
        access.go.set()
        await importer.close()
        await exporter.close()


async def _unmapped(importer: CudaIpcImporter) -> None:
    """Wait until the mapping is gone: the event loop's reader unmaps it."""
    async with asyncio.timeout(DEADLINE_S):
        while importer.num_mappings:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_one_mapping_serves_every_hand_off_with_an_exporter() -> None:
    source, target = random_pool(8, seed=1), random_pool(8, seed=2)
    async with two_sides(source, target) as (exporter, importer, _):
        for attempt in range(3):
            epoch = Epoch(EPOCH.exporter, EPOCH.ticket_id, attempt)
            channel = await importer.open_channel(epoch, exporter.grant(epoch))
            await channel.read([7, 0], [1, 3])
            await channel.finish()
        assert importer.num_mappings == 1
        assert torch.equal(target.raw[[1, 3]], source.raw[[7, 0]])


async def test_a_read_digests_the_blocks_that_it_copies() -> None:
    source, target = random_pool(8, seed=1), random_pool(8, seed=2)
    async with two_sides(source, target) as (exporter, importer, _):
        channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        assert isinstance(channel, DigestingChannel)
        assert await channel.read_digested([7, 0], [1, 3], b"seed") == digest_blocks(source, [7, 0], b"seed")
        assert torch.equal(target.raw[[1, 3]], source.raw[[7, 0]])
        await channel.finish()


async def test_the_end_of_the_exporter_ends_the_mapping_and_not_the_copy_in_flight() -> None:
    source, target = random_pool(8, seed=1), random_pool(8, seed=2)
    async with two_sides(source, target) as (exporter, importer, access):
        endpoint = exporter.grant(EPOCH)
        channel = await importer.open_channel(EPOCH, endpoint)
        assert channel._pool is not None
        mapped = weakref.ref(channel._pool.memory)
        access.go.clear()
        read = asyncio.create_task(channel.read([5], [6]))
        assert await asyncio.to_thread(access.copying.wait, DEADLINE_S)
        await exporter.close()
        await _unmapped(importer)
        access.go.set()
        await read
        del read
        assert torch.equal(target.raw[6], source.raw[5]) and mapped() is not None
        await channel.finish()
        # A reference to the channel keeps no pages; the copying thread releases them shortly after the read ends.
        async with asyncio.timeout(DEADLINE_S):
            while mapped() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        with pytest.raises(TransportError):
            await importer.open_channel(EPOCH, endpoint)


async def test_destroying_a_channel_waits_for_its_copy() -> None:
    source, target = random_pool(8, seed=1), random_pool(8, seed=2)
    async with two_sides(source, target) as (exporter, importer, access):
        channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        access.go.clear()
        read = asyncio.create_task(channel.read([5], [6]))
        assert await asyncio.to_thread(access.copying.wait, DEADLINE_S)
        read.cancel()
        with suppress(asyncio.CancelledError):
            await read
        destroying = asyncio.create_task(channel.destroy())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not destroying.done()
        access.go.set()
        await destroying
        assert torch.equal(target.raw[6], source.raw[5])


async def test_pages_that_cannot_be_mapped_leave_no_file_open() -> None:
    source, target = random_pool(8, seed=1), random_pool(8, seed=2)
    async with two_sides(source, target) as (exporter, importer, access):
        access.fail = True
        open_files = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(TransportError, match="CUDA_ERROR_NOT_SUPPORTED"):
                await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        assert importer.num_mappings == 0
        access.fail = False
        await (await importer.open_channel(EPOCH, exporter.grant(EPOCH))).read([0], [0])
        assert len(os.listdir("/proc/self/fd")) <= open_files + 4  # the mapping, and one connection's two ends


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("where", [Where.NOT_SUBMITTED, Where.SUBMITTED_ALL_THE_SAME])
async def test_where_no_thread_can_be_started_the_file_is_closed_once_and_never_mapped(
    where: Where, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that maps it later would map, and close, whichever file has its number by then."""
    source, target = random_pool(8, seed=1), random_pool(8, seed=2)
    async with two_sides(source, target) as (exporter, importer, access):
        files: list[int] = []
        real_map = importer.map

        async def record(file: int, num_blocks: int, num_bytes: int) -> Mapping:
            files.append(file)
            return await real_map(file, num_blocks, num_bytes)

        monkeypatch.setattr(importer, "map", record)
        mapped = _recorded(access, monkeypatch)
        busy = threading.Event()
        for _ in range(2):  # both threads: a call that is queued all the same waits
            importer._threads.submit(busy.wait, DEADLINE_S)
        with pytest.MonkeyPatch.context() as patch:
            SubmitFaults(0, error, where).install(patch)
            with pytest.raises(error, match="injected"):
                await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        assert not _is_open(files[0])
        busy.set()
        channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        await channel.read([7], [1])
        assert mapped == files[1:], "only the second file was mapped"
        assert torch.equal(target.raw[1], source.raw[7])
        await channel.finish()


async def test_a_file_whose_mapping_was_never_begun_is_closed_when_the_threads_end() -> None:
    source, target = random_pool(8, seed=1), random_pool(8, seed=2)
    async with two_sides(source, target) as (_, importer, _):
        busy = threading.Event()
        occupied = [importer._threads.submit(busy.wait, DEADLINE_S) for _ in range(2)]
        file = os.memfd_create("pool")
        mapping = asyncio.create_task(importer.map(file, 8, 4096))
        await asyncio.sleep(0)
        importer._threads.shutdown(wait=False, cancel_futures=True)
        busy.set()
        with pytest.raises(asyncio.CancelledError):
            await mapping
        assert all(each.result() for each in occupied) and not _is_open(file)


def _recorded(access: HostAccess, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the files that the threads will have mapped."""
    mapped: list[int] = []
    real_map = access.map

    def record(file: int, num_bytes: int) -> Mapping:
        mapped.append(file)
        return real_map(file, num_bytes)

    monkeypatch.setattr(access, "map", record)
    return mapped


def _is_open(file: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{file}")


async def test_a_pool_of_other_blocks_is_refused() -> None:
    source, target = random_pool(8, seed=1), random_pool(8, seed=2, layers=3)
    async with two_sides(source, target) as (exporter, importer, _):
        with pytest.raises(TransportError, match="do not have"):
            await importer.open_channel(EPOCH, exporter.grant(EPOCH))


async def test_cuda_ipc_is_offered_on_one_host_to_gpus_with_peer_access() -> None:
    source = random_pool(2, seed=1)
    exporter = CudaIpcExporter(
        memory=ExportedPool(source), proofs=PROOFS, access=HostAccess(source, reaches=["gpu-0", "gpu-1"])
    )
    for device, expected in (("gpu-0", True), ("gpu-1", True), ("gpu-2", False)):
        importer = CudaIpcImporter(memory=source, proofs=PROOFS, access=HostAccess(source, device=device))
        assert exporter.reachable(importer.endpoint()) is expected
        assert not exporter.reachable(b"elsewhere" + importer.endpoint())
        await importer.close()
    assert not exporter.reachable(b"")


def test_a_pool_that_is_not_exported_is_not_offered() -> None:
    pool = random_pool(2, seed=1)

    def means(memory: object) -> TransportSetup:
        return TransportSetup(
            member=EPOCH.exporter,
            proofs=PROOFS,
            memory=memory,  # type: ignore[arg-type]
            host="::",
            advertise_host="::1",
            timeout_s=1.0,
        )

    assert cuda_ipc.unavailable(means(pool)) == "the pool is not on a GPU"
    assert cuda_ipc.unavailable(means(ExportedPool(pool, why_no_cuda_file="no driver"))) == "no driver"
    assert cuda_ipc.unavailable(means(ExportedPool(pool))) == ""


@asynccontextmanager
async def exporter_process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, bytes]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.contract.rigs.processes.cuda_ipc_process",
        *arguments,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process, bytes.fromhex((await process.stdout.readline()).decode())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.cuda
@with_gpu
async def test_blocks_move_between_two_processes_on_the_device() -> None:
    target, expected = KvPool(LAYOUT, NUM_BLOCKS, "cuda"), patterned_pool(seed=1)
    assert target.why_no_cuda_file == ""
    importer = CudaIpcImporter(memory=target, proofs=PROOFS, access=CudaAccess(target))
    async with exporter_process() as (_, endpoint):
        channel = await importer.open_channel(EPOCH, endpoint)
        remote, local = list(range(0, 400, 3)), list(range(133, -1, -1))
        await channel.read(remote, local)
        assert torch.equal(target.raw[local], expected.raw[remote])
        assert digest_blocks(target, local) == digest_blocks(expected, remote)
        assert not target.raw[134:].any()
        assert isinstance(channel, DigestingChannel)
        target.raw.zero_()
        torch.cuda.synchronize()
        assert await channel.read_digested(remote, local, b"seed") == digest_blocks(expected, remote, b"seed")
        assert torch.equal(target.raw[local], expected.raw[remote]) and not target.raw[134:].any()
        await channel.finish()
        await importer.close()


@pytest.mark.cuda
@with_gpu
async def test_pages_of_an_exporter_killed_during_a_copy_stay_readable() -> None:
    target, expected = KvPool(LAYOUT, NUM_BLOCKS, "cuda"), patterned_pool(seed=1)
    importer = CudaIpcImporter(memory=target, proofs=PROOFS, access=CudaAccess(target))
    async with exporter_process() as (process, endpoint):
        channel = await importer.open_channel(EPOCH, endpoint)
        everything = list(range(NUM_BLOCKS))
        await channel.read(everything, everything)  # the kernel is compiled
        is_gone = asyncio.Event()

        async def read_on() -> None:
            """Copy without end, so that a copy is in progress whenever the owner dies, and another begins
            afterwards."""
            is_last = False
            while not is_last:
                is_last = is_gone.is_set()
                await channel.read(everything, everything)

        reading = asyncio.create_task(read_on())
        await asyncio.sleep(0)
        process.kill()
        await process.wait()
        target.raw.zero_()
        torch.cuda.synchronize()
        is_gone.set()
        await reading
        assert torch.equal(target.raw, expected.raw)
        await _unmapped(importer)
        with pytest.raises(TransportError):
            await importer.open_channel(EPOCH, endpoint)
        await channel.finish()
    torch.cuda.synchronize()  # the device is as well as before
    await importer.close()


@pytest.mark.cuda
@pytest.mark.whole_gpu
@with_gpu
async def test_the_pages_of_a_dead_exporter_are_freed_when_the_importer_unmaps_them() -> None:
    """The free memory of the device includes changes by other processes, so the pool is large enough that they do not
    matter."""
    target = KvPool(LAYOUT, NUM_BLOCKS, "cuda")
    importer = CudaIpcImporter(memory=target, proofs=PROOFS, access=CudaAccess(target))
    free_before, total = torch.cuda.mem_get_info()
    pool_bytes = int(0.4 * total)
    if free_before < 1.5 * pool_bytes:
        pytest.fail(f"{free_before >> 30} GiB free: others use this device")
    async with exporter_process(str(pool_bytes // LAYOUT.block_bytes)) as (process, endpoint):
        channel = await importer.open_channel(EPOCH, endpoint)
        await channel.finish()
        assert torch.cuda.mem_get_info()[0] < free_before - pool_bytes // 2
        process.kill()
        await process.wait()
        await _unmapped(importer)
        del channel
    async with asyncio.timeout(DEADLINE_S):
        while torch.cuda.mem_get_info()[0] < free_before - pool_bytes // 2:  # noqa: ASYNC110  (the driver's doing)
            await asyncio.sleep(0)
    await importer.close()
