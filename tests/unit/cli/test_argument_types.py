"""Arguments that no message or timeout can hold are one line on stderr, before any router is called."""

import math
import os
import subprocess
import sys
from argparse import ArgumentTypeError

import numpy
import pytest

from cli.__main__ import main
from cli.argument_types import seconds
from cluster.process import ExitStatus
from tandem.client import Client
from tests.system.rigs.processes.up_command import DEADLINE_S, ROOT

_NOT_UTF8 = "\udcff"  # how Python represents an argument with the byte 0xff
_NOWHERE = ("--address", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("profile", "w", "--steps", "99999999999"),
            "--steps must be a whole number from 1 to 1000, not '99999999999'",
        ),
        (("profile", "w", "--timeout", "nan"), "--timeout must be positive, not nan"),
        (("migrate", "w", "--max", "99999999999"), "--max must be a whole number from 1 to 4294967295"),
        (("migrate", "w", "--max", "²"), "--max must be a whole number from 1 to 4294967295, not '²'"),
        (("keys", "add", "--tenant", "a", "--max-priority", "4294967296"), "--max-priority must be a whole number"),
        (("keys", "add", "--tenant", "a", "--weight", "1.5"), "--weight must be a whole number from 1 to 1000000"),
        (("keys", "add", "--tenant", "a", "--max-sequences", "9" * 30), "--max-sequences must be a whole number"),
        (("drain", "w", "--timeout-s", "nan"), "--timeout-s must be positive, not nan"),
        (("scale", "decode=1", "--timeout-s", "soon"), "--timeout-s must be positive, not soon"),
        (("top", "--once", "--interval-s", "nan"), "--interval-s must be positive, not nan"),
    ],
)
def test_a_number_that_no_message_or_timeout_holds_is_refused_by_its_flag(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *_NOWHERE]) == ExitStatus.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tandem: {said}")


def test_infinite_seconds_are_a_timeout_that_grpc_and_sockets_hold() -> None:
    assert seconds("inf") == seconds("1e300") == 1e9
    assert seconds("0.5") == 0.5
    for wrong in ("0", "-1", "nan", "-inf", ""):
        with pytest.raises(ArgumentTypeError, match="must be positive"):
            seconds(wrong)


@pytest.mark.parametrize(
    "words",
    [
        ("drain", _NOT_UTF8),
        ("role", _NOT_UTF8, "both"),
        ("explain", _NOT_UTF8, "--no-discover"),
        ("profile", _NOT_UTF8),
        ("migrate", "w", "--to", _NOT_UTF8),
        ("keys", "revoke", _NOT_UTF8),
        ("keys", "add", "--tenant", _NOT_UTF8),
        ("generate", _NOT_UTF8),
        ("generate", "a", "--choice", _NOT_UTF8),
    ],
)
def test_an_argument_that_is_not_utf8_is_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *_NOWHERE]) == ExitStatus.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert "not UTF-8 text: " in line or "must not have half of a surrogate pair: " in line
    assert line.endswith("'\\udcff'") or line.endswith("'[\"\\udcff\"]'")


def test_the_name_of_a_file_that_is_not_utf8_is_printed_as_it_is() -> None:
    program = "import sys; from cli import command; sys.exit(command.run(['ui', '--http-address', '\\udcff:1']))"
    environment = os.environ | {"PYTHONIOENCODING": "utf-8", "TANDEM_ADMIN_KEY": "k"}
    ended = subprocess.run(
        (sys.executable, "-c", program), cwd=ROOT, env=environment, capture_output=True, timeout=DEADLINE_S
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"http://\xff:1/ui#key=k\n", b"")


def test_the_client_library_names_a_text_that_has_no_encoding_and_a_number_of_numpy_out_of_range() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=r"must not have half of a surrogate pair: '\\ud800'"):
            client.generate("\ud800")
        with pytest.raises(ValueError, match="must not have half of a surrogate pair"):
            client.tokenize("\ud800")
        with pytest.raises(ValueError, match="max_tokens must be from 0 to 4294967295, not -2"):
            client.generate("a", max_tokens=numpy.int64(-2))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout_s must be a number of seconds, not nan"):
            client.generate("a", timeout_s=math.nan)
