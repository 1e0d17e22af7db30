"""Tests of the promises that only NIXL makes: reads that need no processor of the exporter's, and quiet memory after
the agent's destruction."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.messages import Epoch, MemberId
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.transports.available import available_transports
from kvtransfer.transports.base import Channel, TransportError, TransportSetup
from kvtransfer.transports.nixl import transport as nixl
from kvtransfer.transports.nixl.agent import Pace, why_not_loadable
from kvtransfer.transports.nixl.exporting import NixlEndpoint, NixlExporter
from kvtransfer.transports.nixl.transport import NixlImporter
from kvtransfer.transports.proven_connections import ConnectionProofs
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.namespaces import INTERFACE, joined_namespaces
from tests.contract.rigs.processes.forked_process import DEADLINE_S, Process, process
from tests.contract.rigs.processes.nixl_process import (
    CAUGHT_S,
    EPOCH,
    NUM_BLOCKS,
    BytePool,
    exporting,
    exporting_gpu_memory,
    importing,
    limit_reads,
)
from tests.contract.rigs.proofs import KEY, PROOFS, TELEMETRY

pytestmark = pytest.mark.skipif(bool(why_not_loadable()), reason=why_not_loadable())

PATTERN = 0x5A
# UCX's stand-in for one-sided reads, which the product refuses: the one way to lose a peer in mid-read without RDMA.
EMULATED = {"UCX_TLS": "tcp,self", "UCX_PROTO_EMULATION_ENABLE": "y", "UCX_LOG_LEVEL": "fatal"}
ALL_BLOCKS = list(range(NUM_BLOCKS))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the settings of agents that this process makes."""
    for name, value in EMULATED.items():
        monkeypatch.setenv(name, value)


@asynccontextmanager
async def importer(pool: BytePool) -> AsyncIterator[NixlImporter]:
    transport = NixlImporter(memory=pool, proofs=PROOFS, timeout_s=DEADLINE_S)
    try:
        yield transport
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await transport.close()
        assert transport.num_links == 0


@asynccontextmanager
async def exporter(byte: int, member: MemberId = EPOCH.exporter) -> AsyncIterator[NixlExporter]:
    proofs = ConnectionProofs(KEY, member, TELEMETRY)
    transport = NixlExporter(memory=BytePool(byte), proofs=proofs, linger_s=5.0)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


