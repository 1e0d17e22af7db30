"""Tests of the promises that only `shm` makes: what is mapped, for how long, and which pools are offered."""

import asyncio
import os
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch

from cluster.errors import ConfigError
from kvtransfer.digests import PUBLIC, compiled_digests, digest_blocks
from kvtransfer.memory import SHORT_BYTES
from kvtransfer.transports.base import DigestingChannel, TransportError
from kvtransfer.transports.shm import transport as shm
from kvtransfer.transports.shm.transport import ShmExporter, ShmImporter
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.proofs import PROOFS
from tests.contract.rigs.transport_rig import EPOCH, available


async def test_the_importer_maps_the_pool_for_reading_only() -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, importer = ShmExporter(memory=source, proofs=PROOFS), ShmImporter(memory=target, proofs=PROOFS)
    await exporter.start()
    channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    assert channel._pool is not None
    with pytest.raises(ValueError, match="read-only"):
        channel._pool.memory[0, 0] = 1
    await importer.close()
    await exporter.close()


@pytest.mark.parametrize("short_bytes", [0, SHORT_BYTES], ids=["on a thread", "on the event loop"])
async def test_a_digested_read_returns_the_digests_of_the_received_blocks(
    short_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled_digests() is None:
        pytest.skip("this machine has no compiler or no AVX2")
    monkeypatch.setattr(shm, "SHORT_BYTES", short_bytes)
    source, target = random_pool(6, seed=1), random_pool(6, seed=2)
    exporter, importer = ShmExporter(memory=source, proofs=PROOFS), ShmImporter(memory=target, proofs=PROOFS)
    await exporter.start()
    channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    assert isinstance(channel, DigestingChannel)
    assert await channel.read_digested((5, 0, 1), (2, 4, 5), PUBLIC) == digest_blocks(source, (5, 0, 1))
    assert torch.equal(target.raw[[2, 4, 5]], source.raw[[5, 0, 1]])
    with pytest.raises(TransportError, match="beyond the 6"):
        await channel.read_digested((6,), (0,), PUBLIC)
    await channel.destroy()
    with pytest.raises(TransportError, match="closed"):
        await channel.read_digested((0,), (0,), PUBLIC)
    await importer.close()
    await exporter.close()


async def test_without_compiled_digests_the_channel_only_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "compiled_digests", lambda: None)
    source, target = random_pool(2, seed=1), random_pool(2, seed=2)
    exporter, importer = ShmExporter(memory=source, proofs=PROOFS), ShmImporter(memory=target, proofs=PROOFS)
    await exporter.start()
    channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    assert not isinstance(channel, DigestingChannel)
    await importer.close()
    await exporter.close()


async def test_the_end_of_the_exporter_ends_the_mapping_of_its_pool() -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, importer = ShmExporter(memory=source, proofs=PROOFS), ShmImporter(memory=target, proofs=PROOFS)
    await exporter.start()
    channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    assert channel._pool is not None
    mapped = weakref.ref(channel._pool.memory)
    await channel.finish()
    assert importer.num_mappings == 1 and mapped() is not None
    endpoint = exporter.grant(EPOCH)
    await exporter.close()
    with pytest.raises(TransportError):
        await importer.open_channel(EPOCH, endpoint)
    assert importer.num_mappings == 0 and mapped() is None, "a reference to the channel keeps no pool mapped"
    await importer.close()


def test_shm_is_offered_only_if_both_workers_see_the_same_files() -> None:
    source = random_pool(2, seed=1)
    exporter = ShmExporter(memory=source, proofs=PROOFS)
    assert exporter.reachable(shm.host_identity())
    assert not exporter.reachable(b"another host")
    assert not exporter.reachable(b"")


def test_a_pool_that_is_no_file_is_not_offered_as_shared_memory() -> None:
    pool = random_pool(2, seed=1)
    elsewhere = WithFile(pool.num_blocks, pool.block_bytes, pool.raw, None)
    found = available(elsewhere)
    assert "shm" not in found.names and "tcp" in found.names
    assert "not in this host's memory" in found.missing["shm"]
    with pytest.raises(ConfigError, match="shm: the pool is not in this host's memory"):
        available(elsewhere, "shm,tcp")


async def test_a_pool_that_its_exporter_could_truncate_is_not_mapped() -> None:
    """Reading a mapping past the end of a truncated file would end the importer with SIGBUS."""
    source, target = random_pool(2, seed=1), random_pool(2, seed=2)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, source.num_blocks * source.block_bytes)
    exporter = ShmExporter(memory=WithFile(source.num_blocks, source.block_bytes, source.raw, unsealed), proofs=PROOFS)
    importer = ShmImporter(memory=target, proofs=PROOFS)
    await exporter.start()
    try:
        with pytest.raises(TransportError, match="not sealed"):
            await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        assert importer.num_mappings == 0
    finally:
        await importer.close()
        await exporter.close()
        os.close(unsealed)


async def test_a_copy_for_which_no_thread_could_be_started_never_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor has queued the copy by then, and a thread that is busy now would run it later: the channel is
    destroyed before that, so the blocks may be another request's."""
    monkeypatch.setattr(shm, "SHORT_BYTES", 0)
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, importer = ShmExporter(memory=source, proofs=PROOFS), ShmImporter(memory=target, proofs=PROOFS)
    await exporter.start()
    channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    before, begun, go_on = target.raw.clone(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(20)

    importer._threads.submit(hold)
    assert begun.wait(20)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            await channel.read((0, 1), (2, 3))
        if isinstance(channel, DigestingChannel):
            other = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
            assert isinstance(other, DigestingChannel)
            with pytest.raises(RuntimeError, match="new thread"):
                await other.read_digested((0, 1), (2, 3), PUBLIC)
            await other.destroy()
    await channel.destroy()
    go_on.set()
    await asyncio.to_thread(importer._threads.shutdown)  # everything that it has queued has run
    assert torch.equal(target.raw, before), "the copy ran after its channel was destroyed"
    await importer.close()
    await exporter.close()


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@dataclass
class WithFile:
    """PoolMemory with another file, or without one like a GPU's pool."""

    num_blocks: int
    block_bytes: int
    raw: torch.Tensor
    memfd: int | None
