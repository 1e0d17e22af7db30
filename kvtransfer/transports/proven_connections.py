"""Connections between members: each begins with the proofs of `cluster/auth/connections.py`, before anything else.

An exporter closes a connection that does not prove itself in time, counts it by reason, and logs one line per second at
most, without any byte that the peer sent but its name.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from cluster.auth.connections import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    MAGIC_BYTES,
    PROOF_BYTES,
    AcceptingConnection,
    OpeningConnection,
    is_magic,
    is_sealed,
    seal,
)
from cluster.auth.keys import ClusterKeys
from cluster.auth.sessions import Refusal
from cluster.errors import MemberRefused
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from kvtransfer.transports.sockets import receive, receive_on_loop, tune

PROVE_S = 5.0  # from the first byte of a connection to the end of its proofs
MAX_UNPROVEN = 64  # connections per transport; one more ends the oldest of them
_CONNECT_TIMEOUT_S = 5.0
_LOG_EVERY_S = 1.0
_LOG = logging.getLogger(__name__)

# Makes the TLS handshake on a socket that is connected to a host, and verifies the certificate there. Raises OSError.
ClientHandshake: TypeAlias = Callable[[socket.socket, str], ssl.SSLSocket]


class NotProven(ConnectionError):
    """The peer of a connection has not proved that it is the right member of the cluster."""


class ConnectionProofs:
    """The proofs of one member. Any thread may call it."""

    def __init__(self, keys: ClusterKeys, member: MemberId, telemetry: Telemetry) -> None:
        self._keys, self._member, self._telemetry = keys, str(member), telemetry
        self._lock = threading.Lock()  # over the two below
        self._log_again_s = 0.0
        self._num_unlogged = 0

    def accept(self, connection: socket.socket, transport: str) -> None:
        """Prove both sides as the exporter, on a blocking socket. Raises NotProven, OSError."""
        accepting = AcceptingConnection(self._keys, transport=transport, exporter=self._member)
        with self._recorded(transport):
            magic = _whole(receive(connection, MAGIC_BYTES))
            rest = _whole(receive(connection, HELLO_BYTES - MAGIC_BYTES)) if is_magic(magic) else b""
            connection.sendall(accepting.challenge(magic + rest))
            accepting.verify(_whole(receive(connection, PROOF_BYTES)))

    async def accept_on_loop(self, connection: socket.socket, transport: str) -> None:
        """Do what `accept` does, on a socket that does not block."""
        accepting = AcceptingConnection(self._keys, transport=transport, exporter=self._member)
        loop = asyncio.get_running_loop()
        with self._recorded(transport):
            magic = await receive_on_loop(connection, MAGIC_BYTES)
            rest = await receive_on_loop(connection, HELLO_BYTES - MAGIC_BYTES) if is_magic(magic) else b""
            await loop.sock_sendall(connection, accepting.challenge(magic + rest))
            accepting.verify(await receive_on_loop(connection, PROOF_BYTES))

    def open(self, connection: socket.socket, transport: str, exporter: MemberId) -> None:
        """Prove both sides as the importer, on a blocking socket. Raises NotProven, OSError."""
        opening = self._opening(transport, exporter)
        with self._recorded(transport, is_exporter=False):
            connection.sendall(opening.hello)
            connection.sendall(opening.prove(_whole(receive(connection, CHALLENGE_BYTES))))

    async def open_on_loop(self, connection: socket.socket, transport: str, exporter: MemberId) -> None:
        """Do what `open` does, on a socket that does not block."""
        opening, loop = self._opening(transport, exporter), asyncio.get_running_loop()
        with self._recorded(transport, is_exporter=False):
            await loop.sock_sendall(connection, opening.hello)
            proof = opening.prove(await receive_on_loop(connection, CHALLENGE_BYTES))
            await loop.sock_sendall(connection, proof)

    def seal(self, transport: str, content: bytes) -> bytes:
        """Return this exporter's signature of `content`, of SIGNATURE_BYTES bytes."""
        return seal(self._keys, transport=transport, exporter=self._member, content=content)

    def is_sealed(self, signature: bytes, transport: str, exporter: MemberId, content: bytes) -> bool:
        """Return whether the exporter made this signature. A wrong one is counted."""
        if is_sealed(self._keys, signature, transport=transport, exporter=str(exporter), content=content):
            return True
        self._record(transport, Refusal.WRONG_PROOF, f"{exporter} has not signed its endpoint")
        return False

    def _opening(self, transport: str, exporter: MemberId) -> OpeningConnection:
        return OpeningConnection(self._keys, transport=transport, importer=self._member, exporter=str(exporter))

    @contextlib.contextmanager
    def _recorded(self, transport: str, *, is_exporter: bool = True) -> Iterator[None]:
        """Count each refusal. An exporter also counts a peer that ends, or is too slow, before its proof; an importer
        does not, since an exporter that ends is no refusal."""
        try:
            yield
        except MemberRefused as refusal:
            self._record(transport, refusal.refusal, refusal.message)
            raise NotProven(refusal.message) from refusal
        except (OSError, asyncio.CancelledError) as error:
            if is_exporter:
                self._record(transport, Refusal.NO_PROOF, f"it sent no proof: {error or type(error).__name__}")
            raise

    def _record(self, transport: str, reason: str, detail: str) -> None:
        self._telemetry.count("tandem_refused_kv_connections_total", transport=transport, reason=reason)
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._log_again_s:
                self._num_unlogged += 1
                return
            num_unlogged, self._num_unlogged, self._log_again_s = self._num_unlogged, 0, now_s + _LOG_EVERY_S
        fields = {"transport": transport, "refusal": reason, "not_logged_before": num_unlogged}
        _LOG.warning("refused the peer of a KV connection: %s", detail, extra=fields)


@dataclass(frozen=True, slots=True)
class Opening:
    """The exporter to which a connection must lead, and the proofs of this member."""

    proofs: ConnectionProofs
    transport: str
    exporter: MemberId


async def connect(address: tuple[str, int], opening: Opening, tls: ClientHandshake | None = None) -> socket.socket:
    """Return a connected, blocking TCP socket whose both ends are proved, with TLS if its handshake is given.

    Raises OSError (ssl.SSLError and NotProven are)."""
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, resolved = (await loop.getaddrinfo(*address, type=socket.SOCK_STREAM))[0]
    connection = socket.socket(family, kind, protocol)
    proofs, transport, exporter = opening.proofs, opening.transport, opening.exporter
    try:
        connection.setblocking(False)
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, resolved)
            tune(connection)
            if tls is None:
                await proofs.open_on_loop(connection, transport, exporter)
        connection.settimeout(_CONNECT_TIMEOUT_S)
        if tls is not None:
            connection = await asyncio.to_thread(tls, connection, address[0])
            await asyncio.to_thread(proofs.open, connection, transport, exporter)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _whole(message: bytes | None) -> bytes:
    if message is None:
        raise ConnectionResetError("the peer ended the connection")
    return message
