"""The transport `nixl`: one-sided reads over UCX, for RDMA, of pools in GPU or host memory.

The network reads the exporter's pool and writes the importer's, without either processor if the hardware can. Tandem's
threads make its progress and hold its deadlines. A destination is proven quiet by the completion of the read or the
destruction of the agent that made it. No metadata is pickled.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError, TransportSetup
from kvtransfer.transports.nixl.agent import Region, why_not_loadable
from kvtransfer.transports.nixl.exporting import MAGIC, NixlEndpoint, NixlExporter
from kvtransfer.transports.nixl.exporting import NAME as NAME
from kvtransfer.transports.nixl.link import NixlLink
from kvtransfer.transports.proven_connections import ConnectionProofs

_RDMA_DEVICES = Path("/sys/class/infiniband")
_MAX_IDLE_LINKS = 16
_GRACE_S = 1.0


def unavailable(setup: TransportSetup) -> str:
    return why_not_loadable()


def not_worth_it(setup: TransportSetup) -> str:
    """Return why the transport is used only if --kv-transports names it."""
    if setup.server_tls is not None:
        return "the cluster uses TLS and UCX does not encrypt"
    if not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
        return "no RDMA device here"
    return ""


def exporter(setup: TransportSetup) -> NixlExporter:
    return NixlExporter(memory=setup.memory, proofs=setup.proofs, linger_s=setup.timeout_s)


def importer(setup: TransportSetup) -> "NixlImporter":
    return NixlImporter(memory=setup.memory, proofs=setup.proofs, timeout_s=setup.timeout_s)


class _Peer:
    """A link, the member that it leads to, and the number of hand-offs that use it."""

    def __init__(self, member_id: str, link: NixlLink) -> None:
        self.member_id, self.link = member_id, link
        self.num_users = 0


class NixlImporter:
    """Owns one link per exporter process.

    An unused link is kept for the next hand-off. Past a bound the one unused for longest ends, and the link to a member
    that has restarted ends too."""

    def __init__(self, *, memory: PoolMemory, proofs: ConnectionProofs, timeout_s: float) -> None:
        self._proofs = proofs
        self._pool, self._timeout_s = Region.of(memory.raw), timeout_s
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()  # by the exporter's metadata; longest unused first
        self._ending: set[asyncio.Task[None]] = set()
        self._channels: set[NixlChannel] = set()

    @property
    def name(self) -> str:
        return NAME

    @property
    def num_links(self) -> int:
        """Return the number of this importer's agents, including those being destroyed."""
        return len(self._peers) + len(self._ending)

    def endpoint(self) -> bytes:
        return MAGIC

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> "NixlChannel":
        there = NixlEndpoint.parse(exporter_endpoint, self._proofs, epoch)
        if there.pool.row_bytes != self._pool.row_bytes:
            raise TransportError(
                f"the exporter's blocks have {there.pool.row_bytes} bytes, and the blocks here have "
                f"{self._pool.row_bytes}"
            )
        peer = self._peer(epoch.exporter.id, there)
        peer.num_users += 1
        try:
            await peer.link.check_admission(there.slot, there.token)
        except BaseException:
            self._end_use(peer)
            raise
        channel = NixlChannel(peer.link, there.pool.num_rows, lambda: self._ended(channel, peer))
        self._channels.add(channel)
        return channel

    async def close(self) -> None:
        for peer in self._peers.values():
            peer.link.close()
        for channel in tuple(self._channels):
            await channel.destroy()
        for peer in self._peers.values():
            self._end(peer)
        self._peers.clear()
        await self.settled()

    async def settled(self) -> None:
        """Wait until the agents of all ended links are destroyed."""
        while self._ending:
            await asyncio.wait(tuple(self._ending))

    def _peer(self, member_id: str, there: NixlEndpoint) -> _Peer:
        peer = self._peers.get(there.metadata)
        if peer is None or not peer.link.is_open:
            if peer is not None:
                self._end(peer)
            peer = _Peer(member_id, NixlLink(pool=self._pool, there=there, timeout_s=self._timeout_s))
            self._peers[there.metadata] = peer
        self._peers.move_to_end(there.metadata)
        return peer

    def _ended(self, channel: "NixlChannel", peer: _Peer) -> None:
        if channel in self._channels:
            self._channels.discard(channel)
            self._end_use(peer)

    def _end_use(self, peer: _Peer) -> None:
        peer.num_users -= 1
        newest = {known.member_id: key for key, known in self._peers.items()}
        idle = {key: known for key, known in self._peers.items() if known.num_users == 0}
        surplus = len(idle) - _MAX_IDLE_LINKS
        for place, (key, unused) in enumerate(idle.items()):
            if place < surplus or newest[unused.member_id] != key or not unused.link.is_open:
                del self._peers[key]
                self._end(unused)

    def _end(self, peer: _Peer) -> None:
        peer.link.close()
        ending = asyncio.create_task(peer.link.destroyed())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


class NixlChannel:
    """The Channel of `nixl`."""

    def __init__(self, link: NixlLink, num_remote_blocks: int, ended: Callable[[], None]) -> None:
        self._link, self._num_remote_blocks = link, num_remote_blocks
        self._ended = ended
        self._open = True
        self._read: Future[None] | None = None  # in flight, or ended by anything but success

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        assert len(remote_block_ids) == len(local_block_ids)
        if not self._open or self._read is not None:
            raise TransportError("the channel is closed or poisoned")
        if not remote_block_ids:
            return
        if max(remote_block_ids) >= self._num_remote_blocks:
            raise TransportError(f"the read names a block beyond the {self._num_remote_blocks} of the exporter's pool")
        self._read = self._link.read(remote_block_ids, local_block_ids)
        if not self._read.done():
            await asyncio.wrap_future(self._read)
        self._read.result()
        self._read = None

    async def destroy(self) -> None:
        """Destroy the channel.

        A read in flight gets a short time to complete, which proves that nothing is written any more and spares other
        hand-offs on the link. Otherwise the agent is destroyed. It never returns if the library does not release the
        agent.
        """
        self._open = False
        read = self._read
        if read is not None:
            if not await _ended_within(read, _GRACE_S):
                self._link.close()
            await _ended_within(read, None)
        self._ended()

    async def finish(self) -> None:
        await self.destroy()


async def _ended_within(read: "Future[None]", timeout_s: float | None) -> bool:
    """Wait for a read, with a timeout. Return whether it ended, successfully or not."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    read.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    return read.done()
