"""`python -m benchmarks.request_modules.recorded_process DIRECTORY MODULE FLAGS...` runs a member and records the
functions that it calls.

Runs MODULE as `python -m MODULE FLAGS...` would. On every SIGUSR1 it writes the functions that were called since the
last one to DIRECTORY as `<process id>.<number>.json`, a list of [file, function], starts a new record, and prints the
line `recorded`.
"""

import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

_ROOT = str(Path(__file__).parents[2])


class Recorder:
    """Owns the record. Functions outside the repository are left out when it is written, not when they are called."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._called: set[CodeType] = set()
        self._num_written = 0

    def start(self) -> None:
        """Records every Python thread that begins after this, and the present one."""
        signal.signal(signal.SIGUSR1, self._write)
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._called.add(frame.f_code)

    def _write(self, number: int, frame: FrameType | None) -> None:
        called, self._called = self._called, set()
        ours = sorted({(code.co_filename, code.co_qualname) for code in called if code.co_filename.startswith(_ROOT)})
        (self._directory / f"{os.getpid()}.{self._num_written}.json").write_text(json.dumps(ours))
        self._num_written += 1
        os.write(sys.stdout.fileno(), b"recorded\n")  # not print: the signal may come in the middle of one


if __name__ == "__main__":
    Recorder(Path(sys.argv[1])).start()
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
