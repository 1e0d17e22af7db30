"""Measures where the time of a process's start goes, from the creation of the process."""

import os
import time
from pathlib import Path

from cluster.clock import Clock


class StartPhases:
    """The seconds of each phase. A phase begins where the one before it has ended, so the phases add up to the whole
    start. Several threads may use it one after the other."""

    def __init__(self, clock: Clock, age_s: float) -> None:
        """`age_s`: how long the process has existed."""
        self._clock = clock
        self._last_s = clock.now_s() - age_s
        self._seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """End a phase. A phase that comes several times has the sum."""
        now_s = self._clock.now_s()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def fields(self) -> dict[str, float]:
        """Return the phases as fields of a log record, in their order, and their sum."""
        named = {f"{phase}_s": round(seconds, 3) for phase, seconds in self._seconds.items()}
        return named | {"total_s": round(sum(self._seconds.values()), 3)}


def process_age_s() -> float:
    """Return for how long this process has existed, to a hundredth of a second."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # starttime of proc_pid_stat(5), since boot
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
