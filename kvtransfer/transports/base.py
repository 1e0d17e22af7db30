"""The interfaces between hand-offs and transports.

On the exporter's side a transport grants epochs access to its memory; reads need no further calls. On the importer's
side it opens a channel, which belongs to one hand-off until it is finished or destroyed.
"""

import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from cluster.messages import Epoch, MemberId
from cluster.settings.worker_settings import READ_STALL_TIMEOUT_S
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.proven_connections import ClientHandshake, ConnectionProofs

# Returns the context of the next handshake: certificates change while a process runs.
TlsContext: TypeAlias = Callable[[], ssl.SSLContext]


class TransportError(Exception):
    """A read did not complete. It may still write to its destination: see Channel."""


@dataclass(frozen=True, slots=True)
class TransportSetup:
    """The parts and settings of a process that its transports use."""

    member: MemberId
    proofs: ConnectionProofs  # of this member
    memory: PoolMemory  # the memory that is served and filled: the pool, or the wire's copy of it
    host: str  # to bind to
    advertise_host: str  # the address that importers receive
    timeout_s: float  # for one message or read of a peer
    stall_timeout_s: float = READ_STALL_TIMEOUT_S  # for one more byte of a read in progress
    server_tls: TlsContext | None = None  # set when the cluster uses TLS
    client_tls: ClientHandshake | None = None


class ExporterTransport(Protocol):
    """Lets importers read the pool. It never writes to the pool."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None: ...

    def reachable(self, importer_endpoint: bytes) -> bool:
        """Return whether an importer with this endpoint can read here."""
        ...

    def grant(self, epoch: Epoch) -> bytes:
        """Grant the epoch access to the pool. Returns the endpoint that its importer needs to open a channel
        (Accepted.endpoint)."""
        ...

    def revoke(self, epoch: Epoch) -> None:
        """Let the epoch start no further reads. Unknown epochs are ignored."""
        ...

    async def close(self) -> None: ...


class Channel(Protocol):
    """One hand-off's connection to one exporter's memory. At most one read at a time.

    A read that was cancelled or failed poisons the channel: only `destroy` may follow."""

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        """Copy blocks into the local pool.

        When it returns they are visible to the device and nothing more will be written. Raises TransportError."""
        ...

    async def destroy(self) -> None:
        """Destroy the channel. When it returns, no read of it can write to the local pool any more.

        It is safe to call twice, and again after a cancelled call."""
        ...

    async def finish(self) -> None:
        """Release the channel after its last read completed. It may serve the next hand-off."""
        ...


class DigestingChannel(ABC):
    """A Channel that digests blocks while it copies them, for less than a copy and a digest cost. It is no Protocol,
    because each hand-off asks whether its channel is one."""

    @abstractmethod
    async def read_digested(
        self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int], seed: bytes
    ) -> tuple[bytes, ...]:
        """Do what `read` does, and return the digests of the bytes that were written. `seed`: of the digest's
        coefficients."""


class ImporterTransport(Protocol):
    @property
    def name(self) -> str: ...

    def endpoint(self) -> bytes:
        """Return the endpoint of this side, for the exporter (Attach.endpoints)."""
        ...

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> Channel:
        """Open a channel to an exporter. Raises TransportError."""
        ...

    async def close(self) -> None:
        """Destroy every channel."""
        ...


Offered = TypeVar("Offered", bound=ExporterTransport)


def negotiate(
    wanted: Sequence[str], importer_endpoints: Mapping[str, bytes], offered: Sequence[Offered]
) -> tuple[Offered, ...]:
    """Return the offered transports that the importer wants and can reach, in the importer's order."""
    by_name = {transport.name: transport for transport in offered}
    return tuple(
        transport
        for name in dict.fromkeys(wanted)
        if (transport := by_name.get(name)) is not None and transport.reachable(importer_endpoints.get(name, b""))
    )
