"""Shorten a process's output to what explains a failure. Pure."""

from collections.abc import Iterable

_ASKED = "Fatal Python error: Aborted"  # the stacks of all threads follow, up to the list of extension modules
_STACKS_END = "Extension modules:"
_LONGEST_LINE = 400
_MOST_FRAMES = 8  # of one thread, the innermost


def condensed(lines: Iterable[str], ours: str) -> list[str]:
    """Remove threads that run no code of `ours` (a folder), and the outer frames of the others."""
    kept: list[str] = []
    thread: list[str] | None = None  # of the stacks that are being read
    for line in lines:
        if _ASKED in line:
            thread = []
            kept.append(line)
        elif thread is None:
            kept.append(line[:_LONGEST_LINE])
        elif _STACKS_END in line or "hread 0x" in line or line.startswith("Traceback"):
            kept += _of_ours(thread, ours)
            ends = "hread 0x" not in line
            thread = None if ends else [line]
            kept += [line] if line.startswith("Traceback") else []
        else:
            thread.append(line[:_LONGEST_LINE])
    return kept + _of_ours(thread or [], ours)


def _of_ours(thread: list[str], ours: str) -> list[str]:
    frames = thread[1:]
    return thread[: 1 + _MOST_FRAMES] if any(ours in frame for frame in frames) else []
