"""A seed gives the same run everywhere; failed schedules replay, shrink and are printed."""

import hashlib
import os
import subprocess
import sys
from unittest import mock

import pytest

from router.request.choice import Choice
from tests.chaos.simulated.cases.test_simulated import _append_anything, _connections_break
from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.batch import run_in_pieces, run_seeds, told
from tests.chaos.simulated.schedules.shrink import shrink, signs
from tests.chaos.simulated.world import run_schedule

_SEEDS = range(3)
_PROGRAM = "from tests.chaos.simulated.schedules.test_replay import fingerprints; print(fingerprints())"


def fingerprints() -> list[str]:
    """Return fingerprints of all messages of some seeds."""
    return [hashlib.sha256(repr(result.trace).encode()).hexdigest() for _, result in run_seeds(_SEEDS)]


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["0", "7"])
def test_a_seed_is_the_same_run_in_another_process_whatever_its_hashes(hash_seed: str) -> None:
    told_there = subprocess.run(
        (sys.executable, "-c", _PROGRAM),
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=300,
    ).stdout
    assert told_there.splitlines()[-1] == repr(fingerprints())


def test_chunks_in_separate_processes_give_the_results_of_one_process() -> None:
    here = {seed: (result.num_events, result.hit, result.outcomes) for seed, result in run_seeds(_SEEDS)}
    pieces = list(run_in_pieces(_SEEDS, num_processes=2))
    there = {seed: (r.num_events, r.hit, r.outcomes) for piece in pieces for seed, r in piece.results}
    assert there == here


def test_a_failing_schedule_replays_to_the_byte_and_always_shrinks_to_the_same_one() -> None:
    with simulated_machine(), mock.patch.object(Choice, "append", _append_anything):
        schedule = next(s for s in map(_connections_break, range(40)) if run_schedule(s).violations)
        first, second = run_schedule(schedule), run_schedule(schedule)
        small = shrink(schedule, first, run_schedule)
        story = told(small)
        assert story == told(small)
        still_wrong = signs(run_schedule(small))
    assert first.violations == second.violations and repr(first.trace) == repr(second.trace)
    assert len(small.asks) < len(schedule.asks) and len(small.mishaps) < len(schedule.mishaps)
    assert still_wrong & signs(first)
    assert "loses its connections" in story and "WRONG: request" in story
    with simulated_machine():
        assert not run_schedule(small).violations, "it was the guard that was missing"
