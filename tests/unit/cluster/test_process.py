"""Tests how a process ends, as its parent observes it."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Coroutine
from importlib import metadata
from pathlib import Path

import pytest

from cluster.errors import (
    ConfigError,
    DrainIncomplete,
    Fenced,
    ModelRefused,
    RegistryUnavailable,
    TandemError,
    Unhealthy,
    WorkerLost,
)
from cluster.process import (
    ExitStatus,
    announce_ready,
    installed_version,
    lasting,
    run_process,
    stop_requested,
    unused_tmpdir,
)

DEADLINE_S = 30.0
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("what to change"), ExitStatus.CONFIG),
        (ModelRefused("what to change"), ExitStatus.CONFIG),
        (Fenced("what to change"), ExitStatus.FENCED),
        (RegistryUnavailable("what to change"), ExitStatus.REGISTRY),
        (DrainIncomplete("what to change"), ExitStatus.DRAIN_INCOMPLETE),
        (Unhealthy("what to change"), ExitStatus.STUCK),
        (WorkerLost("what to change"), ExitStatus.CRASHED),
    ],
)
def test_a_known_error_is_logged_in_one_line_and_sets_the_exit_status(
    error: TandemError, status: ExitStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        raise error

    assert run_process("worker", main) == status
    assert capsys.readouterr().err == f"worker: {error.reason}: what to change\n"


def test_an_unknown_error_is_logged_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        raise RuntimeError("a bug")

    assert run_process("worker", main) == ExitStatus.CRASHED
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]


def test_the_ready_line_is_printed_for_the_parent_process(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        announce_ready(grpc="127.0.0.1:7", member="p0")
        assert capsys.readouterr().out == "ready grpc=127.0.0.1:7 member=p0\n"
        assert gc.get_freeze_count() > 10_000, "full collections skip what was loaded before"
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_requests_a_stop_and_the_second_kills(number: signal.Signals) -> None:
    program = (
        "import asyncio\nfrom cluster.process import run_process, stop_requested\n"
        "async def main():\n"
        "    stop = stop_requested()\n    print('waiting', flush=True)\n    await stop.wait()\n"
        "    print('finishing', flush=True)\n    await asyncio.Event().wait()\n"
        "raise SystemExit(run_process('it', main))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        assert process.stdout.readline() == "finishing\n"
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 128 + number


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("router", signal.SIGTERM),
        ("worker", signal.SIGINT),
        ("prefill_worker", signal.SIGTERM),
        ("decode_worker", signal.SIGINT),
    ],
)
def test_a_signal_during_the_imports_ends_a_member_without_a_word(module: str, number: signal.Signals) -> None:
    """SIGTERM too, which the first process of a container ignores unless it handles it."""
    program = (
        "import os, runpy, signal, sys\n"
        "class Signalled:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'grpc': os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Signalled())\n"
        f"runpy.run_module('{module}', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stderr) == (128 + number, b"")


def test_a_process_stopped_by_sigterm_ends_with_status_ok() -> None:
    async def main() -> None:
        stop = stop_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), DEADLINE_S)

    started: Coroutine[None, None, None] = main()
    assert run_process("it", lambda: started) == ExitStatus.OK


def test_the_garbage_collector_skips_objects_built_at_the_start() -> None:
    before = gc.get_freeze_count()
    try:
        with lasting():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
        assert not any(found is kept for found in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_full_disk_ends_a_process_with_one_line_that_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        with open("/dev/full", "w") as full:  # noqa: ASYNC230 -- every write to it fails as on a full disk
            full.write("x")

    assert run_process("it", main) == ExitStatus.CRASHED
    line = "No space left on device: one of the disks that `df` shows as full; free some space there, or give it more"
    assert capsys.readouterr().err == f"it: {line}\n"


@pytest.mark.parametrize(("named", "why"), [("/proc/nowhere", "No such file or directory"), ("/proc", "")])
def test_a_tmpdir_that_cannot_be_written_is_named_with_the_folder_in_its_place(
    named: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", named)
    line = unused_tmpdir()
    assert line.startswith(f"cannot write to TMPDIR {named}: {why}"), line
    assert f"temporary files go to {tempfile.gettempdir()}; " in line
    for usable in (str(tmp_path), ""):
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", usable)
        assert unused_tmpdir() == ""


def test_a_checkout_that_was_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU has a torch of its own, and runs Tandem from its folder."""
    assert installed_version()[0].isdigit()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert installed_version.__wrapped__() == "unpackaged"