def resources() -> tuple[int, int]:
    """Return the numbers of open descriptors of this process and of this transport's threads."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("kv-nixl")]
    return len(os.listdir("/proc/self/fd")), len(ours)


@pytest.mark.usefixtures("emulated")
async def test_a_read_of_a_stopped_exporter_ends_at_its_deadline_and_nothing_is_written_later() -> None:
    pool = BytePool(0)
    async with (
        process(exporting, 7, environment=EMULATED) as there,
        importer(pool) as here,
        exporter(9) as another,
    ):
        channel, read = await _stopped_in_mid_read(here, there, pool)
        limit_reads(channel, CAUGHT_S)
        with pytest.raises(TransportError, match=f"the exporter did not answer within {CAUGHT_S:g} s"):
            await read
        await channel.destroy()
        pool.raw.fill_(PATTERN)
        there.signal(signal.SIGCONT)
        await _read_something_else(here, another, pool)
        assert bool((pool.raw[1:] == PATTERN).all())


@pytest.mark.usefixtures("emulated")
async def test_a_cancelled_read_of_a_stopped_exporter_has_ended_once_its_channel_is_destroyed() -> None:
    pool = BytePool(0)
    async with process(exporting, 7, environment=EMULATED) as there, importer(pool) as here, exporter(9) as another:
        channel, read = await _stopped_in_mid_read(here, there, pool)
        read.cancel()
        with suppress(asyncio.CancelledError):
            await read
        async with asyncio.timeout(DEADLINE_S / 2):  # long before the read's own deadline
            await channel.destroy()
        pool.raw.fill_(PATTERN)
        there.signal(signal.SIGCONT)
        await _read_something_else(here, another, pool)
        assert bool((pool.raw[1:] == PATTERN).all())


async def _stopped_in_mid_read(
    here: NixlImporter, there: Process, pool: BytePool
) -> tuple[Channel, "asyncio.Task[None]"]:
    """Return a read, with its channel, in whose middle the exporting process was stopped."""
    endpoint = await _endpoint(there)
    while True:
        channel = await here.open_channel(EPOCH, endpoint)
        read = asyncio.create_task(channel.read(ALL_BLOCKS, ALL_BLOCKS))
        if await pool.stop_in_mid_read(read, there.process_id):
            return channel, read
        await read
        await channel.destroy()
        pool.raw.fill_(0)


async def _endpoint(exporter: Process) -> bytes:
    endpoint = await exporter.answer()
    assert isinstance(endpoint, bytes)
    return endpoint


async def _read_something_else(here: NixlImporter, another: NixlExporter, pool: BytePool) -> None:
    """Read 64 MiB from another exporter. In this time a message of the woken exporter would have arrived."""
    channel = await here.open_channel(EPOCH, another.grant(EPOCH))
    await channel.read(range(1024), [0] * 1024)
    assert bool((pool.raw[0] == 9).all())
    await channel.finish()


@pytest.mark.usefixtures("emulated")
async def test_a_killed_exporter_fails_the_read_at_once_and_its_successor_is_read() -> None:
    pool = BytePool(0)
    async with importer(pool) as here:
        async with process(exporting, 7, environment=EMULATED) as there:
            channel, read = await _stopped_in_mid_read(here, there, pool)
            there.signal(signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S / 2):  # the read's deadline is later
                with pytest.raises(TransportError):
                    await read
            await channel.destroy()
        async with process(exporting, 8, environment=EMULATED) as again:
            channel = await here.open_channel(EPOCH, await _endpoint(again))
            await channel.read(ALL_BLOCKS, ALL_BLOCKS)
            assert pool.holds(8)
            await channel.finish()
            assert here.num_links == 1


async def test_reads_do_not_use_the_exporters_processor() -> None:
    """The importer can read from a stopped exporter, and not from a killed one."""
    pool = BytePool(0)
    async with process(exporting, 7) as there, importer(pool) as here:
        _require_reading(there.process_id)
        channel = await here.open_channel(EPOCH, await _endpoint(there))
        there.signal(signal.SIGSTOP)
        await channel.read(ALL_BLOCKS, ALL_BLOCKS)
        assert pool.holds(7)
        there.signal(signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S / 2):
            with pytest.raises(TransportError):
                await _read_until_it_fails(channel)  # the kernel frees a killed process's memory in its own time
        await channel.destroy()


async def _read_until_it_fails(channel: Channel) -> None:
    while True:
        await channel.read([0], [0])


def _require_reading(process_id: int) -> None:
    try:
        os.close(os.open(f"/proc/{process_id}/mem", os.O_RDONLY))
    except PermissionError:
        pytest.skip("this kernel lets no process read another's memory")


async def test_an_importer_that_is_killed_in_mid_read_harms_neither_the_exporter_nor_its_other_readers() -> None:
    pool = BytePool(0)
    async with exporter(7) as there, importer(pool) as here, process(importing, 0) as dying:
        _require_reading(dying.process_id)
        endpoint = there.grant(EPOCH)
        channel = await here.open_channel(EPOCH, endpoint)
        assert await dying.ask("open", endpoint) == "ok"
        await dying.ask("read")
        dying.signal(signal.SIGKILL)
        await channel.read(ALL_BLOCKS, ALL_BLOCKS)
        assert pool.holds(7)
        assert there.reachable(here.endpoint())


@pytest.mark.slow
async def test_a_cut_link_ends_the_read_at_its_deadline_and_the_importer_works_when_it_is_healed() -> None:
    environment = EMULATED | {"UCX_NET_DEVICES": INTERFACE}
    with joined_namespaces() as cable:
        there = cable.first.namespace
        async with (
            process(exporting, 7, environment=environment, namespace=there) as lost,
            process(exporting, 8, environment=environment, namespace=there) as healthy,
            process(importing, 0, environment=environment, namespace=cable.second.namespace) as reading,
        ):
            endpoint = await lost.answer()
            assert await reading.ask("open", endpoint) == "ok"
            while not await reading.ask("stop", lost.process_id):
                assert await reading.ask("end") == "ok"
                assert await reading.ask("destroy") == "ok"
                assert await reading.ask("fill", 0) == "ok"
                assert await reading.ask("open", endpoint) == "ok"
            cable.cut()
            os.kill(lost.process_id, signal.SIGCONT)
            assert await reading.ask("limit") == "ok"
            assert f"the exporter did not answer within {CAUGHT_S:g} s" in str(await reading.ask("end"))
            assert await reading.ask("destroy") == "ok"
            assert await reading.ask("fill", PATTERN) == "ok"
            cable.heal()
            other = await healthy.answer()
            assert await reading.ask("holds", PATTERN) is True
            assert await reading.ask("fill", 0) == "ok"
            assert await reading.ask("open", other) == "ok"
            await reading.ask("read")
            assert await reading.ask("end") == "ok"
            assert await reading.ask("holds", 8) is True


async def test_where_reads_would_be_emulated_no_channel_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with exporter(7) as there, importer(BytePool(0)) as here:
        with pytest.raises(TransportError, match="no RDMA, GPU or shared memory leads to it"):
            await here.open_channel(EPOCH, there.grant(EPOCH))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
async def test_blocks_move_between_two_processes_in_gpu_memory() -> None:
    pool = BytePool(0, "cuda")
    async with process(exporting_gpu_memory, 7) as there, importer(pool) as here:
        channel = await here.open_channel(EPOCH, await _endpoint(there))
        await channel.read([5, 6, 40], [1, 2, 3])
        assert bool((pool.raw[1:4] == 7).all()) and not pool.raw[0].any() and not pool.raw[4:].any()
        await channel.read(ALL_BLOCKS, ALL_BLOCKS)
        assert pool.holds(7)
        await channel.finish()


async def test_ended_links_leave_no_resources() -> None:
    async with importer(BytePool(0)) as here:
        async with exporter(1) as there:  # the library's own threads and files come with the first
            await (await here.open_channel(EPOCH, there.grant(EPOCH))).finish()
        before = resources()
        for start in range(3):
            epoch = replace(EPOCH, exporter=MemberId("p0", f"start {start}"))
            async with exporter(2, epoch.exporter) as there:
                channel = await here.open_channel(epoch, there.grant(epoch))
                await channel.read([start], [start])
                await channel.finish()
        await here.settled()
        assert here.num_links == 1
        async with asyncio.timeout(DEADLINE_S):  # a thread that was asked to end needs a short time
            # Fewer are fine: connections of earlier tests are closed by gRPC's threads at a time of their own.
            while any(now > then for now, then in zip(resources(), before, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_hand_offs_with_one_exporter_share_a_link_and_a_cancelled_one_spares_the_other() -> None:
    pool = BytePool(0)
    async with exporter(7) as there, importer(pool) as here:
        first, second = [await here.open_channel(EPOCH, there.grant(EPOCH)) for _ in range(2)]
        assert here.num_links == 1
        reads = [asyncio.create_task(channel.read(ALL_BLOCKS, ALL_BLOCKS)) for channel in (first, second)]
        await asyncio.sleep(0)
        reads[0].cancel()
        with suppress(asyncio.CancelledError):
            await reads[0]
        await first.destroy()
        await reads[1]
        assert pool.holds(7)
        await second.finish()


async def test_an_endpoint_that_was_damaged_never_reaches_the_library() -> None:
    async with exporter(7) as there, importer(BytePool(0)) as here:
        endpoint = there.grant(EPOCH)
        flipped = [bytes([*endpoint[:at], endpoint[at] ^ 1, *endpoint[at + 1 :]]) for at in range(0, len(endpoint), 7)]
        for damaged in [b"", endpoint[:-1], endpoint + b"\0", *flipped]:
            with pytest.raises(TransportError, match=r"endpoint is damaged|has not signed"):
                await here.open_channel(EPOCH, damaged)
        assert here.num_links == 0
        for other in (replace(EPOCH, exporter=MemberId("p0", "a2")), replace(EPOCH, attempt=2)):
            with pytest.raises(TransportError, match="has not signed"):
                await here.open_channel(other, endpoint)
        parsed = NixlEndpoint.parse(endpoint, PROOFS, EPOCH)
        for wrong in (replace(parsed, slot=10**6), replace(parsed, token=bytes(16))):
            with pytest.raises(TransportError, match="contradict each other"):
                await here.open_channel(EPOCH, wrong.pack(PROOFS, EPOCH))


async def test_more_epochs_than_the_table_holds_are_refused_not_confused() -> None:
    async with exporter(7) as there, importer(BytePool(0)) as here:
        free = there.num_free_slots
        epochs = [Epoch(EPOCH.exporter, EPOCH.ticket_id, attempt) for attempt in range(free + 1)]
        endpoints = [there.grant(epoch) for epoch in epochs]
        assert there.num_free_slots == 0
        with pytest.raises(TransportError, match="has not admitted this epoch"):
            await here.open_channel(epochs[-1], endpoints[-1])
        await (await here.open_channel(epochs[-2], endpoints[-2])).finish()
        for epoch in epochs:
            there.revoke(epoch)
        assert there.num_free_slots == free


def test_nixl_is_omitted_without_rdma_or_under_tls_unless_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool = random_pool(2, seed=1)
    means = TransportSetup(
        member=EPOCH.exporter, proofs=PROOFS, memory=pool, host="127.0.0.1", advertise_host="127.0.0.1", timeout_s=5.0
    )
    monkeypatch.setattr(nixl, "_RDMA_DEVICES", tmp_path / "infiniband")
    assert "no RDMA device" in available_transports(TransferSettings(), means).missing["nixl"]
    assert available_transports(TransferSettings(kv_transports="nixl,tcp"), means).names == ("nixl", "tcp")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert "nixl" in available_transports(TransferSettings(), means).names


def test_polling_pauses_grow_until_an_event() -> None:
    pace = Pace(0.001)
    pace.hurry(10.0)
    assert pace.rest_s(10.0005) == 0.0
    rests = [pace.rest_s(11.0) for _ in range(8)]
    assert rests[0] == 50e-6 and rests == sorted(rests) and rests[-1] == 0.001
    pace.hurry(12.0)
    assert pace.rest_s(12.0) == 0.0
