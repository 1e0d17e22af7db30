"""The terminal of `tandem top`: restored by each end of the command, and refused where it cannot be drawn on."""

import os
import pty
import signal
import subprocess
import sys
import termios

import pytest

from cli.__main__ import main
from tests.system.rigs.processes.up_command import DEADLINE_S, ROOT

_PROGRAM = """
import sys
from cli import command
from cli.top import session
from tandem.v1 import admin_pb2
answer = admin_pb2.OverviewResponse(routers=[admin_pb2.RouterOverview(router='router-0@1')])
session.Cluster = lambda arguments: type('Empty', (), {'overview': lambda *_: answer})()
sys.exit(command.run(['top']))
"""
_FIRST_SCREEN = b"\x1b[?1049l"  # the terminal shows again what it showed before


def _read_until(text: bytes, terminal: int) -> bytes:
    found = b""
    while text not in found:
        found += os.read(terminal, 4096)
    return found


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_top_leaves_the_terminal_as_it_was(number: signal.Signals) -> None:
    """It stayed on the other screen, without a cursor, and showed no key that was typed."""
    terminal, its_end = pty.openpty()
    before = termios.tcgetattr(its_end)
    environment = os.environ | {"TERM": "xterm"}
    command = (sys.executable, "-c", _PROGRAM)
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=its_end, stdout=its_end, stderr=its_end) as top:
        _read_until(b"q quit", terminal)
        assert termios.tcgetattr(its_end) != before
        top.send_signal(number)
        assert b"Traceback" not in _read_until(_FIRST_SCREEN, terminal)
        assert top.wait(DEADLINE_S) == 128 + number
    assert termios.tcgetattr(its_end) == before
    os.close(terminal)
    os.close(its_end)


def test_top_refuses_a_terminal_that_it_cannot_draw_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its screen stayed empty."""
    monkeypatch.setenv("TERM", "dumb")
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert main(["top", "--address", "127.0.0.1:1"]) == 2
    assert "TERM says that this one cannot; use --once" in capsys.readouterr().err
