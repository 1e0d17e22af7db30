"""`make test-repeat`: run the tests repeatedly, on a quiet machine and with a busy loop per core.

    python -m tests.repeat [--only quiet|loaded|loaded-system] [--runs N] [--log FILE]

Each completed run is a line of the log. A restarted command does the runs that the log lacks for the present code.
"""

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cluster.process import die_with_parent
from tests.repeat.log import KINDS, RESULTS, Failure, Kind, Outcome, Run, code_digest, left_to_do, read_junit, read_log

ROOT = Path(__file__).parents[2]
_BUSY = "while True: pass"


def main() -> int:
    arguments = _arguments()
    if changed := _changed():
        sys.stderr.write(f"test-repeat: commit first, or the log would name code that did not run: {changed}\n")
        return 2
    log: Path = arguments.log
    code = code_digest(_git("ls-tree", "-r", "HEAD"))
    kinds = [kind for kind in KINDS if arguments.only in ("", kind.name)]
    if arguments.runs is not None:
        kinds = [replace(kind, runs=arguments.runs) for kind in kinds]
    todo = left_to_do(_logged(log), code, kinds)
    for number, kind in enumerate(todo, 1):
        print(f"==> {kind.name}, run {number} of {len(todo)} that are left for code {code}", flush=True)
        run = _run(kind, code, _git("rev-parse", "HEAD").strip())
        if _changed() or code_digest(_git("ls-tree", "-r", "HEAD")) != code:
            sys.stderr.write("test-repeat: the code changed while it ran; the run is not logged\n")
            return 2
        with log.open("a") as file:
            file.write(run.to_line())
        print(f"==> {kind.name}: {run.counts} in {run.duration_s:.0f} s, exit status {run.exit_status}", flush=True)
    return _verdict([run for run in _logged(log) if run.code == code])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-repeat")
    parser.add_argument("--only", choices=[kind.name for kind in KINDS], default="", help="only runs of this kind")
    parser.add_argument("--runs", type=int, help="runs of each kind in all, those of the log included")
    parser.add_argument("--log", type=Path, default=ROOT / RESULTS / "test_repeat.jsonl")
    return parser.parse_args()


def _changed() -> str:
    """Return the tracked files that differ from the commit, except results."""
    lines = _git("status", "--porcelain", "--untracked-files=no").splitlines()
    return ", ".join(line[3:] for line in lines if not line[3:].startswith(RESULTS))


def _logged(log: Path) -> list[Run]:
    return read_log(log.read_text().splitlines()) if log.exists() else []


def _run(kind: Kind, code: str, commit: str) -> Run:
    seed, started, began_s = secrets.randbelow(1 << 31), datetime.now(UTC), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        processes = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")  # as `make test`
        command = ("-m", "pytest", *processes, "-q", "--hypothesis-profile=search", f"--junitxml={junit}")
        with _busy(os.cpu_count() or 1) if kind.is_loaded else _busy(0):
            status = subprocess.run(
                (sys.executable, *command, f"--randomly-seed={seed}", *kind.paths), cwd=ROOT, check=False
            ).returncode
        text = junit.read_text() if junit.exists() else ""
    outcome = read_junit(text) if text else Outcome({}, (Failure("pytest", "it wrote no results"),))
    return Run(
        commit=commit,
        code=code,
        kind=kind.name,
        started=started.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - began_s, 1),
        seed=seed,
        exit_status=status,
        counts=outcome.counts,
        failures=outcome.failures,
    )


@contextmanager
def _busy(count: int) -> Iterator[None]:
    loops = [subprocess.Popen((sys.executable, "-c", _BUSY), preexec_fn=die_with_parent) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _verdict(runs: list[Run]) -> int:
    red = [run for run in runs if run.exit_status]
    print(f"{len(runs)} runs of this code, {len(red)} of them red")
    for run in red:
        for failure in run.failures:
            print(f"  {run.started} {run.kind} seed {run.seed}: {failure.test}: {failure.line}")
    return 1 if red else 0


def _git(*arguments: str) -> str:
    return subprocess.run(("git", "-C", str(ROOT), *arguments), check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
