"""The terminal of a command that draws on it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def restored_at_end() -> Iterator[None]:
    """Leave the block by SystemExit, with the status of a shell, when a signal asks the process to end. The blocks
    within it then restore the terminal. A signal that is ignored, as by nohup, stays so."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in (number for number, handler in before.items() if handler is signal.SIG_DFL):
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
