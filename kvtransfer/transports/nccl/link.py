"""One control connection to a peer and the NCCL communicator behind it, driven by the thread that owns both.

Every call blocks that thread, up to the deadline of its step; `poison` and the queries may come from any thread. The
messages of the exporter and the importer are in their own files. `LoneThread` runs calls that may never return: an
executor's threads are joined when the interpreter ends, this thread is abandoned.
"""

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nccl.communicator_life import CommunicatorLife, CommunicatorState, IllegalMove
from kvtransfer.transports.nccl.library import Communicator, NcclFailed, NcclLibrary, Piece
from kvtransfer.transports.sockets import shut_down

_Result = TypeVar("_Result")
_MAX_GROUP = 512  # operations
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.00005, 0.002


class LoneThread:
    """Runs calls one after the other on a daemon thread until `end`."""

    def __init__(self, name: str, *, idle: Callable[[], None], idle_s: float) -> None:
        """`idle` is called after `idle_s` without a call. It must not raise."""
        self._idle, self._idle_s = idle, idle_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], _Result]) -> "Future[_Result]":
        """Queue a call. A call that has not begun can be cancelled."""
        future: Future[_Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  (the future's owner handles it)
                future.set_exception(error)

        self._calls.put(run)
        return future

    def end(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=self._idle_s)
            except queue.Empty:
                self._idle()
                continue
            if call is None:
                return
            call()


class NcclLink:
    """Owns the connection, the communicator and, from `begin` to its end, the moves of the communicator's life."""

    def __init__(
        self, connection: socket.socket, library: NcclLibrary, life: CommunicatorLife, slot: threading.Lock
    ) -> None:
        """`slot` is held by the one transfer per direction that the device makes at a time, on any link.

        An exporter acquires it before it announces that it sends, an importer when it receives that announcement. So
        the holder of an importer's slot is always being served, and no circle of waits can form."""
        self.connection = connection
        self._library, self._life, self._slot = library, life, slot
        self._lock = threading.Lock()  # over the moves of `life`
        self._owns_life = False  # otherwise another link may hold it
        self._poisoned = threading.Event()
        self._communicator: Communicator | None = None
        self.quiet = threading.Event()  # nothing of it runs any more

    @property
    def is_usable(self) -> bool:
        """Return whether a transfer may be requested."""
        with self._lock:
            return self._owns_life and self._life.state in (CommunicatorState.IDLE, CommunicatorState.TRANSFERRING)

    @property
    def is_abandoned(self) -> bool:
        """Return whether the peer has gone while the library initialises, which no call can interrupt."""
        with self._lock:
            is_initialising = self._owns_life and self._life.state is CommunicatorState.INITIALISING
        return is_initialising and self._peer_has_closed()

    def begin(self) -> None:
        """Begin a communicator. Raises TransportError during a backoff."""
        with self._lock:
            try:
                self._life.begin(time.monotonic())
            except IllegalMove as error:
                raise TransportError(str(error)) from error
            self._owns_life = True

    def agreed(self) -> None:
        """Record that both sides want the communicator."""
        self._move(lambda: self._life.agreed(time.monotonic()))

    def withdraw(self) -> None:
        """Give up the communicator because one side refuses, which is not a failure. `abort` must follow.

        The side that refuses calls it before it sends the refusal, after which its peer may make a new link at once.
        """
        with self._lock:
            if self._owns_life and self._life.state is CommunicatorState.AGREEING:
                self._life.withdraw()
                self._owns_life = False

    def connect(self, unique_id: bytes, rank: int) -> None:
        """Initialise and warm the communicator. Raises TransportError."""
        try:
            self._communicator = self._library.connect(unique_id, rank)
            self._move(lambda: self._life.initialised(time.monotonic()))
            self._communicator.warm()
            self._wait(self._communicator)
        except NcclFailed as error:
            raise TransportError(f"NCCL: {error}") from error

    def warmed(self) -> None:
        """Record that the other side has finished its part too."""
        self._move(self._life.warmed)

    def send(self, number: int, pieces: Sequence[Piece], announce: Callable[[], None]) -> None:
        """Send pieces. `announce` tells the other side that sending begins. Raises TransportError, OSError."""
        self._move(lambda: self._life.start_transfer(number, time.monotonic()))
        self._acquire_slot()
        try:
            announce()
            self._perform(pieces, lambda communicator, group: communicator.send(group))
        finally:
            self._slot.release()
        self._move(self._life.end_transfer)

    def receive(self, number: int, pieces: Sequence[Piece]) -> None:
        """Receive pieces after the other side announced that it sends. Raises TransportError."""
        self._move(lambda: self._life.start_transfer(number, time.monotonic()))
        self._acquire_slot()
        try:
            self._perform(pieces, lambda communicator, group: communicator.receive(group))
        finally:
            self._slot.release()
        self._move(self._life.end_transfer)

    @property
    def next_number(self) -> int:
        return self._life.number + 1

    def time_left_s(self) -> float | None:
        """Return the time until this step's deadline. Raises TransportError when it has passed."""
        deadline_s = self._life.deadline_s
        if deadline_s is None:
            return None
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TransportError(f"{self._life.state} took too long")
        return left_s

    def poison(self, why: str) -> None:
        """End the work in progress. The owning thread notices it the next time that it polls the device."""
        with self._lock:
            if self._owns_life:
                self._life.poison(why)
        self._poisoned.set()
        shut_down(self.connection)

    def abort(self, why: str, *, failed: bool = True) -> None:
        """Abort, on the owning thread. When it returns, nothing of the communicator can write any more.

        The communicator is aborted then, its stream empty and the connection closed. It never returns if the library
        does not; its callers have timeouts."""
        self.poison(why)
        with self._lock:
            must_abort = self._owns_life and self._life.state is CommunicatorState.POISONED
            if must_abort:
                self._life.abort(time.monotonic())
        if must_abort:
            if self._communicator is not None:
                self._abort_communicator(self._communicator)
            with self._lock:
                self._life.aborted(time.monotonic(), failed=failed)
        self._end()

    def look(self) -> None:
        """End the link if the peer is gone. The owning thread calls it while idle."""
        if not self.quiet.is_set() and (self._poisoned.is_set() or self._peer_is_gone()):
            self.abort("the peer is gone", failed=False)

    def _acquire_slot(self) -> None:
        if not self._slot.acquire(timeout=self.time_left_s() or -1):
            raise TransportError("other transfers on this device did not end in time")

    def _perform(self, pieces: Sequence[Piece], begin: Callable[[Communicator, Sequence[Piece]], None]) -> None:
        """Perform the transfer group by group, so that the library's queue never fills and no call blocks on the
        peer."""
        communicator = self._communicator
        assert communicator is not None
        try:
            for start in range(0, len(pieces), _MAX_GROUP):
                begin(communicator, pieces[start : start + _MAX_GROUP])
                self._wait(communicator)
        except NcclFailed as error:
            raise TransportError(f"NCCL: {error}") from error

    def _wait(self, communicator: Communicator) -> None:
        """Wait until all started work is done."""
        poll_s = _SHORTEST_POLL_S
        while not communicator.is_done():
            self.time_left_s()
            if self._poisoned.wait(poll_s):
                raise TransportError(self._life.why)
            if poll_s == _LONGEST_POLL_S and self._peer_is_gone():
                raise TransportError("the peer is gone")
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def _abort_communicator(self, communicator: Communicator) -> None:
        with contextlib.suppress(NcclFailed):  # only whether anything still runs matters here
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

    def _peer_has_closed(self) -> bool:
        """Return whether the peer has closed the connection, from which another thread may be reading."""
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed by that thread
            return True

    def _peer_is_gone(self) -> bool:
        """Return whether the peer has ended the connection, without waiting."""
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


def error_text(error: Exception) -> str:
    """Return the text about an error that ends a link."""
    is_named = isinstance(error, TransportError | OSError)
    return str(error) if is_named else f"{type(error).__name__}: {error}"
