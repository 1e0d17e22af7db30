"""`python -m tests.chaos.simulated --seeds N --first S`: so many schedules, and the story of each that goes wrong."""

import argparse
import logging
import os
import sys
import time
from collections import Counter

from cluster.process import leave

_HASHES = "PYTHONHASHSEED"


def main() -> int:
    arguments = _arguments()
    if os.environ.get(_HASHES) != "0":  # sets of names have the same order in every process then
        again = [sys.executable, "-m", "tests.chaos.simulated", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | {_HASHES: "0"})
    from tests.chaos.simulated.batch import run_in_pieces, story_of

    logging.disable(logging.CRITICAL)
    began_s, cpu_s, gone_wrong = time.monotonic(), 0.0, list[int]()
    totals: Counter[str] = Counter()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    for piece in run_in_pieces(seeds, num_processes=arguments.processes):
        cpu_s += piece.cpu_s
        for seed, result in piece.results:
            totals.update({f"requests: {outcome}": number for outcome, number in result.outcomes.items()})
            totals.update(" ".join(hit) for hit in result.hit)
            totals.update({"events": result.num_events, "simulated seconds": round(result.simulated_s)})
            if result.violations:
                gone_wrong.append(seed)
                print(f"seed {seed}: {result.violations[0]}", flush=True)
    took_s = time.monotonic() - began_s
    for seed in gone_wrong[: arguments.stories]:
        print(story_of(seed, shrunk=not arguments.whole), flush=True)
    for name, number in sorted(totals.items()):
        print(f"{number:10} {name}")
    print(
        f"{arguments.seeds} schedules in {took_s:.1f} s: {arguments.seeds / took_s * 60:.0f} a minute by the clock,"
        f" {arguments.seeds / cpu_s * 60:.0f} a minute of one core, {totals['events'] / cpu_s:.0f} events per second of"
        f" one core; {len(gone_wrong)} went wrong"
    )
    return bool(gone_wrong)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.simulated", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many schedules (default: 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="S", help="the first seed (default: 0)")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), metavar="N", help="that share the seeds (default: all cores)"
    )
    parser.add_argument("--stories", type=int, default=3, metavar="N", help="most stories that are told (default: 3)")
    parser.add_argument("--whole", action="store_true", help="tell stories as they are, without shrinking")
    return parser.parse_args()


if __name__ == "__main__":
    leave(main())
