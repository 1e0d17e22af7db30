"""make gpu-check: what Tandem does on a machine with one NVIDIA GPU, in eight minutes.

    PYTHONPATH=. python3 -m benchmarks.gpu_check [--minutes 8] [--only engine] [--tiny] [--output FOLDER]

Prints each section as it ends and leaves gpu_check.json and gpu_check.md in the folder. Status 1: something failed, was
cut off, or a test was skipped that nothing excuses. A goal that was missed is told, and is no failure.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_check.inventory import take_inventory
from benchmarks.gpu_check.report import Outcome, Report, Verdict
from benchmarks.gpu_check.sections import Means, Section, sections
from benchmarks.machine import about

_ROOT = Path(__file__).parents[2]
_RESULTS = _ROOT / "benchmarks" / "results" / "gpu"
_LAST_LINES = 25


def main() -> int:
    arguments = _arguments()
    ends_at_s = time.monotonic() + 60 * arguments.minutes
    inventory = take_inventory()
    report = Report(arguments.output, about() | {"device": inventory.device or "none"})
    report.add(inventory.outcome(needs_gpu=not arguments.tiny))
    if report.has_failed:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for section in sections(Means(sys.executable, Path(folder), arguments.tiny)):
            if arguments.only.lower() in section.name.lower():
                report.add(_run(section, Path(folder), ends_at_s))
    return 1 if report.has_failed else 0


def _run(section: Section, folder: Path, ends_at_s: float) -> Outcome:
    """Its own program, its own time; ended whole where that is up."""
    began_s = time.monotonic()
    left_s = min(section.budget_s, ends_at_s - began_s)
    if left_s <= 0:
        return Outcome(section.name, Verdict.CUT, ("The time was up before it began.",))
    process = subprocess.Popen(
        section.command,
        cwd=_ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        cut = Outcome(section.name, Verdict.CUT, (f"It did not end within {left_s:.0f} s.", *_tail(said)))
        return replace(cut, seconds=time.monotonic() - began_s)
    return replace(_read(section, folder, said, process.returncode), seconds=time.monotonic() - began_s)


def _read(section: Section, folder: Path, said: str, status: int) -> Outcome:
    try:
        outcome = section.read(folder, said)
    except (OSError, ValueError, KeyError) as error:  # it ended before it wrote what it found
        lines = (f"It ended with status {status}, and left nothing to read ({error}).", *_tail(said))
        return Outcome(section.name, Verdict.FAILED, lines)
    if outcome.verdict is Verdict.FAILED:
        return replace(outcome, lines=(*outcome.lines, *_tail(said)))
    return outcome


def _tail(said: str) -> tuple[str, ...]:
    return ("", "```", *said.splitlines()[-_LAST_LINES:], "```")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu-check")
    parser.add_argument("--minutes", type=float, default=8.0, help="what has not begun by then is not begun")
    parser.add_argument("--only", default="", help="sections whose name holds this")
    parser.add_argument("--tiny", action="store_true", help="in small, on a CPU: to see that the check itself works")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder for gpu_check.json and gpu_check.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
