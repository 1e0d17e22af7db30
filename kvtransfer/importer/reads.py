"""The reads of one hand-off: the choice of the transport, and reading and verifying blocks piece by piece.

While the transport reads the next piece, a helper thread computes the digests of the last one and decodes it into the
pool. A transport that digests while it copies leaves nothing to do for native KV. A read has ended only when neither
the transport nor the helper thread works on it any more.
"""

import asyncio
import logging
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from cluster.clock import Clock
from cluster.errors import HandOffFailed, TandemError
from cluster.messages import Epoch
from kvtransfer.counters import TransferCounters
from kvtransfer.digests import PUBLIC, digest_blocks
from kvtransfer.importer.links import LinkTable
from kvtransfer.protocol.import_state import FallBackReason
from kvtransfer.thread_work import submit
from kvtransfer.transports.base import Channel, DigestingChannel, ImporterTransport, TransportError
from kvtransfer.wire.wire_format import WireFormat

_LOG = logging.getLogger(__name__)
PIECE_BYTES = 4 << 20  # long enough to hide a round trip; measured best with shm and tcp
DIGESTED_PIECE_BYTES = 32 << 20  # of a channel that digests: nothing is left to do while the next piece is read
GPU_PIECE_BYTES = 512 << 20  # at most, into GPU memory: its digests need 4 MiB there
_PIECE_S = 0.004  # requesting a piece and waiting for it takes a thirtieth of that


class TransportChoice:
    def __init__(
        self,
        *,
        epoch: Epoch,
        transports: Mapping[str, ImporterTransport],  # best first
        links: LinkTable,
        clock: Clock,
        counters: TransferCounters,
    ) -> None:
        self._epoch, self._transports = epoch, transports
        self._links, self._clock, self._counters = links, clock, counters
        self._accepted: list[tuple[str, bytes]] = []  # (transport, the exporter's endpoint), the present one first

    def offered(self) -> dict[str, bytes]:
        """Return endpoints by transport, best first, without those in backoff for this exporter; all if all are in
        backoff."""
        now_s = self._clock.now_s()
        usable = [name for name in self._transports if self._links.is_usable(self._epoch.exporter, name, now_s)]
        return {name: self._transports[name].endpoint() for name in usable or self._transports}

    def accept(self, accepted: Sequence[tuple[str, bytes]]) -> int:
        """Record the transports that the exporter accepted, best first; later calls change nothing. Return the number
        of alternatives."""
        if not self._accepted:
            self._accepted = [*accepted[:1], *(way for way in accepted[1:] if way[0] in self._transports)]
        return len(self._accepted) - 1

    @property
    def transport(self) -> str:
        """Return the name of the transport in use; empty before the exporter accepted."""
        return self._accepted[0][0] if self._accepted else ""

    async def open_channel(self) -> Channel:
        """Open a channel by the current transport. Raises TransportError, OSError, RuntimeError."""
        name, endpoint = self._accepted[0]
        transport = self._transports.get(name)
        if transport is None:
            raise TransportError(f"the exporter chose {name!r}, which was not offered")
        try:
            return await transport.open_channel(self._epoch, endpoint)
        except (ValueError, OverflowError, struct.error) as error:  # the text is not an address, path or number
            raise TransportError(f"{name} cannot use the endpoint: {error}") from error

    def record_read(self, num_bytes: int, seconds: float) -> None:
        self._links.record_read(self._epoch.exporter, self.transport, num_bytes, seconds, self._clock.now_s())
        self._counters.read(transport=self.transport, seconds=seconds)

    def record_moved(self, num_bytes: int, exposed_s: float, total_s: float) -> None:
        """Record a whole hand-off; `exposed_s`: the part after the end of the prefill."""
        self._counters.moved(transport=self.transport, num_bytes=num_bytes, exposed_s=exposed_s, total_s=total_s)

    def record_hand_off(self, num_bytes: int, exposed_s: float) -> None:
        """Record the part of a hand-off that followed the prefill."""
        self._links.record_hand_off(self._epoch.exporter, self.transport, num_bytes, exposed_s)

    def record_failure(self) -> None:
        """Record that the current transport could not be opened or failed."""
        self._links.record_failure(self._epoch.exporter, self.transport, self._clock.now_s())

    def switch_to_next(self, reason: FallBackReason, detail: str) -> None:
        """Switch to the next accepted transport."""
        broken, _ = self._accepted.pop(0)
        self._counters.fallback(broken=broken, taken=self.transport, reason=reason)
        _LOG.warning(
            "KV of %s is read by %s, because %s failed: %s %s",
            self._epoch.exporter,
            self.transport,
            broken,
            reason,
            detail,
        )


