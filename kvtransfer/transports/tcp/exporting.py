"""The exporter's side of `tcp`: one thread per connection answers read requests straight from the pool.

Messages have fixed binary fields: `ANNOUNCEMENT` from the importer, `ANSWER` from the exporter.
"""

import hmac
import secrets
import socket
import ssl
import struct

from cluster.messages import Epoch
from kvtransfer.memory import HostMemory, PoolMemory
from kvtransfer.transports.base import TlsContext, TransportError
from kvtransfer.transports.proven_connections import MAX_UNPROVEN, PROVE_S, ConnectionProofs
from kvtransfer.transports.sockets import ConnectionLimits, ConnectionThreads, receive, send, tune

TOKEN_BYTES = 16

# magic, ticket id, attempt, number of the read, token, number of blocks; then the block ids, 4 bytes each.
ANNOUNCEMENT = struct.Struct(f"<4s16sII{TOKEN_BYTES}sI")
# magic, ticket id, attempt, number of the read, refused or not, number of bytes; then the bytes.
ANSWER = struct.Struct("<4s16sII?Q")
MAGIC = b"TKV1"
_ENDPOINT = struct.Struct(f"<{TOKEN_BYTES}sH")  # token, port; then the host's name
_LIMITS = ConnectionLimits(max_connections=512, max_unproven=MAX_UNPROVEN, prove_s=PROVE_S)


def pack_endpoint(token: bytes, host: str, port: int) -> bytes:
    return _ENDPOINT.pack(token, port) + host.encode()


def parse_endpoint(endpoint: bytes) -> tuple[tuple[str, int], bytes]:
    """Return address and token. Raises TransportError."""
    try:
        token, port = _ENDPOINT.unpack_from(endpoint)
        return (endpoint[_ENDPOINT.size :].decode(), port), token
    except (struct.error, UnicodeDecodeError) as error:
        raise TransportError("the endpoint is damaged or belongs to another transport") from error


class TcpExporter:
    """Answers announced reads of admitted epochs. Owns its connections, each with a thread."""

    def __init__(
        self,
        *,
        memory: PoolMemory,
        proofs: ConnectionProofs,
        host: str,
        advertise_host: str,
        send_timeout_s: float,
        tls: TlsContext | None = None,
    ) -> None:
        self._memory = HostMemory(memory)
        self._num_blocks, self._block_bytes = memory.num_blocks, memory.block_bytes
        self._host, self._advertise_host, self._send_timeout_s = host, advertise_host, send_timeout_s
        self._proofs, self._tls = proofs, tls
        self._tokens: dict[tuple[bytes, int], bytes] = {}  # by (ticket id, attempt)
        self._threads = ConnectionThreads(
            "kv-tcp", prove=self._prove, serve=self._serve, wrap=self._wrapped, limits=_LIMITS
        )

    @property
    def name(self) -> str:
        return "tcp"

    async def start(self) -> None:
        """Start to listen. Raises OSError if the host cannot be bound to."""
        self._threads.start(self._host)

    def reachable(self, importer_endpoint: bytes) -> bool:
        return True

    def grant(self, epoch: Epoch) -> bytes:
        token = self._tokens.setdefault((epoch.ticket_id, epoch.attempt), secrets.token_bytes(TOKEN_BYTES))
        return pack_endpoint(token, self._advertise_host, self._threads.port)

    def revoke(self, epoch: Epoch) -> None:
        self._tokens.pop((epoch.ticket_id, epoch.attempt), None)

    async def close(self) -> None:
        await self._threads.stop_accepting()
        await self._threads.end_connections()

    def _wrapped(self, connection: socket.socket) -> socket.socket:
        """Wrap the socket in TLS. The handshake happens later, on the connection's own thread."""
        if self._tls is None:
            return connection
        return self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _prove(self, connection: socket.socket) -> None:
        """Prove both ends to each other. `prove_s` bounds it. Raises OSError."""
        tune(connection)
        if isinstance(connection, ssl.SSLSocket):
            connection.do_handshake()
        self._proofs.accept(connection, self.name)

    def _serve(self, connection: socket.socket) -> None:
        """Answer reads until the importer ends the connection.

        Raises OSError if the importer is gone or does not read; the importer's own timeout ends its read."""
        announcement = receive(connection, ANNOUNCEMENT.size)  # at any time; keepalive finds dead hosts
        while announcement is not None and self._answer(connection, announcement):
            announcement = receive(connection, ANNOUNCEMENT.size)

    def _answer(self, connection: socket.socket, announcement: bytes) -> bool:
        """Answer one read. Return False if the connection must be closed: it ended, or its reader is not admitted."""
        magic, ticket_id, attempt, number, token, num_blocks = ANNOUNCEMENT.unpack(announcement)
        admitted = hmac.compare_digest(self._tokens.get((ticket_id, attempt), b""), token)
        if magic != MAGIC or not admitted or num_blocks > self._num_blocks:
            connection.sendall(ANSWER.pack(MAGIC, ticket_id, attempt, number, True, 0))
            return False
        packed = receive(connection, 4 * num_blocks) if num_blocks else b""
        if packed is None:
            return False
        block_ids = struct.unpack(f"<{num_blocks}I", packed)
        if max(block_ids, default=0) >= self._num_blocks:
            connection.sendall(ANSWER.pack(MAGIC, ticket_id, attempt, number, True, 0))
            return False
        num_bytes = num_blocks * self._block_bytes
        answer = ANSWER.pack(MAGIC, ticket_id, attempt, number, False, num_bytes)
        send(connection, [memoryview(answer), *self._memory.outgoing(block_ids).views()], self._send_timeout_s)
        return True
