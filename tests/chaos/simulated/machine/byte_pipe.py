"""One direction of a simulated TCP connection: bytes that wait for the window, travel, arrive and are read.

Pure: time is an argument, and sizes and latencies come from the functions that the pipe is given. TCP's promises hold:
bytes arrive once and in order. Everything else is a draw: a segment or a read may end between any two bytes, and a pipe
may end before the last byte.
"""

from collections import deque
from collections.abc import Callable

_END = b""  # as a segment: the sender has closed the connection


class BytePipe:
    def __init__(self, *, window_bytes: int, cut: Callable[[int], int], latency_s: Callable[[], float]) -> None:
        """`window_bytes`: that both kernels hold together. `cut(n)` returns how many of n bytes, 1 to n, are in the
        next segment or read. `latency_s` returns the latency of a segment."""
        self._window_bytes, self._cut, self._latency_s = window_bytes, cut, latency_s
        self._unsent = bytearray()  # in the memory of the sending process
        self._held: list[bytes] = []  # segments that are sent again and again, until the link is healed
        self._travelling: deque[tuple[float, bytes]] = deque()  # with the time of arrival
        self._arrived = bytearray()
        self._num_in_kernels = 0  # of all bytes that were sent and not read
        self._arrives_s = 0.0  # the last segment
        self._num_left: int | None = None  # bytes until the connection dies; None: it lives
        self._is_finished = False  # its last segment is the end
        self.has_ended = False  # everything was read, and the sender has closed the connection

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    @property
    def is_dead(self) -> bool:
        """Return whether the reader has got the last byte before the connection's death."""
        return self._num_left == 0

    def write(self, data: bytes) -> None:
        self._unsent += data

    def send(self, now_s: float, *, is_cut: bool = False) -> list[float]:
        """Send as many unsent bytes as the window allows. Return the times at which they arrive; there are none on a
        link that is cut."""
        times, number = list[float](), min(len(self._unsent), self._window_bytes - self._num_in_kernels)
        while number > 0:
            size = self._cut(number)
            segment = bytes(self._unsent[:size])
            del self._unsent[:size]
            number -= size
            self._num_in_kernels += size
            times += self._dispatch(segment, now_s, is_cut)
        return times

    def finish(self, now_s: float, *, is_cut: bool = False) -> list[float]:
        """Close the sender's side: the end follows the bytes that were sent, and unsent ones are lost."""
        self._unsent.clear()
        if self._is_finished:
            return []
        self._is_finished = True
        return self._dispatch(_END, now_s, is_cut)

    def heal(self, now_s: float) -> list[float]:
        """Dispatch what a cut link held back. Return the times of arrival."""
        held, self._held = self._held, []
        return [at_s for segment in held for at_s in self._dispatch(segment, now_s, False)]

    def die_after(self, num_bytes: int) -> None:
        """Let the connection die when the reader has got this many further bytes."""
        self._num_left = num_bytes if self._num_left is None else min(self._num_left, num_bytes)

    def discard_unsent(self) -> None:
        self._unsent.clear()

    def is_readable(self, now_s: float) -> bool:
        return bool(self._arrived) or bool(self._travelling and self._travelling[0][0] <= now_s)

    def read(self, now_s: float) -> bytes:
        """Return bytes that have arrived, not always all of them; none if there are none, at the end, and on a dead
        connection."""
        while self._travelling and self._travelling[0][0] <= now_s:
            self._arrived += self._travelling.popleft()[1]
        number = len(self._arrived) if self._num_left is None else min(len(self._arrived), self._num_left)
        size = self._cut(number) if number else 0
        data = bytes(self._arrived[:size])
        del self._arrived[:size]
        self._num_in_kernels -= size
        if self._num_left is not None:
            self._num_left -= size
        self.has_ended = self._is_finished and not (self._arrived or self._travelling or self._held)
        return data

    def _dispatch(self, segment: bytes, now_s: float, is_cut: bool) -> list[float]:
        if is_cut or self._held:
            self._held.append(segment)
            return []
        self._arrives_s = max(self._arrives_s, now_s + self._latency_s())
        self._travelling.append((self._arrives_s, segment))
        return [self._arrives_s]
