"""The seam between hand-offs and the ways bytes travel.

An exporter-side transport opens its memory to one epoch at a time and needs no further help. An importer-side
transport opens a channel, which belongs to one hand-off until it is released or destroyed.
"""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cluster.messages import Epoch, MemberId
from cluster.settings.transfer_settings import READ_STALL_TIMEOUT_S
from kvtransfer.memory import PoolMemory


class TransportError(Exception):
    """A read did not complete. Whether its destination is quiet is another question: see Channel."""


@dataclass(frozen=True, slots=True)
class TransportMeans:
    """What a process gives to each of its transports."""

    member: MemberId
    memory: PoolMemory  # what is served and filled: the pool, or the wire's copy of it
    host: str  # to bind to
    advertise_host: str  # what importers are told
    timeout_s: float  # for one message or read of a peer
    stall_timeout_s: float = READ_STALL_TIMEOUT_S  # for one more byte of a read in progress
    server_tls: ssl.SSLContext | None = None  # set when the cluster uses TLS
    client_tls: ssl.SSLContext | None = None


class ExporterTransport(Protocol):
    """Lets importers read the pool. Never writes to it."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None: ...

    def reachable(self, importer_endpoint: bytes) -> bool:
        """Can an importer that said this about itself read here?"""
        ...

    def admit(self, epoch: Epoch) -> bytes:
        """Opens the pool to this epoch; the answer is what its importer needs to come in (Accepted.endpoint)."""
        ...

    def revoke(self, epoch: Epoch) -> None:
        """This epoch starts no further reads. Unknown ones are ignored."""
        ...

    async def close(self) -> None: ...


class Channel(Protocol):
    """One hand-off's way to one exporter's memory. At most one read at a time.

    A read that was cancelled or failed leaves the channel poisoned: only `destroy` may follow.
    """

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        """Copies blocks into the local pool. When it returns they are visible to the device and nothing more will be
        written. Raises TransportError."""
        ...

    async def destroy(self) -> None:
        """When it returns, no read of this channel can write to the local pool any more: the proof of quiet. Safe to
        call twice, and to call again when an earlier call was cancelled."""
        ...

    async def release(self) -> None:
        """The hand-off is done with it, no read is in flight: it may serve the next one."""
        ...


class ImporterTransport(Protocol):
    @property
    def name(self) -> str: ...

    def endpoint(self) -> bytes:
        """What the exporter should know about this side (Attach.endpoints)."""
        ...

    async def open(self, epoch: Epoch, exporter_endpoint: bytes) -> Channel:
        """Raises TransportError."""
        ...

    async def close(self) -> None:
        """Destroys every channel."""
        ...


Offered = TypeVar("Offered", bound=ExporterTransport)


def negotiate(
    wanted: Sequence[str], importer_endpoints: Mapping[str, bytes], offered: Sequence[Offered]
) -> tuple[Offered, ...]:
    """Those of the importer's that this exporter offers and that reach from there to here, in the importer's order."""
    by_name = {transport.name: transport for transport in offered}
    return tuple(
        transport
        for name in dict.fromkeys(wanted)
        if (transport := by_name.get(name)) is not None and transport.reachable(importer_endpoints.get(name, b""))
    )
