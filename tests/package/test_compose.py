"""The images and the compose cluster on a Docker Engine, as `make compose-test` runs them."""

import subprocess
import sys

import pytest

from tests.package.installed import ROOT


def test_a_compose_cluster_answers_alike_while_it_is_scaled_killed_drained_and_changed() -> None:
    ended = subprocess.run(
        (sys.executable, "-m", "tests.package.compose_run"), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    if ended.returncode == 3:
        pytest.skip(ended.stderr.strip().splitlines()[-1])
    assert ended.returncode == 0, ended.stderr
