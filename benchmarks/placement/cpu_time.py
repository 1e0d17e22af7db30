"""CPU time of the machine and of processes, from /proc, to tell what else ran beside a measurement."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # fields of /proc/stat that are no work: idle and iowait
_GUEST = 8  # from here on, time that other fields contain already


@dataclass(frozen=True, slots=True)
class CpuTime:
    """The CPU time used since boot, in seconds, at one moment."""

    at_s: float
    machine_s: float  # of all processes
    ours_s: float  # of the given processes

    def others_since(self, begin: "CpuTime", generator_s: float) -> float:
        """Return the cores that all other processes used since then, in the mean, except the load generator."""
        others_s = (self.machine_s - begin.machine_s) - (self.ours_s - begin.ours_s) - generator_s
        return max(0.0, others_s / (self.at_s - begin.at_s))


def cpu_time(pids: Iterable[int]) -> CpuTime:
    """Return the CPU time of these processes and of the machine. Raises FileNotFoundError if a process has ended."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    busy = sum(field for index, field in enumerate(fields[:_GUEST]) if index not in _IDLE)
    return CpuTime(time.monotonic(), busy / _PER_S, sum(map(_process_s, pids)))


def _process_s(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = after_name[11:13]
    return (int(user) + int(system)) / _PER_S
