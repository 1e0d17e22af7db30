"""A plugin of pytest that closes the files which ended tests have left to the garbage collector.

A KV pool holds a file until it is closed or collected, and tests often leave it in a cycle with its owners. The garbage
collector counts objects and not files: in a process that runs all tests, more than a thousand files were open.
"""

import gc
import os

_MOST_LEFT = 64


class OpenFiles:
    """Collects garbage when `most_left` more files are open than after the last time. One instance serves one test
    process."""

    def __init__(self, most_left: int = _MOST_LEFT) -> None:
        self._most_left = most_left
        self._num_kept = 0

    def pytest_runtest_logfinish(self) -> None:
        if num_open_files() > self._num_kept + self._most_left:
            gc.collect()
            self._num_kept = num_open_files()


def num_open_files() -> int:
    """Return the number of descriptors that are open in this process."""
    return len(os.listdir("/proc/self/fd")) - 1  # the listing itself has one
