"""A test run that is killed leaves no process: neither what its tests have started nor the children of that."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.process import die_with_parent
from tests.reaper import is_readable

ROOT = Path(__file__).parents[3]
STARTS_WITHIN_S, ENDS_WITHIN_S = 180.0, 60.0


@pytest.mark.parametrize("victim", ["the run", pytest.param("the process of pytest-xdist", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_leaves_no_process(victim: str, tmp_path: Path) -> None:
    pipe = tmp_path / "started"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)  # not for reading alone: that would wait here for the writer
    run = subprocess.Popen(
        (
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "1",
            "--max-worker-restart",
            "0",
            "tests/system/rigs/processes/killed_run.py",
        ),
        cwd=ROOT,
        env=os.environ | {"STARTED_PIPE": str(pipe)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    with run:
        try:
            assert is_readable(reader, STARTS_WITHIN_S), "the inner test did not begin"
            started = [int(word) for word in os.read(reader, 1000).split()]
            assert len(started) == 7
            watched = {process_id: os.pidfd_open(process_id) for process_id in started}
            os.kill(run.pid if victim == "the run" else started[0], signal.SIGKILL)
            ends_s = time.monotonic() + ENDS_WITHIN_S
            left = [i for i, pidfd in watched.items() if not is_readable(pidfd, max(0.0, ends_s - time.monotonic()))]
            for pidfd in watched.values():
                os.close(pidfd)
        finally:
            os.close(reader)
            run.kill()  # or leaving `with` would wait for a run that waits for ever
    assert left == []
