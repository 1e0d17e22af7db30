"""Runs the checks of keep-alive timers (tandem/keepalive.py), for blocking readers and for readers on an event loop.

A token costs no more than two clock reads.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.keepalive import KeepAliveTimer

_End = Callable[[], object]
_Ping = Callable[[], object]  # does not wait; it calls `on_ping_response` of the timer later


class KeepAliveWatch:
    """Checks the timers of all generations of one blocking client. Its thread runs only while a reader waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: dict[KeepAliveTimer, tuple[_End, _Ping]] = {}
        self._next_check_s = 0.0
        self._is_running = False

    @contextmanager
    def waiting(self, timer: KeepAliveTimer, end: _End, ping: _Ping) -> Iterator[None]:
        """Run the timer while the reader waits within the `with` block. Another thread calls `ping` when a ping is due,
        and `end` when the call is lost.
        """
        check_s = timer.begin(time.monotonic())
        if check_s is None:
            yield
            return
        with self._changed:
            self._waits[timer] = (end, ping)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="tandem-keepalive", daemon=True).start()
            elif check_s < self._next_check_s:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._waits.pop(timer, None)
                timer.end()

    def _run(self) -> None:
        with self._changed:
            while self._waits:
                now_s = time.monotonic()
                checks = {timer: timer.check(now_s) for timer in self._waits}
                for timer in [timer for timer in checks if timer.pop_ping()]:
                    self._waits[timer][1]()
                for timer in [timer for timer, check_s in checks.items() if check_s is None]:
                    end, _ = self._waits.pop(timer)
                    if timer.is_over:
                        end()
                self._next_check_s = min((at_s for at_s in checks.values() if at_s is not None), default=now_s)
                self._changed.wait(max(0.0, self._next_check_s - time.monotonic()))
            self._is_running = False


@contextmanager
def waiting(timer: KeepAliveTimer, end: _End, ping: _Ping | None = None) -> Iterator[None]:
    """Do what `KeepAliveWatch.waiting` does, on the running event loop."""
    loop = asyncio.get_running_loop()
    handle: asyncio.TimerHandle | None = None

    def check() -> None:
        nonlocal handle
        assert handle is not None
        # A coarse clock may still be before the time of this check, and checking until it passes would be a busy loop.
        check_s = timer.check(max(loop.time(), handle.when()))
        handle = loop.call_at(check_s, check) if check_s is not None else None
        if timer.pop_ping() and ping is not None:
            ping()
        if timer.is_over:
            end()

    check_s = timer.begin(loop.time())
    if check_s is not None:
        handle = loop.call_at(check_s, check)
    try:
        yield
    finally:
        timer.end()
        if handle is not None:
            handle.cancel()
