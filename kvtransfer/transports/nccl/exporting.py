"""The exporter's side of `nccl`: rank 0 of every link.

It owns its listening socket and one thread per importer, which makes all calls into the library for that link. A call
that hangs blocks only its own thread.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nccl import messages
from kvtransfer.transports.nccl.communicator_life import CommunicatorLife, CommunicatorLimits
from kvtransfer.transports.nccl.library import EXPORTER_RANK, NcclFailed, NcclLibrary, Piece
from kvtransfer.transports.nccl.link import NcclLink, error_text
from kvtransfer.transports.proven_connections import MAX_UNPROVEN, PROVE_S, ConnectionProofs
from kvtransfer.transports.sockets import ConnectionLimits, ConnectionThreads, tune

NAME = "nccl"

_LOG = logging.getLogger(__name__)

ENDPOINT = struct.Struct(f"<{messages.TOKEN_BYTES}sH")  # token, port; then the host's name
# Id of one start of one importer, NCCL's version; then the GPU.
IMPORTER = struct.Struct(f"<{messages.IDENTITY_BYTES}sI")

_CONNECTIONS = ConnectionLimits(max_connections=128, max_unproven=MAX_UNPROVEN, prove_s=PROVE_S)
_MAX_LIVES = 1024  # links whose history is kept


@dataclass
class _PeerLink:
    """The exporter's records of one importer process."""

    life: CommunicatorLife
    link: NcclLink | None = None


