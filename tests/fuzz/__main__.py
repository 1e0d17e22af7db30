"""Fuzzes every decoder for a time: `python -m tests.fuzz --minutes 60`; `make fuzz` runs it.

Each target runs in a process of its own, so that an input that ends or hangs its process is found as well. The input
in progress lies in memory that this process shares. An input with a new outcome is mutated further and, with --keep,
joins the corpus.
"""

import argparse
import faulthandler
import mmap
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tests.fuzz.all_targets import all_targets, corpus, keep
from tests.fuzz.target import Found, Target

_HANG_S = 30.0
_MOST_KNOWN, _MOST_KEPT, _MOST_KEPT_BYTES = 2000, 6, 300
_MOST_INPUT = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time of all targets together")
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs; default: another each time")
    parser.add_argument("--keep", action="store_true", help="add inputs with new outcomes to tests/fuzz/corpus")
    flags = parser.parse_args()
    seed = random.randrange(1 << 32) if flags.seed is None else flags.seed
    targets = [target for target in all_targets() if flags.only in target.name]
    print(f"{len(targets)} decoders, {flags.minutes * 60 / len(targets):.1f} s each, seed {seed}", flush=True)
    until_s, num_found, num_run = time.monotonic() + flags.minutes * 60, 0, 0
    for place, target in enumerate(targets):
        seconds = max(0.5, (until_s - time.monotonic()) / (len(targets) - place))
        report = _in_process_of_its_own(target, seconds, random.Random(f"{seed} {target.name}"))
        num_found, num_run = num_found + len(report.found), num_run + report.num_run
        print(f"{target.name:36} {report.num_run:>9,} executions  {report.num_outcomes:>4} outcomes", flush=True)
        for defect, (details, data) in report.found.items():
            print(f"    FOUND {defect}: {details}\n    input {data!r:.2000}", flush=True)
        if flags.keep:
            keep(target.name, report.new)
    print(f"{num_run:,} executions, {num_found} findings")
    return 1 if num_found else 0


@dataclass(frozen=True)
class Report:
    num_run: int
    num_outcomes: int
    found: Mapping[str, tuple[str, bytes]]  # the details and the first input, by what was found
    new: Sequence[bytes]  # inputs with new outcomes, the shortest first


def _in_process_of_its_own(target: Target, seconds: float, draw: random.Random) -> Report:
    """Fork before anything of the target runs: this process has no threads."""
    fork = multiprocessing.get_context("fork")
    with mmap.mmap(-1, 8 + _MOST_INPUT) as current:
        ours, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=_fuzz, args=(target, current, seconds, draw, theirs))
        child.start()
        theirs.close()
        try:
            report = ours.recv()
            assert isinstance(report, Report)
        except EOFError:
            child.join()
            data = current[8 : 8 + int.from_bytes(current[:8], "little")]
            report = Report(0, 0, {f"the process ended with {child.exitcode}": ("", data)}, ())
        child.join()
        return report


def _fuzz(target: Target, current: mmap.mmap, seconds: float, draw: random.Random, answer: Connection) -> None:
    answer.send(_Fuzzing(target, current, draw).run(seconds))
    answer.close()
    os._exit(0)  # servers on threads are left as they are


class _Fuzzing:
    def __init__(self, target: Target, current: mmap.mmap, draw: random.Random) -> None:
        self._target, self._current, self._draw = target, current, draw
        self._known = [*target.seeds, *corpus().get(target.name, ())]
        self._outcomes: Counter[str] = Counter()
        self._found: dict[str, tuple[str, bytes]] = {}
        self._new: list[bytes] = []

    def run(self, seconds: float) -> Report:
        for data in tuple(self._known):
            self._try(data)
        self._new.clear()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._try(self._target.input(self._draw, self._known))
        new = sorted((data for data in self._new if len(data) < _MOST_KEPT_BYTES), key=len)[:_MOST_KEPT]
        return Report(self._outcomes.total() + len(self._found), len(self._outcomes), self._found, new)

    def _try(self, data: bytes) -> None:
        data = data[:_MOST_INPUT]
        self._current[: 8 + len(data)] = len(data).to_bytes(8, "little") + data
        faulthandler.dump_traceback_later(_HANG_S, exit=True)
        try:
            outcome = self._target.try_input(data)
        except Found as found:
            self._found.setdefault(found.args[0], (found.args[1], data))
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
        if outcome not in self._outcomes and len(self._known) < _MOST_KNOWN:
            self._known.append(data)
            self._new.append(data)
        self._outcomes[outcome] += 1


if __name__ == "__main__":
    sys.exit(main())
