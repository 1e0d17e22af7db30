"""The phases of a start add up to the time since the process was created."""

import subprocess
import sys
import time

import pytest

from cluster.clock import ManualClock
from worker.life import StartPhases


def test_phases_add_up_to_the_age_of_the_process() -> None:
    clock = ManualClock(100.0)
    phases = StartPhases(clock, age_s=2.0)
    for phase, duration_s in (("imports", 1.0), ("weights", 3.0), ("imports", 0.5)):
        clock.advance(duration_s)
        phases.end(phase)

    assert phases.fields() == {"imports_s": 3.5, "weights_s": 3.0, "total_s": 6.5}
    assert list(phases.fields()) == ["imports_s", "weights_s", "total_s"]


def test_the_age_of_a_process_counts_from_its_creation() -> None:
    program = "from worker.life import process_age_s\nprint(process_age_s())"
    before_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    wall_s = time.monotonic() - before_s

    assert float(ended.stdout) == pytest.approx(wall_s / 2, abs=wall_s / 2 + 0.02)
    assert float(ended.stdout) > 0