class NcclExporter:
    """Sends the runs of blocks that importers of admitted epochs request, in the order of their requests."""

    def __init__(
        self,
        *,
        memory: PoolMemory,
        proofs: ConnectionProofs,
        library: NcclLibrary,
        host: str,
        advertise_host: str,
        limits: CommunicatorLimits,
    ) -> None:
        self._proofs = proofs
        self._raw = memory.raw  # keeps the memory alive as long as a thread may read it
        self._num_blocks, self._block_bytes = memory.num_blocks, memory.block_bytes
        self._library, self._limits = library, limits
        self._host, self._advertise_host = host, advertise_host
        self._tokens: dict[tuple[bytes, int], bytes] = {}  # by (ticket id, attempt)
        self._slot = threading.Lock()
        self._lock = threading.Lock()  # over _peers
        self._peers: OrderedDict[bytes, _PeerLink] = OrderedDict()  # by importer, the longest unused first
        self._threads = ConnectionThreads("kv-nccl", prove=self._prove, serve=self._serve, limits=_CONNECTIONS)

    @property
    def name(self) -> str:
        return NAME

    async def start(self) -> None:
        """Start to listen. Raises OSError if the host cannot be bound to."""
        self._threads.start(self._host)

    def reachable(self, importer_endpoint: bytes) -> bool:
        """Return whether both sides have one version of NCCL and two GPUs, and the link is not in backoff."""
        if len(importer_endpoint) < IMPORTER.size:
            return False
        importer, version = IMPORTER.unpack_from(importer_endpoint)
        try:
            device = self._library.device()
            if version != self._library.version() or (device and device == importer_endpoint[IMPORTER.size :]):
                return False
        except NcclFailed:
            return False
        with self._lock:
            peer = self._peers.get(importer)
        return peer is None or peer.life.is_promising(time.monotonic())

    def grant(self, epoch: Epoch) -> bytes:
        key = (epoch.ticket_id, epoch.attempt)
        token = self._tokens.setdefault(key, secrets.token_bytes(messages.TOKEN_BYTES))
        return ENDPOINT.pack(token, self._threads.port) + self._advertise_host.encode()

    def revoke(self, epoch: Epoch) -> None:
        self._tokens.pop((epoch.ticket_id, epoch.attempt), None)

    async def close(self) -> None:
        """Close the links. Threads that hang in the library are waited for only up to `abort_s`."""
        await self._threads.stop_accepting()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            if peer.link is not None:
                peer.link.poison("the exporter is closing")
        await self._threads.end_connections(self._limits.abort_s)

    def _prove(self, connection: socket.socket) -> None:
        tune(connection)
        self._proofs.accept(connection, NAME)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(self._limits.agree_s)
        try:
            hello = messages.expect(connection, messages.Hello)
            self._serve_link(hello, connection)
        except TransportError as error:  # the importer violates the protocol
            _LOG.debug("nccl: a connection ended: %s", error)

    def _serve_link(self, hello: messages.Hello, connection: socket.socket) -> None:
        if not self._is_admitted(hello.entry):
            return messages.send(connection, messages.Refused("the exporter has not admitted this epoch"))
        link = self._new_link(hello.importer, connection)
        try:
            self._agree(link, hello)
            while self._answer(link):
                pass
        except messages.Refusal as error:
            link.withdraw()
            with contextlib.suppress(OSError):
                messages.send(connection, messages.Refused(str(error)))
            link.abort("")
        except Exception as error:  # noqa: BLE001  # any error: the communicator may still send from the pool
            link.abort(error_text(error))
        else:
            link.abort("the importer is gone", failed=False)

    def _new_link(self, importer: bytes, connection: socket.socket) -> NcclLink:
        """Make a link that replaces the importer's last one, which the importer has closed."""
        with self._lock:
            peer = self._peers.setdefault(importer, _PeerLink(CommunicatorLife(self._limits)))
            self._peers.move_to_end(importer)
            while len(self._peers) > _MAX_LIVES:
                self._peers.popitem(last=False)
            last, peer.link = peer.link, NcclLink(connection, self._library, peer.life, self._slot)
            link = peer.link
        if last is not None:
            last.poison("the importer made a new connection")
            last.quiet.wait(self._limits.abort_s)
        return link

    def _agree(self, link: NcclLink, hello: messages.Hello) -> None:
        connection = link.connection
        try:
            link.begin()
        except TransportError as error:
            raise messages.Refusal(f"this link is not in use now: {error}") from error
        try:
            version = self._library.version()
            if hello.version != version:
                raise messages.Refusal(f"the exporter has NCCL {version}, and the importer has {hello.version}")
            messages.send(connection, messages.Ready(version))
            messages.expect(connection, messages.Ready)
            link.agreed()
            unique_id = self._library.unique_id()
        except NcclFailed as error:
            raise TransportError(f"NCCL: {error}") from error
        messages.send(connection, messages.UniqueId(unique_id))
        link.connect(unique_id, EXPORTER_RANK)
        connection.settimeout(link.time_left_s())
        messages.send(connection, messages.Warm())
        messages.expect(connection, messages.Warm)
        link.warmed()

    def _answer(self, link: NcclLink) -> bool:
        """Answer one read. Return False if the importer has ended the connection."""
        connection = link.connection
        connection.settimeout(None)  # the importer may send again at any time; keepalive finds dead hosts
        read = messages.receive_message(connection)
        if read is None:
            return False
        if not isinstance(read, messages.Read) or read.number != link.next_number:
            raise TransportError("the importer does not follow the protocol")
        connection.settimeout(self._limits.transfer_s)
        epoch = read.entry
        refusal = self._why_not(read)
        if refusal:
            messages.send(connection, messages.Answer(epoch.ticket_id, epoch.attempt, read.number, 0, refusal))
            return True
        num_bytes = sum(run.num_blocks for run in read.runs) * self._block_bytes
        answer = messages.Answer(epoch.ticket_id, epoch.attempt, read.number, num_bytes)
        link.send(read.number, self._pieces(read.runs), lambda: messages.send(connection, answer))
        return True

    def _why_not(self, read: messages.Read) -> str:
        if not self._is_admitted(read.entry):
            return "the exporter has not admitted this epoch"
        if any(run.first_block + run.num_blocks > self._num_blocks for run in read.runs):
            return f"the read names a block beyond the {self._num_blocks} of the exporter's pool"
        return ""

    def _is_admitted(self, entry: messages.Entry) -> bool:
        token = self._tokens.get((entry.ticket_id, entry.attempt), b"")
        return hmac.compare_digest(token, entry.token)

    def _pieces(self, runs: tuple[messages.Run, ...]) -> list[Piece]:
        base, size = self._raw.data_ptr(), self._block_bytes
        return [Piece(base + run.first_block * size, run.num_blocks * size) for run in runs]
