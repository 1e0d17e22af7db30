"""A TCP proxy in user space that limits the bytes per second that come back from its target.

Owns its listening socket and two threads per connection. Bytes to the target are few and not limited.
"""

import contextlib
import socket
import threading
import time

_PIECE_BYTES = 64 * 1024


class PacedLink:
    """Connects its own address with `target`; `bytes_per_s` holds for all connections together."""

    def __init__(self, target: tuple[str, int], bytes_per_s: float) -> None:
        self._target, self._bytes_per_s = target, bytes_per_s
        self._free_s = 0.0  # when the link has carried everything that was given to it
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._start(self._accept)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()
        return host, port

    def close(self) -> None:
        self._stopped.set()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [near, far]
                self._start(self._carry, near, far, False)
                self._start(self._carry, far, near, True)

    def _carry(self, source: socket.socket, target: socket.socket, is_paced: bool) -> None:
        piece = memoryview(bytearray(_PIECE_BYTES))
        with contextlib.suppress(OSError):
            while num_bytes := source.recv_into(piece):
                if is_paced:
                    self._stopped.wait(self._wait_s(num_bytes))
                target.sendall(piece[:num_bytes])
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait_s(self, num_bytes: int) -> float:
        """Return the seconds until the link, which sends one byte after the other, has sent these."""
        now_s = time.monotonic()
        with self._lock:
            self._free_s = max(now_s, self._free_s) + num_bytes / self._bytes_per_s
            return self._free_s - now_s

    @staticmethod
    def _start(work: object, *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]
