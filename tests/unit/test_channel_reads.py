"""A long read in pieces: each is digested while the next one is on its way, and none of it outlives a destruction."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.kv.pool import KvPool
from kvtransfer.digest.definitions import FOLDED, digest_blocks
from kvtransfer.importer import channel_reads
from kvtransfer.importer.channel_reads import GPU_PIECE_BYTES, PIECE_BYTES, ChannelReads, PieceSize
from kvtransfer.transports.base import TransportError
from kvtransfer.wire.wire_format import NativeFormat
from tests.contract.kv_pools import random_pool

NUM_BLOCKS = 10


def _unmeasured(num_bytes: int, seconds: float) -> None:
    assert num_bytes > 0 and seconds >= 0


class _Channel:
    """Copies at once; remembers the pieces."""

    def __init__(self, source: KvPool, target: KvPool) -> None:
        self._source, self._target = source, target
        self.pieces: list[tuple[int, ...]] = []
        self.second_piece = asyncio.Event()
        self.is_destroyed = False

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        if self.is_destroyed:
            raise TransportError("destroyed")
        self.pieces.append(tuple(remote_block_ids))
        if len(self.pieces) == 2:
            self.second_piece.set()
        for remote, local in zip(remote_block_ids, local_block_ids, strict=True):
            self._target.raw[local] = self._source.raw[remote]

    async def destroy(self) -> None:
        self.is_destroyed = True

    async def release(self) -> None:
        pass


class _Gated(NativeFormat):
    """Its decode waits until the test lets it go on."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self.short_bytes = 0  # decoded by another thread, whatever its size
        self.begun, self.gate = threading.Event(), threading.Event()
        self.decoded: list[int] = []

    def decode(self, block_ids: Sequence[int]) -> None:
        self.begun.set()
        assert self.gate.wait(20)
        self.decoded += block_ids


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> tuple[KvPool, KvPool]:
    """In pieces of three blocks."""
    source, target = random_pool(NUM_BLOCKS, seed=1), random_pool(NUM_BLOCKS, seed=2)
    monkeypatch.setattr(channel_reads, "PIECE_BYTES", 3 * source.block_bytes + 1)
    return source, target


def test_pieces_into_gpu_memory_follow_how_fast_the_way_is() -> None:
    block_bytes = 2 << 20
    size = PieceSize(block_bytes, GPU_PIECE_BYTES)
    assert size.num_blocks == 2
    size.took(2, 125e-6)  # nothing but the asking for it
    assert size.num_blocks == 64
    size.took(3, 125e-6)  # the end of a read
    assert size.num_blocks == 64
    size.took(64, 200e-6)
    assert size.num_blocks == GPU_PIECE_BYTES // block_bytes
    size.took(size.num_blocks, 0.032)  # a way that is slow at the moment
    assert size.num_blocks == 32
    size.took(32, 10.0)
    assert size.num_blocks == 2
    assert PieceSize(1 << 30, GPU_PIECE_BYTES).num_blocks == 1


def test_pieces_into_host_memory_stay_as_they_are() -> None:
    size = PieceSize(2 << 20, PIECE_BYTES)
    for seconds in (1e-4, 0.0, 10.0):
        size.took(size.num_blocks, seconds)
        assert size.num_blocks == 2


async def test_a_long_read_comes_in_pieces_with_every_digest_in_order(pools: tuple[KvPool, KvPool]) -> None:
    source, target = pools
    remote, local = tuple(reversed(range(NUM_BLOCKS))), tuple(range(NUM_BLOCKS))
    channel, wire = _Channel(source, target), NativeFormat(target)
    wire.short_bytes = 0
    with ThreadPoolExecutor(1) as verifier:
        digests = await ChannelReads(channel, wire, verifier, FOLDED, _unmeasured).read(remote, local)

    assert channel.pieces == [(9, 8, 7), (6, 5, 4), (3, 2, 1), (0,)]
    assert digests == digest_blocks(source, remote)


async def test_a_short_read_needs_no_other_thread(pools: tuple[KvPool, KvPool]) -> None:
    source, target = pools
    verifier = ThreadPoolExecutor(1)
    verifier.shutdown()

    digests = await ChannelReads(_Channel(source, target), NativeFormat(target), verifier, FOLDED, _unmeasured).read(
        (4,), (2,)
    )

    assert digests == digest_blocks(source, (4,))


async def test_a_piece_is_taken_in_while_the_next_one_is_read(pools: tuple[KvPool, KvPool]) -> None:
    source, target = pools
    channel, wire = _Channel(source, target), _Gated(target)
    with ThreadPoolExecutor(1) as verifier:
        reading = asyncio.create_task(
            ChannelReads(channel, wire, verifier, FOLDED, _unmeasured).read(range(6), range(6))
        )
        await asyncio.to_thread(wire.begun.wait, 20)  # the first piece is being taken in, and stays so
        async with asyncio.timeout(20):
            await channel.second_piece.wait()
        assert not reading.done()
        wire.gate.set()
        await reading

    assert wire.decoded == [0, 1, 2, 3, 4, 5]


async def test_destroying_waits_for_what_is_being_taken_in(pools: tuple[KvPool, KvPool]) -> None:
    """Taking in writes to the pool where KV travels in another form."""
    source, target = pools
    channel, wire = _Channel(source, target), _Gated(target)
    with ThreadPoolExecutor(1) as verifier:
        reads = ChannelReads(channel, wire, verifier, FOLDED, _unmeasured)
        reading = asyncio.create_task(reads.read(range(6), range(6)))
        await asyncio.to_thread(wire.begun.wait, 20)
        destroying = asyncio.create_task(reads.destroy())
        done, _ = await asyncio.wait([destroying], timeout=0.05)
        assert not done
        wire.gate.set()
        async with asyncio.timeout(20):
            await destroying
        decoded = len(wire.decoded)
        await asyncio.gather(reading, return_exceptions=True)

    assert decoded == len(wire.decoded)
