"""Runs `tandem` in a terminal of 80 columns and 24 lines."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from typing import Self

from cluster.process import die_with_parent
from tests.input import readable

_DEADLINE_S = 60.0
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HOME = "\x1b[H"  # a screen begins


class TerminalProgram:
    def __init__(self, *arguments: str, environment: Mapping[str, str]) -> None:
        self._terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**environment, "TERM": "xterm-256color"},
            preexec_fn=die_with_parent,
        )
        os.close(inner)
        self._output = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(_DEADLINE_S)
        os.close(self._terminal)

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def until(self, part: str) -> str:
        """Return the first later screen that contains a text."""
        self._output, deadline_s = self._output[self._output.rfind(_HOME) :], time.monotonic() + _DEADLINE_S
        while part not in (screen := _CONTROLS.sub("", self._output[max(0, self._output.rfind(_HOME)) :])):
            left_s = deadline_s - time.monotonic()
            assert readable([self._terminal], max(0.0, left_s)), f"no {part!r} within {_DEADLINE_S:g} s in:\n{screen}"
            self._output += os.read(self._terminal, 1 << 16).decode(errors="replace")
        return screen

    def end(self) -> int:
        """Return the exit status of a program that ends by itself."""
        while self.process.poll() is None:
            try:
                os.read(self._terminal, 1 << 16)
            except OSError:  # the terminal has no writer any more
                break
        return self.process.wait(_DEADLINE_S)
