"""A long read in pieces: each piece is digested while the next one is read, and no piece is used after a
destruction.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.kv.pool import KvPool
from kvtransfer.digests import digest_blocks
from kvtransfer.importer import reads
from kvtransfer.importer.reads import GPU_PIECE_BYTES, PIECE_BYTES, BlockReader, PieceSize
from kvtransfer.transports.base import DigestingChannel, TransportError
from kvtransfer.wire.wire_format import NativeFormat
from tests.contract.rigs.kv_pools import random_pool

NUM_BLOCKS = 10


def _unmeasured(num_bytes: int, seconds: float) -> None:
    assert num_bytes > 0 and seconds >= 0


class _Channel:
    """A channel that copies at once and records the pieces."""

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

    async def finish(self) -> None:
        pass


class _Gated(NativeFormat):
    """A format whose decode waits until the test opens its gate."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self.short_bytes = 0  # a read of any size is decoded by another thread
        self.begun, self.gate = threading.Event(), threading.Event()
        self.decoded: list[int] = []

    def decode(self, block_ids: Sequence[int]) -> None:
        self.begun.set()
        assert self.gate.wait(20)
        self.decoded += block_ids


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> tuple[KvPool, KvPool]:
    """Return two pools whose reads are divided into pieces of three blocks."""
    source, target = random_pool(NUM_BLOCKS, seed=1), random_pool(NUM_BLOCKS, seed=2)
    monkeypatch.setattr(reads, "PIECE_BYTES", 3 * source.block_bytes + 1)
    return source, target


def test_size_of_pieces_into_gpu_memory_follows_the_speed_of_the_link() -> None:
    block_bytes = 2 << 20
    size = PieceSize(block_bytes, GPU_PIECE_BYTES)
    assert size.num_blocks == 2
    size.record(2, 125e-6)  # nothing but the asking for it
    assert size.num_blocks == 64
    size.record(3, 125e-6)  # the end of a read
    assert size.num_blocks == 64
    size.record(64, 200e-6)
    assert size.num_blocks == GPU_PIECE_BYTES // block_bytes
    size.record(size.num_blocks, 0.032)  # a way that is slow at the moment
    assert size.num_blocks == 32
    size.record(32, 10.0)
    assert size.num_blocks == 2
    assert PieceSize(1 << 30, GPU_PIECE_BYTES).num_blocks == 1


def test_pieces_into_host_memory_have_a_constant_size() -> None:
    size = PieceSize(2 << 20, PIECE_BYTES)
    for seconds in (1e-4, 0.0, 10.0):
        size.record(size.num_blocks, seconds)
        assert size.num_blocks == 2


async def test_a_long_read_comes_in_pieces_with_every_digest_in_order(pools: tuple[KvPool, KvPool]) -> None:
    source, target = pools
    remote, local = tuple(reversed(range(NUM_BLOCKS))), tuple(range(NUM_BLOCKS))
    channel, wire = _Channel(source, target), NativeFormat(target)
    wire.short_bytes = 0
    with ThreadPoolExecutor(1) as verifier:
        digests = await BlockReader(channel, wire, verifier, _unmeasured).read(remote, local)

    assert channel.pieces == [(9, 8, 7), (6, 5, 4), (3, 2, 1), (0,)]
    assert digests == digest_blocks(source, remote)


async def test_a_short_read_needs_no_other_thread(pools: tuple[KvPool, KvPool]) -> None:
    source, target = pools
    verifier = ThreadPoolExecutor(1)
    verifier.shutdown()

    digests = await BlockReader(_Channel(source, target), NativeFormat(target), verifier, _unmeasured).read((4,), (2,))

    assert digests == digest_blocks(source, (4,))


class _Digesting(_Channel, DigestingChannel):
    """A channel that digests as it copies."""

    async def read_digested(
        self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int], seed: bytes
    ) -> tuple[bytes, ...]:
        await self.read(remote_block_ids, local_block_ids)
        return tuple(b"%d" % block_id for block_id in remote_block_ids)


async def test_digests_of_a_channel_that_computes_them_are_used(
    pools: tuple[KvPool, KvPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pools
    monkeypatch.setattr(reads, "DIGESTED_PIECE_BYTES", 4 * source.block_bytes + 1)
    channel, verifier = _Digesting(source, target), ThreadPoolExecutor(1)
    verifier.shutdown()
    reader = BlockReader(channel, NativeFormat(target), verifier, _unmeasured)

    assert await reader.read(range(5, 10), range(5)) == (b"5", b"6", b"7", b"8", b"9")
    assert channel.pieces == [(5, 6, 7, 8), (9,)]
    await reader.destroy()
    with pytest.raises(TransportError, match="destroyed"):
        await reader.read((1,), (1,))


async def test_a_sample_and_quantised_blocks_are_digested_after_the_read(pools: tuple[KvPool, KvPool]) -> None:
    source, target = pools
    quantised = NativeFormat(target)
    quantised.is_pool = False
    for wire, unverified in ((NativeFormat(target), frozenset({1})), (quantised, frozenset[int]())):
        with ThreadPoolExecutor(1) as verifier:
            reader = BlockReader(_Digesting(source, target), wire, verifier, _unmeasured)
            digests = await reader.read((4, 5), (0, 1), unverified)
        assert digests == (digest_blocks(source, (4,))[0], b"" if unverified else digest_blocks(source, (5,))[0])


async def test_a_piece_is_decoded_while_the_next_one_is_read(pools: tuple[KvPool, KvPool]) -> None:
    source, target = pools
    channel, wire = _Channel(source, target), _Gated(target)
    with ThreadPoolExecutor(1) as verifier:
        reading = asyncio.create_task(BlockReader(channel, wire, verifier, _unmeasured).read(range(6), range(6)))
        await asyncio.to_thread(wire.begun.wait, 20)  # the first piece is being taken in, and stays so
        async with asyncio.timeout(20):
            await channel.second_piece.wait()
        assert not reading.done()
        wire.gate.set()
        await reading

    assert wire.decoded == [0, 1, 2, 3, 4, 5]


async def test_destroy_waits_for_blocks_that_are_being_verified(pools: tuple[KvPool, KvPool]) -> None:
    """Decoding writes to the pool if the wire format is not the pool's."""
    source, target = pools
    channel, wire = _Channel(source, target), _Gated(target)
    with ThreadPoolExecutor(1) as verifier:
        reads = BlockReader(channel, wire, verifier, _unmeasured)
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


async def test_a_piece_for_which_no_thread_could_be_started_is_never_decoded(
    pools: tuple[KvPool, KvPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor has queued it by then, and another hand-off may start a thread before the channel is destroyed."""
    source, target = pools
    wire = _Gated(target)
    wire.gate.set()
    with ThreadPoolExecutor(1) as verifier:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_thread)
            with pytest.raises(RuntimeError, match="new thread"):
                await BlockReader(_Channel(source, target), wire, verifier, _unmeasured).read(range(3), range(3))
        verifier.submit(int)  # another hand-off's: it starts the thread

    assert not wire.decoded


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
