"""Make a section's processes print their stacks before they are ended, because a hang leaves no error.

Python's fault handler prints the stacks of all threads at SIGABRT if PYTHONFAULTHANDLER is set; then the process ends.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_WRITING_S = 1.5


def ask_for_stacks(parent: int) -> None:
    """Send SIGABRT to all Python processes below this one. Returns when their output has had time to arrive."""
    asked = [pid for pid in descendants(parent) if _is_python(pid)]
    for pid in asked:
        send(pid, signal.SIGABRT)
    if asked:
        time.sleep(_WRITING_S)


def descendants(parent: int) -> list[int]:
    """Return all descendants of a process, children before their own children."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                # The name before it stands in brackets and may hold anything; its state comes next, then its parent.
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(after_name[1]), []).append(int(folder.name))
    found = list(children.get(parent, ()))
    for pid in found:  # grows while it is walked
        found += children.get(pid, ())
    return found


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False
