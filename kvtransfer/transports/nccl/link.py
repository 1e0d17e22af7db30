"""One control connection and the communicator behind it, as the thread that owns both drives them.

Every call blocks that thread, up to the deadline of its step; `poison` and the questions may come from any thread. What
the exporter and the importer say to each other stands in their own files.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.host.sockets import shut_down
from kvtransfer.transports.nccl.library import Communicator, NcclFailed, NcclLibrary, Piece
from kvtransfer.transports.nccl.pair import IllegalMove, PairLife, PairState

_MAX_GROUP = 512  # operations
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.00005, 0.002


class NcclLink:
    """Owns the connection, the communicator and, from `begin` until it has ended, the moves of the pair's life."""

    def __init__(self, connection: socket.socket, library: NcclLibrary, life: PairLife, slot: threading.Lock) -> None:
        """`slot`: held by the one transfer in this direction that the device makes at a time, whatever the pair. An
        exporter takes it before it says that it sends, an importer when the exporter has said so: whoever holds an
        importer's slot is being served, so nobody waits in a circle."""
        self.connection = connection
        self._library, self._life, self._slot = library, life, slot
        self._lock = threading.Lock()  # over the moves of `life`
        self._owns_life = False  # before and after, it may belong to another link
        self._poisoned = threading.Event()
        self._communicator: Communicator | None = None
        self.quiet = threading.Event()  # nothing of it runs any more

    @property
    def is_usable(self) -> bool:
        """A transfer may be asked for."""
        with self._lock:
            return self._owns_life and self._life.state in (PairState.IDLE, PairState.TRANSFERRING)

    def begin(self) -> None:
        """Raises TransportError when the pair is to be left alone."""
        with self._lock:
            try:
                self._life.begin(time.monotonic())
            except IllegalMove as error:
                raise TransportError(str(error)) from error
            self._owns_life = True

    def agreed(self) -> None:
        """Both sides want the communicator."""
        self._move(lambda: self._life.agreed(time.monotonic()))

    def withdraw(self) -> None:
        """One side does not, and nothing is wrong; the link has ended."""
        with self._lock:
            if self._owns_life and self._life.state is PairState.AGREEING:
                self._life.withdraw()
        self.abort("")

    def connect(self, unique_id: bytes, rank: int) -> None:
        """Initialises and warms. Raises TransportError."""
        try:
            self._communicator = self._library.connect(unique_id, rank)
            self._move(lambda: self._life.initialised(time.monotonic()))
            self._communicator.warm()
            self._wait(self._communicator)
        except NcclFailed as error:
            raise TransportError(f"NCCL: {error}") from error

    def warmed(self) -> None:
        """The other side has its end of it too."""
        self._move(self._life.warmed)

    def send(self, number: int, pieces: Sequence[Piece], announce: Callable[[], None]) -> None:
        """`announce` tells the other side that sending begins. Raises TransportError, OSError."""
        self._move(lambda: self._life.start_transfer(number, time.monotonic()))
        self._take_slot()
        try:
            announce()
            self._perform(pieces, lambda communicator, group: communicator.send(group))
        finally:
            self._slot.release()
        self._move(self._life.end_transfer)

    def receive(self, number: int, pieces: Sequence[Piece]) -> None:
        """The other side has said that it sends. Raises TransportError."""
        self._move(lambda: self._life.start_transfer(number, time.monotonic()))
        self._take_slot()
        try:
            self._perform(pieces, lambda communicator, group: communicator.receive(group))
        finally:
            self._slot.release()
        self._move(self._life.end_transfer)

    @property
    def next_number(self) -> int:
        return self._life.number + 1

    def time_left_s(self) -> float | None:
        """Until this step's deadline. Raises TransportError when it has passed."""
        deadline_s = self._life.deadline_s
        if deadline_s is None:
            return None
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TransportError(f"{self._life.state} took too long")
        return left_s

    def poison(self, why: str) -> None:
        """Ends what is under way: the owning thread notices between two looks at the device."""
        with self._lock:
            if self._owns_life:
                self._life.poison(why)
        self._poisoned.set()
        shut_down(self.connection)

    def abort(self, why: str, *, failed: bool = True) -> None:
        """For the owning thread. When it returns the communicator is aborted, its stream empty and the connection
        closed: the proof of quiet. It never returns if the library does not: then nothing is proven, and whoever waits
        has a deadline."""
        self.poison(why)
        with self._lock:
            must_abort = self._owns_life and self._life.state is PairState.POISONED
            if must_abort:
                self._life.abort(time.monotonic())
        if must_abort:
            if self._communicator is not None:
                self._abort_communicator(self._communicator)
            with self._lock:
                self._life.aborted(time.monotonic(), failed=failed)
        self._end()

    def look(self) -> None:
        """For the owning thread when nothing is asked of it: a peer that is gone ends the link."""
        if not self.quiet.is_set() and (self._poisoned.is_set() or self._peer_is_gone()):
            self.abort("the peer is gone", failed=False)

    def _take_slot(self) -> None:
        if not self._slot.acquire(timeout=self.time_left_s() or -1):
            raise TransportError("other transfers on this device did not end in time")

    def _perform(self, pieces: Sequence[Piece], begin: Callable[[Communicator, Sequence[Piece]], None]) -> None:
        """Group by group: the library's queue of work never fills up, so no call waits in it for the peer."""
        communicator = self._communicator
        assert communicator is not None
        try:
            for start in range(0, len(pieces), _MAX_GROUP):
                begin(communicator, pieces[start : start + _MAX_GROUP])
                self._wait(communicator)
        except NcclFailed as error:
            raise TransportError(f"NCCL: {error}") from error

    def _wait(self, communicator: Communicator) -> None:
        """Until everything that was begun is done."""
        poll_s = _SHORTEST_POLL_S
        while not communicator.is_done():
            self.time_left_s()
            if self._poisoned.wait(poll_s):
                raise TransportError(self._life.why)
            if poll_s == _LONGEST_POLL_S and self._peer_is_gone():
                raise TransportError("the peer is gone")
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def _abort_communicator(self, communicator: Communicator) -> None:
        with contextlib.suppress(NcclFailed):  # what counts is whether anything still runs
            communicator.abort()
        pause = threading.Event()
        while not _is_done(communicator):
            pause.wait(_LONGEST_POLL_S)

    def _move(self, move: Callable[[], None]) -> None:
        with self._lock:
            if not self._owns_life:
                raise TransportError("the link has ended")
            try:
                move()
            except IllegalMove as error:
                raise TransportError(self._life.why or str(error)) from error

    def _end(self) -> None:
        with self._lock:
            self._owns_life = False
        self.connection.close()
        self.quiet.set()

    def _peer_is_gone(self) -> bool:
        """Looks without waiting, whatever the socket's timeout."""
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return bool(poll.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):  # closed by another thread
            return True


def _is_done(communicator: Communicator) -> bool:
    try:
        return communicator.is_done()
    except NcclFailed:
        return False  # a device that reports an error proves nothing
