"""Ends calls whose router has been silent for too long: for readers that block, and for readers on an event loop.

Decides nothing (tandem/silence.py does), and costs a token no more than two looks at a clock.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.silence import Silence

_End = Callable[[], object]
_Ask = Callable[[], object]  # returns at once; the answer is told to the silence


class Watch:
    """Of all generations of one client that blocks. Its thread lives while somebody waits, and little longer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: dict[Silence, tuple[_End, _Ask]] = {}
        self._look_s = 0.0  # when the thread looks next
        self._is_watched = False

    @contextmanager
    def waiting(self, silence: Silence, end: _End, ask: _Ask) -> Iterator[None]:
        """`end` is called, on another thread, when it has lasted too long; `ask` before, when that is due."""
        due_s = silence.begin(time.monotonic())
        if due_s is None:
            yield
            return
        with self._changed:
            self._waits[silence] = (end, ask)
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._run, name="tandem-silence", daemon=True).start()
            elif due_s < self._look_s:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._waits.pop(silence, None)
                silence.end()

    def _run(self) -> None:
        with self._changed:
            while self._waits:
                now_s = time.monotonic()
                looks = {silence: silence.look(now_s) for silence in self._waits}
                for silence in [silence for silence in looks if silence.take_question()]:
                    self._waits[silence][1]()
                for silence in [silence for silence in looks if silence.is_over]:
                    self._waits.pop(silence)[0]()
                self._look_s = min((look_s for look_s in looks.values() if look_s is not None), default=now_s)
                self._changed.wait(max(0.0, self._look_s - time.monotonic()))
            self._is_watched = False


@contextmanager
def waiting(silence: Silence, end: _End, ask: _Ask | None = None) -> Iterator[None]:
    """As Watch.waiting, on the running loop."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        look_s = silence.look(loop.time())
        timer = loop.call_at(look_s, look) if look_s is not None else None
        if silence.take_question() and ask is not None:
            ask()
        if silence.is_over:
            end()

    due_s = silence.begin(loop.time())
    if due_s is not None:
        timer = loop.call_at(due_s, look)
    try:
        yield
    finally:
        silence.end()
        if timer is not None:
            timer.cancel()
