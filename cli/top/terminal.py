"""The keys of a terminal, one at a time, while something else may wake the reader."""

import os
import select
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\t": "tab", b"\x1b": "escape"}
_MAX_BYTES = 64


@contextmanager
def raw_keys(descriptor: int) -> Iterator[None]:
    """Deliver each key at once and show none of them, until the block is left. Ctrl-C still interrupts."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def next_keys(descriptor: int, wake: int, timeout_s: float) -> list[str]:
    """Wait for keys, for a byte at `wake`, or for `timeout_s`. Return the names of the keys: up, down, tab, escape, or
    the character. An empty string is the end of the input."""
    readable, _, _ = select.select([descriptor, wake], [], [], timeout_s)
    if wake in readable:
        os.read(wake, _MAX_BYTES)
    if descriptor not in readable:
        return []
    read = os.read(descriptor, _MAX_BYTES)
    return _named(read) if read else [""]


def _named(read: bytes) -> list[str]:
    keys = []
    while read:
        known = next((code for code in _NAMES if read.startswith(code)), None)
        size = len(known) if known is not None else 1
        keys.append(_NAMES[known] if known is not None else read[:1].decode("latin-1"))
        read = read[size:]
    return keys
