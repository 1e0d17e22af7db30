"""NCCL as far as the `nccl` transport sees it, between threads or processes with pools in host memory: constructors
that block until both ranks are in, messages matched by order, a stream that works by itself, and calls that hang."""

import ctypes
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from kvtransfer.transports.nccl.library import EXPORTER_RANK, NcclFailed, Piece

_TRY_S = 0.02


class SocketNccl:
    """NcclLibrary over sockets. `hang` names the call that does not return until `let_go`: connect, done, abort."""

    def __init__(self, *, version: int = 22_807, device: bytes = b"", hang: str = "", fail: str = "") -> None:
        self._version, self._device = version, device
        self.hang, self.fail = hang, fail
        self.hanging = threading.Event()  # something does
        self._let_go = threading.Event()
        self._ended = threading.Event()
        self.communicators: list[SocketCommunicator] = []
        self.num_connects = 0  # hanging ones too

    def version(self) -> int:
        return self._version

    def device(self) -> bytes:
        return self._device

    def unique_id(self) -> bytes:
        if self.fail == "unique_id":
            raise NcclFailed("no interface to listen on")
        return secrets.token_hex(64).encode()

    def connect(self, unique_id: bytes, rank: int) -> "SocketCommunicator":
        self.num_connects += 1
        self.wait_for_ever_if("connect")
        if self.fail == "connect":
            raise NcclFailed("unhandled cuda error")
        address = "\0nccl-" + unique_id.decode()[:32]  # what a name of a Unix socket may hold
        communicator = SocketCommunicator(self, self._meet(address, rank), rank)
        self.communicators.append(communicator)
        return communicator

    def wait_for_ever_if(self, call: str) -> None:
        if self.hang == call:
            self.hanging.set()
            self._let_go.wait()

    def let_go(self) -> None:
        """Let every hanging call continue."""
        self.hang = ""
        self._let_go.set()

    def end(self) -> None:
        """Fail the calls that wait for the other rank too, so that no thread outlives the test."""
        self._ended.set()
        self.let_go()

    def _meet(self, address: str, rank: int) -> socket.socket:
        if rank != EXPORTER_RANK:
            return self._try(lambda: _connected(address))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(1)
            listener.settimeout(_TRY_S)
            connection = self._try(lambda: listener.accept()[0])
        connection.settimeout(None)
        return connection

    def _try(self, call: Callable[[], socket.socket]) -> socket.socket:
        while True:
            try:
                return call()
            except (TimeoutError, ConnectionRefusedError, FileNotFoundError):
                if self._ended.wait(_TRY_S):
                    raise NcclFailed("the other rank never came") from None


class SocketCommunicator:
    """A communicator over sockets. It does not detect a dead peer: a call that waits for the peer waits until it is
    aborted."""

    def __init__(self, library: SocketNccl, connection: socket.socket, rank: int) -> None:
        self._library, self._connection, self._rank = library, connection, rank
        self._work: queue.SimpleQueue[Sequence[Piece] | None] = queue.SimpleQueue()
        self._begun, self._completed = 0, 0
        self.most_begun = 0  # groups that were in the queue at once
        self.is_aborted = False
        self._scratch = ctypes.create_string_buffer(16)
        self._stream = threading.Thread(target=self._run, daemon=True)
        self._stream.start()

    def warm(self) -> None:
        self._begin([Piece(ctypes.addressof(self._scratch), 16)])

    def send(self, pieces: Sequence[Piece]) -> None:
        assert self._rank == EXPORTER_RANK
        self._begin(pieces)

    def receive(self, pieces: Sequence[Piece]) -> None:
        assert self._rank != EXPORTER_RANK
        self._begin(pieces)

    def is_done(self) -> bool:
        if self._library.hang == "done":
            self._library.hanging.set()
            return False
        if self._library.fail == "done" and not self.is_aborted:
            raise NcclFailed("remote error")
        return self._completed == self._begun or not self._stream.is_alive()

    def abort(self) -> None:
        self.is_aborted = True
        self._library.wait_for_ever_if("abort")
        self._connection.shutdown(socket.SHUT_RDWR)
        self._work.put(None)
        self._stream.join()
        self._connection.close()

    def _begin(self, pieces: Sequence[Piece]) -> None:
        assert not self.is_aborted
        self._begun += 1
        self.most_begun = max(self.most_begun, self._begun - self._completed)
        self._work.put(pieces)

    def _run(self) -> None:
        while (pieces := self._work.get()) is not None:
            for piece in pieces:
                view = memoryview((ctypes.c_ubyte * piece.num_bytes).from_address(piece.address)).cast("B")
                if not self._move(view):
                    return self._wait_for_the_abort()
            self._completed += 1

    def _move(self, view: memoryview) -> bool:
        try:
            if self._rank == EXPORTER_RANK:
                self._connection.sendall(view)
                return True
            while view:
                num_bytes = self._connection.recv_into(view)
                if num_bytes == 0:
                    return False
                view = view[num_bytes:]
        except OSError:
            return False
        return True

    def _wait_for_the_abort(self) -> None:
        while self._work.get() is not None:
            pass


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
