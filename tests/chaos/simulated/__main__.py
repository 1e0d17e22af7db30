"""`python -m tests.chaos.simulated --seeds N --first S`: run N schedules, and print the events of each that fails."""

import argparse
import logging
import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from cluster.process import exit_process

if TYPE_CHECKING:
    from tests.chaos.simulated.results.record import Run

_HASHES = "PYTHONHASHSEED"
_CHUNK = 500  # seeds


def main() -> int:
    arguments = _arguments()
    if os.environ.get(_HASHES) != "0":  # sets of names have the same order in every process then
        again = [sys.executable, "-m", "tests.chaos.simulated", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | {_HASHES: "0"})
    from tests.chaos.simulated.results.record import coverage, keep, kept, total
    from tests.chaos.simulated.schedules.batch import story_of

    logging.disable(logging.CRITICAL)
    done, runs = ([], []) if not arguments.write else (kept(), [])
    for seeds in _chunks(range(arguments.first, arguments.first + arguments.seeds)):
        run = next((run for run in done if (run.first, run.num_seeds) == (seeds.start, len(seeds))), None)
        if run is None:
            run = _run(seeds, arguments.processes)
            if arguments.write:
                keep(run)
                print(f"{seeds.stop - arguments.first} of {arguments.seeds} seeds: {run.summary()}", flush=True)
        runs.append(run)
    run = total(runs)
    for seed in run.wrong[: arguments.stories]:
        print(story_of(seed, shrunk=not arguments.whole), flush=True)
    print("\n".join(coverage(run)))
    print(run.summary())
    return bool(run.wrong)


def _chunks(seeds: range) -> list[range]:
    """Divide the seeds into chunks. A chunk is stored at once, so an interrupted run loses less than one."""
    return [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]


def _run(seeds: range, num_processes: int) -> "Run":
    from tests.chaos.simulated.results.record import Run, hit_name
    from tests.chaos.simulated.schedules.batch import run_in_pieces

    began_s, cpu_s, num_events, wrong = time.monotonic(), 0.0, 0, list[int]()
    outcomes, hit, reached = Counter[str](), Counter[str](), Counter[str]()
    for piece in run_in_pieces(seeds, num_processes=num_processes):
        cpu_s += piece.cpu_s
        for seed, result in piece.results:
            outcomes.update(result.outcomes)
            reached.update(result.reached)
            hit.update(hit_name(*where) for where in result.hit)
            num_events += result.num_events
            if result.violations:
                wrong.append(seed)
                print(f"seed {seed}: {result.violations[0]}", flush=True)
    return Run(
        first=seeds.start,
        num_seeds=len(seeds),
        num_processes=num_processes,
        seconds=time.monotonic() - began_s,
        cpu_s=cpu_s,
        num_events=num_events,
        wrong=tuple(sorted(wrong)),
        outcomes=dict(outcomes),
        hit=dict(hit),
        reached=dict(reached),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.simulated", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="number of schedules (default: 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="S", help="the first seed (default: 0)")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), metavar="N", help="number of processes (default: one per core)"
    )
    parser.add_argument(
        "--stories", type=int, default=3, metavar="N", help="most failed schedules to print (default: 3)"
    )
    parser.add_argument("--whole", action="store_true", help="print failed schedules without shrinking them")
    parser.add_argument(
        "--write",
        action="store_true",
        help="store the figures, added to those of the same commit; seeds already stored are not run again",
    )
    return parser.parse_args()


if __name__ == "__main__":
    exit_process(main())
