"""The exporter's half of `tcp`: a thread per connection answers announced reads, straight from the pool."""

import asyncio
import hmac
import secrets
import socket
import ssl
import struct
import threading

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.host_memory import HostMemory
from kvtransfer.transports.sockets import receive, send, shut_down, tune
from kvtransfer.transports.tcp_messages import ANNOUNCEMENT, ANSWER, MAGIC, TOKEN_BYTES, pack_endpoint

_MAX_CONNECTIONS = 512
_HELLO_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.1  # out of descriptors: accepting again at once would only spin


class TcpExporter:
    """Answers announced reads of admitted epochs. Owns its listening socket, its connections and their threads."""

    def __init__(
        self,
        *,
        memory: PoolMemory,
        host: str,
        advertise_host: str,
        send_timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._memory = HostMemory(memory)
        self._num_blocks, self._block_bytes = memory.num_blocks, memory.block_bytes
        self._host, self._advertise_host, self._send_timeout_s = host, advertise_host, send_timeout_s
        self._tls = tls
        self._tokens: dict[tuple[bytes, int], bytes] = {}  # by (ticket id, attempt)
        self._lock = threading.Lock()  # over the two below
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    @property
    def name(self) -> str:
        return "tcp"

    async def start(self) -> None:
        """Raises OSError when the host cannot be bound to."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family, backlog=128)
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="kv-tcp", daemon=True)
        self._acceptor.start()

    def reachable(self, importer_endpoint: bytes) -> bool:
        return True

    def admit(self, epoch: Epoch) -> bytes:
        assert self._listener is not None, "admit before start"
        token = self._tokens.setdefault((epoch.ticket_id, epoch.attempt), secrets.token_bytes(TOKEN_BYTES))
        port: int = self._listener.getsockname()[1]
        return pack_endpoint(token, self._advertise_host, port)

    def revoke(self, epoch: Epoch) -> None:
        self._tokens.pop((epoch.ticket_id, epoch.attempt), None)

    async def close(self) -> None:
        with self._lock:
            self._closed.set()
            connections = dict(self._connections)
        if self._listener is not None and self._acceptor is not None:
            shut_down(self._listener)
            await asyncio.to_thread(self._acceptor.join)
            self._listener.close()
        for connection in connections:
            shut_down(connection)
        for thread in connections.values():
            await asyncio.to_thread(thread.join)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection = self._accepted(listener)
            except OSError:
                if self._closed.wait(_ACCEPT_PAUSE_S):
                    return
                continue
            with self._lock:
                if self._closed.is_set() or len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="kv-tcp-serve", daemon=True)
                self._connections[connection] = thread
                thread.start()

    def _accepted(self, listener: socket.socket) -> socket.socket:
        """With TLS the handshake is still to come, on the connection's own thread."""
        connection, _ = listener.accept()
        if self._tls is None:
            return connection
        try:
            return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError:
            connection.close()
            raise

    def _serve(self, connection: socket.socket) -> None:
        try:
            tune(connection)
            connection.settimeout(_HELLO_TIMEOUT_S)
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            announcement = receive(connection, ANNOUNCEMENT.size)
            connection.settimeout(None)  # an idle importer may come back at any time; keepalive finds dead hosts
            while announcement is not None and self._answer(connection, announcement):
                announcement = receive(connection, ANNOUNCEMENT.size)
        except OSError:
            pass  # the importer is gone or does not read: its own deadline tells it
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _answer(self, connection: socket.socket, announcement: bytes) -> bool:
        """One read. False when the connection is to be closed: its end, or somebody who may not read here."""
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
