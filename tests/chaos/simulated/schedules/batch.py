"""Run many schedules: one after another in this process, or in chunks, each in a separate process."""

import gc
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait

from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.results.story import describe, overheard, tell
from tests.chaos.simulated.schedules.schedule import Schedule, make_schedule
from tests.chaos.simulated.schedules.shrink import shrink
from tests.chaos.simulated.world import Result, run_schedule

_COLLECT_EVERY = 20
_PIECE = 50  # schedules: about a megabyte each is left for the end of their process


@dataclass(frozen=True, slots=True)
class Piece:
    """The results of some seeds, without their events: running the seed again prints those."""

    results: tuple[tuple[int, Result], ...]
    cpu_s: float


def run_seeds(seeds: Iterable[int]) -> Iterator[tuple[int, Result]]:
    with simulated_machine():
        for number, seed in enumerate(seeds, start=1):
            yield seed, run_schedule(make_schedule(seed))
            if number % _COLLECT_EVERY == 0:
                gc.collect()


def run_in_pieces(seeds: Sequence[int], *, num_processes: int) -> Iterator[Piece]:
    """Yield the pieces in the order in which they end. Their processes are forked and exit without cleaning up, because
    collecting the garbage of schedules takes a fifth of their time."""
    fork, running = multiprocessing.get_context("fork"), dict[Connection, multiprocessing.process.BaseProcess]()
    pieces = [seeds[start : start + _PIECE] for start in range(0, len(seeds), _PIECE)]
    with simulated_machine():
        while pieces or running:
            while pieces and len(running) < num_processes:
                ours, theirs = fork.Pipe(duplex=False)
                process = fork.Process(target=_run_piece, args=(pieces.pop(0), theirs))
                process.start()
                theirs.close()
                running[ours] = process
            wait(list(running))
            for ours in [one for one in running if one.poll()]:
                yield ours.recv()
                running.pop(ours).join()


def _run_piece(seeds: Sequence[int], answer: Connection) -> None:
    results = tuple((seed, replace(run_schedule(make_schedule(seed)), trace=(), happened=())) for seed in seeds)
    answer.send(Piece(results, time.process_time()))
    os._exit(0)


def story_of(seed: int, *, shrunk: bool) -> str:
    """Return the schedule of a seed and its events. `shrunk`: of the smallest schedule that fails in the same way."""
    with simulated_machine():
        schedule = make_schedule(seed)
        if shrunk:
            schedule = shrink(schedule, run_schedule(schedule), run_schedule)
        return told(schedule)


def told(schedule: Schedule) -> str:
    """Run a schedule and return its description and events. Call it inside `simulated_machine`."""
    with overheard():
        result = run_schedule(schedule)
    return f"{describe(schedule)}\n{tell(result)}"
