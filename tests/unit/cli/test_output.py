"""What the commands do where their output or their input cannot be used."""

import os
import subprocess
import sys

import pytest

from cli.__main__ import main
from cluster.process import ExitStatus
from tests.system.rigs.processes.up_command import DEADLINE_S, ROOT

_FULL = "tandem: No space left on device: one of the disks that `df` shows as full; free some space there, or give it"


@pytest.mark.parametrize(
    ("redirection", "status", "told"), [(">/dev/full", 1, _FULL), ("| true", 0, ""), (">&-", 0, ""), ("<&-", 0, "")]
)
def test_a_command_ends_in_order_whatever_becomes_of_its_output(redirection: str, status: int, told: str) -> None:
    """Its output is short enough to be written at its end only."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = f"set -o pipefail; '{sys.executable}' -m cli estimate --help {redirection}"
    ended = subprocess.run(
        ("bash", "-c", command), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.startswith(told) and len(ended.stderr.splitlines()) == bool(told)


def test_a_closed_stderr_changes_no_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["no-such-command"]) == ExitStatus.CONFIG


def test_characters_that_the_terminal_lacks_are_question_marks() -> None:
    program = (
        "import sys; from cli import command; from cli.top import session; from tandem.v1 import admin_pb2; "
        "answer = admin_pb2.OverviewResponse(routers=[admin_pb2.RouterOverview(router='\\xe9@1')]); "
        "session.Cluster = lambda arguments: type('Empty', (), {'overview': lambda *_: answer})(); "
        "sys.exit(command.run(['top', '--once']))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        (sys.executable, "-c", program), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "?" in ended.stdout
