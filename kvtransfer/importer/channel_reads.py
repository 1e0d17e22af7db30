"""One hand-off's reads over one channel, a piece at a time: while the channel reads on, what arrived is taken in.

Owns the channel. Taking in (the digests of what arrived, and the pool's blocks from it) is part of a read: a read has
ended when nothing of it goes on any more, here or on the verifier's thread.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from kvtransfer.digest.definitions import DigestDefinition, digest_blocks
from kvtransfer.transports.base import Channel, TransportError
from kvtransfer.wire.wire_format import WireFormat

PIECE_BYTES = 4 << 20  # long enough to lose a round trip in it; measured best with shm and tcp
GPU_PIECE_BYTES = 512 << 20  # at most, into GPU memory: its digests need 4 MiB there
_PIECE_S = 0.004  # asking for a piece, and waiting for it, takes a thirtieth of that


class PieceSize:
    """How many blocks the next piece has. A host digests about as fast as it reads: pieces are short, so that it does
    both at once. A GPU has nothing to gain by that, for it digests many times as fast as anything but itself writes to
    it: the first piece tells how fast the way is, and those that follow are to take 4 ms each."""

    def __init__(self, block_bytes: int, most_bytes: int) -> None:
        self.num_blocks = self._least = max(1, PIECE_BYTES // block_bytes)
        self._most = max(self._least, most_bytes // block_bytes)

    def took(self, num_blocks: int, seconds: float) -> None:
        """A piece that was cut short by the end says little of longer ones."""
        if num_blocks == self.num_blocks:
            in_time = int(num_blocks * _PIECE_S / max(seconds, 1e-6))
            self.num_blocks = min(max(in_time, self._least), self._most)


class ChannelReads:
    """At most one read at a time, as its channel's."""

    def __init__(
        self,
        channel: Channel,
        wire: WireFormat,
        verifier: ThreadPoolExecutor,
        digests: DigestDefinition,
        was_read: Callable[[int, float], None],  # bytes, and the seconds that the channel alone took
    ) -> None:
        self._channel, self._wire, self._verifier, self._digests = channel, wire, verifier, digests
        self._was_read = was_read
        most_bytes = GPU_PIECE_BYTES if wire.memory.raw.is_cuda else PIECE_BYTES
        self._size = PieceSize(wire.memory.block_bytes, most_bytes)
        self._taking_in: list[asyncio.Future[tuple[bytes, ...]]] = []
        self._is_destroyed = False

    async def read(
        self,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        unverified: frozenset[int] = frozenset(),  # local blocks whose digests nobody wants
    ) -> tuple[bytes, ...]:
        """Digests of the local copies, in order, empty for those that nobody wants. Raises TransportError, OSError,
        RuntimeError; then only `destroy` may follow."""
        if len(local_block_ids) * self._wire.memory.block_bytes <= self._wire.short_bytes:
            await self._read_piece(remote_block_ids, local_block_ids)
            return self._take_in(tuple(local_block_ids), unverified)
        loop = asyncio.get_running_loop()
        start = 0
        while start < len(remote_block_ids):
            piece = slice(start, start + self._size.num_blocks)
            start = piece.stop
            await self._read_piece(remote_block_ids[piece], local_block_ids[piece])
            self._taking_in.append(
                loop.run_in_executor(self._verifier, self._take_in, tuple(local_block_ids[piece]), unverified)
            )
        await asyncio.wait(self._taking_in)
        taken_in, self._taking_in = self._taking_in, []
        return tuple(chain.from_iterable(piece.result() for piece in taken_in))

    async def destroy(self) -> None:
        """When it returns, nothing of any read can write to the pool any more."""
        self._is_destroyed = True
        await self._channel.destroy()
        if self._taking_in:
            await asyncio.wait(self._taking_in)

    async def release(self) -> None:
        await self._channel.release()

    async def _read_piece(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        began_s = time.perf_counter()
        await self._channel.read(remote_block_ids, local_block_ids)
        if self._is_destroyed:
            raise TransportError("the channel was destroyed")
        seconds = time.perf_counter() - began_s
        self._was_read(len(local_block_ids) * self._wire.memory.block_bytes, seconds)
        self._size.took(len(local_block_ids), seconds)

    def _take_in(self, block_ids: tuple[int, ...], unverified: frozenset[int]) -> tuple[bytes, ...]:
        """Off the event loop, unless it is short. A block whose digest is wrong is read again, or dropped with all."""
        if self._is_destroyed:  # an executor that could not start its thread may run this long after it refused it
            raise TransportError("the channel was destroyed")
        wanted = [block_id for block_id in block_ids if block_id not in unverified]
        digests = dict(zip(wanted, digest_blocks(self._wire.memory, wanted, self._digests), strict=True))
        self._wire.decode(block_ids)
        return tuple(digests.get(block_id, b"") for block_id in block_ids)