class PieceSize:
    """The number of blocks of the next piece.

    A host digests about as fast as it reads, so its pieces are short and both happen at once. A GPU gains nothing by
    that: it digests many times as fast as blocks arrive. There the first piece shows how fast the link is, and later
    ones are sized to take 4 ms each."""

    def __init__(self, block_bytes: int, most_bytes: int) -> None:
        self.num_blocks = self._least = max(1, PIECE_BYTES // block_bytes)
        self._most = max(self._least, most_bytes // block_bytes)

    def record(self, num_blocks: int, seconds: float) -> None:
        """Record the time of a piece. The last piece of a read, which is cut short, does not count."""
        if num_blocks == self.num_blocks:
            in_time = int(num_blocks * _PIECE_S / max(seconds, 1e-6))
            self.num_blocks = min(max(in_time, self._least), self._most)


class BlockReader:
    """Reads and verifies blocks over one channel. At most one read at a time."""

    def __init__(
        self,
        channel: Channel,
        wire: WireFormat,
        verifier: ThreadPoolExecutor,
        was_read: Callable[[int, float], None],  # bytes, and the seconds that the channel alone took
        seed: bytes = PUBLIC,  # of the digests' coefficients
    ) -> None:
        self._channel, self._wire, self._verifier, self._seed = channel, wire, verifier, seed
        self._was_read = was_read
        most_bytes = GPU_PIECE_BYTES if wire.memory.raw.is_cuda else PIECE_BYTES
        self._size = PieceSize(wire.memory.block_bytes, most_bytes)
        self._verifying: list[asyncio.Future[tuple[bytes, ...]]] = []
        self._is_destroyed = False

    async def read(
        self,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        unverified: frozenset[int] = frozenset(),  # local blocks whose digests are not computed
    ) -> tuple[bytes, ...]:
        """Read blocks and return the digests of the local copies in order, empty for blocks in `unverified`.

        Raises TransportError, OSError, RuntimeError; after that only `destroy` may be called."""
        if not unverified and self._wire.is_pool and isinstance(self._channel, DigestingChannel):
            return await self._read_digested(self._channel, remote_block_ids, local_block_ids)
        if len(local_block_ids) * self._wire.memory.block_bytes <= self._wire.short_bytes:
            await self._read_piece(remote_block_ids, local_block_ids)
            return self._verify_and_decode(tuple(local_block_ids), unverified)
        start = 0
        while start < len(remote_block_ids):
            piece = slice(start, start + self._size.num_blocks)
            start = piece.stop
            await self._read_piece(remote_block_ids[piece], local_block_ids[piece])
            verifying = submit(self._verifier, self._verify_and_decode, tuple(local_block_ids[piece]), unverified)
            self._verifying.append(asyncio.wrap_future(verifying))
        await asyncio.wait(self._verifying)
        verified, self._verifying = self._verifying, []
        return tuple(chain.from_iterable(piece.result() for piece in verified))

    async def destroy(self) -> None:
        """Destroy the channel. When it returns, nothing of any read can write to the pool any more."""
        self._is_destroyed = True
        await self._channel.destroy()
        if self._verifying:
            await asyncio.wait(self._verifying)

    async def finish(self) -> None:
        await self._channel.finish()

    async def _read_digested(
        self, channel: DigestingChannel, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]
    ) -> tuple[bytes, ...]:
        digests: list[bytes] = []
        piece_bytes = GPU_PIECE_BYTES if self._wire.memory.raw.is_cuda else DIGESTED_PIECE_BYTES
        num_blocks = max(1, piece_bytes // self._wire.memory.block_bytes)
        for start in range(0, len(remote_block_ids), num_blocks):
            piece = slice(start, start + num_blocks)
            began_s = time.perf_counter()
            digests += await channel.read_digested(remote_block_ids[piece], local_block_ids[piece], self._seed)
            self._piece_ended(len(local_block_ids[piece]), began_s)
        return tuple(digests)

    async def _read_piece(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        began_s = time.perf_counter()
        await self._channel.read(remote_block_ids, local_block_ids)
        self._size.record(len(local_block_ids), self._piece_ended(len(local_block_ids), began_s))

    def _piece_ended(self, num_blocks: int, began_s: float) -> float:
        """Record a piece and return its seconds. Raises TransportError if the channel was destroyed meanwhile."""
        if self._is_destroyed:
            raise TransportError("the channel was destroyed")
        seconds = time.perf_counter() - began_s
        self._was_read(num_blocks * self._wire.memory.block_bytes, seconds)
        return seconds

    def _verify_and_decode(self, block_ids: tuple[int, ...], unverified: frozenset[int]) -> tuple[bytes, ...]:
        """Compute digests and decode. A block with a wrong digest is read again later, or dropped with the hand-off."""
        if self._is_destroyed:  # it had to wait for the verifying thread
            raise TransportError("the channel was destroyed")
        wanted = [block_id for block_id in block_ids if block_id not in unverified]
        digests = dict(zip(wanted, digest_blocks(self._wire.memory, wanted, self._seed), strict=True))
        self._wire.decode(block_ids)
        return tuple(digests.get(block_id, b"") for block_id in block_ids)


def message_of(error: Exception) -> str:
    """Return the text about an error of a read for a log or a failed hand-off."""
    if isinstance(error, HandOffFailed):
        return error.detail
    return error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
