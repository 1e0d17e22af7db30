"""Many schedules in one process, one after the other, and the story of one that went wrong."""

import gc
from collections.abc import Iterable, Iterator

from tests.chaos.simulated.machine import simulated_machine
from tests.chaos.simulated.schedule import Schedule, make_schedule
from tests.chaos.simulated.shrink import shrink
from tests.chaos.simulated.story import describe, overheard, tell
from tests.chaos.simulated.world import Result, run_schedule

_COLLECT_EVERY = 20


def run_seeds(seeds: Iterable[int]) -> Iterator[tuple[int, Result]]:
    with simulated_machine():
        for number, seed in enumerate(seeds, start=1):
            yield seed, run_schedule(make_schedule(seed))
            if number % _COLLECT_EVERY == 0:
                gc.collect()


def story_of(seed: int, *, shrunk: bool) -> str:
    """Of a seed that goes wrong: who did what, when, in the smallest schedule that goes wrong in the same way."""
    with simulated_machine():
        schedule = make_schedule(seed)
        if shrunk:
            schedule = shrink(schedule, run_schedule(schedule), run_schedule)
        return told(schedule)


def told(schedule: Schedule) -> str:
    """Inside `simulated_machine`."""
    with overheard():
        result = run_schedule(schedule)
    return f"{describe(schedule)}\n{tell(result)}"
