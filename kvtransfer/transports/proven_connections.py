"""Connections between members: each begins with the proofs of `cluster/auth/connections.py`, before anything else.

An exporter closes a connection that does not prove itself in time, counts it by reason, and records it in the audit
log, without any byte that the peer sent but its name.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from cluster.accounts.audit import Audit
from cluster.auth.connections import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    MAGIC_BYTES,
    PROOF_BYTES,
    AcceptingConnection,
    GrantedRequest,
    GrantingConnection,
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
_NAME_SHOWN = 100  # characters of a name that a peer announced, in an error
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
_REFUSED = "KV connection"  # in the audit log

# Makes the TLS handshake on a socket that is connected to a host, and verifies the certificate there. Raises OSError.
ClientHandshake: TypeAlias = Callable[[socket.socket, str], ssl.SSLSocket]


class NotProven(ConnectionError):
    """The peer of a connection has not proved that it is the right member of the cluster."""


class ConnectionProofs:
    """The proofs of one member. Any thread may call it."""

    def __init__(self, keys: ClusterKeys, member: MemberId, telemetry: Telemetry, audit: Audit | None = None) -> None:
        """`audit`: None for one that writes to the process's log."""
        self._keys, self._member, self._telemetry = keys, str(member), telemetry
        self._audit = audit or Audit()

    def accept(self, connection: socket.socket, transport: str) -> None:
        """Prove both sides as the exporter, on a blocking socket. Raises NotProven, OSError."""
        accepting = AcceptingConnection(self._keys, transport=transport, exporter=self._member)
        with self._recorded(transport, connection, accepting, origin=_peer(connection)):
            magic = _whole(receive(connection, MAGIC_BYTES))
            rest = _whole(receive(connection, HELLO_BYTES - MAGIC_BYTES)) if is_magic(magic) else b""
            connection.sendall(accepting.challenge(magic + rest))
            accepting.verify(_whole(receive(connection, PROOF_BYTES)))

    async def answer_on_loop(
        self,
        connection: socket.socket,
        transport: str,
        content_bytes: int,
        grant_of: Callable[[bytes], bytes | None],
    ) -> tuple[bytes, bytes]:
        """Read a request under a grant as the exporter, on a socket that does not block. Return its content, of
        `content_bytes` bytes, and the proof with which the answer begins. `grant_of`: as in GrantingConnection. Raises
        NotProven, OSError."""
        granting = GrantingConnection(self._keys, transport=transport, exporter=self._member)
        with self._recorded(transport, connection, granting):
            magic = await receive_on_loop(connection, MAGIC_BYTES)
            num_left = HELLO_BYTES + content_bytes + PROOF_BYTES - MAGIC_BYTES
            rest = await receive_on_loop(connection, num_left) if is_magic(magic) else b""
            return granting.answer(magic + rest, grant_of)

    def open(self, connection: socket.socket, transport: str, exporter: MemberId) -> None:
        """Prove both sides as the importer, on a blocking socket. Raises NotProven, OSError."""
        opening = self._opening(transport, exporter)
        with self._recorded(transport, connection):
            connection.sendall(opening.hello)
            connection.sendall(opening.prove(_whole(receive(connection, CHALLENGE_BYTES))))

    async def open_on_loop(self, connection: socket.socket, transport: str, exporter: MemberId) -> None:
        """Do what `open` does, on a socket that does not block."""
        opening, loop = self._opening(transport, exporter), asyncio.get_running_loop()
        with self._recorded(transport, connection):
            await loop.sock_sendall(connection, opening.hello)
            proof = opening.prove(await receive_on_loop(connection, CHALLENGE_BYTES))
            await loop.sock_sendall(connection, proof)

    def request(self, transport: str, exporter: MemberId, *, grant: bytes, content: bytes) -> GrantedRequest:
        """Return the request under a grant with which an importer begins a connection."""
        return GrantedRequest(
            self._keys,
            transport=transport,
            importer=self._member,
            exporter=str(exporter),
            grant=grant,
            content=content,
        )

    def verify_answer(self, connection: socket.socket, transport: str, request: GrantedRequest, proof: bytes) -> None:
        """Verify the proof with which an exporter's answer begins. Raises NotProven."""
        with self._recorded(transport, connection):
            request.verify(proof)

    def seal(self, transport: str, content: bytes) -> bytes:
        """Return this exporter's signature of `content`, of SIGNATURE_BYTES bytes."""
        return seal(self._keys, transport=transport, exporter=self._member, content=content)

    def is_sealed(self, signature: bytes, transport: str, exporter: MemberId, content: bytes) -> bool:
        """Return whether the exporter made this signature. A wrong one is counted."""
        if is_sealed(self._keys, signature, transport=transport, exporter=str(exporter), content=content):
            return True
        detail = f"{exporter} has not signed its endpoint"
        self._record(transport, Refusal.WRONG_PROOF, detail, origin="", claims=str(exporter))
        return False

    def _opening(self, transport: str, exporter: MemberId) -> OpeningConnection:
        return OpeningConnection(self._keys, transport=transport, importer=self._member, exporter=str(exporter))

    @contextlib.contextmanager
    def _recorded(
        self,
        transport: str,
        connection: socket.socket,
        accepting: AcceptingConnection | GrantingConnection | None = None,
        *,
        origin: str = "",
    ) -> Iterator[None]:
        """Record each refusal. `accepting`: None at an importer. An exporter also records a peer that ends, or is too
        slow, before its proof; an importer does not, since an exporter that ends is no refusal. `origin`: the address
        of a TCP peer, which it no longer has once it has left; otherwise it is read when it is needed."""
        try:
            yield
        except MemberRefused as refusal:
            claims = accepting.importer if accepting is not None else ""
            origin = origin or _peer(connection)
            self._record(transport, refusal.refusal, refusal.message, origin=origin, claims=claims)
            raise NotProven(refusal.message) from refusal
        except (OSError, asyncio.CancelledError) as error:
            if accepting is not None:
                detail, origin = f"it sent no proof: {error or type(error).__name__}", origin or _peer(connection)
                self._record(transport, Refusal.NO_PROOF, detail, origin=origin, claims=accepting.importer)
            raise

    def _record(self, transport: str, reason: str, detail: str, *, origin: str, claims: str) -> None:
        """`claims`: the name under which the peer came, which it has not proved; empty if it gave none."""
        self._telemetry.count("tandem_refused_kv_connections_total", transport=transport, reason=reason)
        self._audit.record_refusal(
            what=_REFUSED, origin=origin, why=reason, transport=transport, claims=claims, detail=detail
        )


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
    try:
        found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label of the name is empty or too long
        raise OSError(f"{address[0][:_NAME_SHOWN]!r} is not the name of a host: {error}") from error
    family, kind, protocol, _, resolved = found[0]
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


def _peer(connection: socket.socket) -> str:
    """Return the peer's address, as gRPC writes one, or its process and user on this machine."""
    try:
        if connection.family == socket.AF_UNIX:
            packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return "unix:pid={},uid={},gid={}".format(*_CREDENTIALS.unpack(packed))
        host, port, *_ = connection.getpeername()
    except OSError:
        return ""
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _whole(message: bytes | None) -> bytes:
    if message is None:
        raise ConnectionResetError("the peer ended the connection")
    return message
