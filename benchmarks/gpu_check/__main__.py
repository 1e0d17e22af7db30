"""`make gpu-check`: verify and measure Tandem on a machine with one NVIDIA GPU, in eight minutes.

    PYTHONPATH=. python3 -m benchmarks.gpu_check [--minutes 8] [--only golden,llama] [--tiny] [--output FOLDER]

Prints each section as it ends and writes gpu_check.json and gpu_check.md into the folder. Exit status 1: a section
failed or was cut off, or a test was skipped without a valid reason. A missed goal is reported and is no failure.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_check.inventory import gpu_state, take_inventory
from benchmarks.gpu_check.last_words import ask_for_stacks, descendants, send
from benchmarks.gpu_check.report import Outcome, Report, Verdict
from benchmarks.gpu_check.said import condensed
from benchmarks.gpu_check.sections import SECONDS_LEFT, CheckSetup, Section, sections
from benchmarks.machine import about

_ROOT = Path(__file__).parents[2]
_RESULTS = _ROOT / "benchmarks" / "results" / "gpu"
_SHOWN_LINES = 40  # of each process's output, where something failed
_KEPT_LINES = 400  # the same in the JSON
_LONGEST_LINE = 1_000
_LAST_WORDS_S = 5.0
_MARGIN_S = 12.0  # for wheels that were unpacked before, and for last words


_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1"}


def main() -> int:
    arguments = _arguments()
    ends_at_s = time.monotonic() + 60 * arguments.minutes - _MARGIN_S
    began_s = time.monotonic()
    inventory = take_inventory()
    taken_s = time.monotonic() - began_s
    report = Report(arguments.output, about() | {"device": inventory.device or "none"})
    report.add(replace(inventory.outcome(needs_gpu=not arguments.tiny), seconds=taken_s))
    if not inventory.can_begin(needs_gpu=not arguments.tiny):
        return 1
    with tempfile.TemporaryDirectory() as folder:
        words = arguments.only.lower().split(",")
        whole = sections(CheckSetup(sys.executable, Path(folder), arguments.tiny))
        chosen = [section for section in whole if any(word in section.name.lower() for word in words)]
        for place, section in enumerate(chosen, 1):
            kept_s = sum(later.least_s for later in chosen[place:])
            report.add(_run(section, Path(folder), ends_at_s - kept_s))
    return 1 if report.has_failed else 0


def _run(section: Section, folder: Path, ends_at_s: float) -> Outcome:
    """Run a section as a separate program, with its own time limit. At the limit it prints its stacks and is ended with
    all its processes."""
    if section.absent:
        return Outcome(section.name, Verdict.ABSENT, (section.absent,))
    began_s = time.monotonic()
    left_s = min(section.budget_s, ends_at_s - began_s)
    if left_s <= 0:
        verdict = Verdict.ABSENT if section.is_extra else Verdict.CUT
        return Outcome(section.name, verdict, ("The time was up before it began.",))
    process = _started(section, left_s)
    try:
        said, _ = process.communicate(timeout=left_s)
        outcome = _read(section, folder, said, process.returncode)
    except subprocess.TimeoutExpired:
        outcome = _cut(section, folder, _ended(process), left_s)
    return replace(outcome, seconds=time.monotonic() - began_s)


def _started(section: Section, left_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [f"{left_s - _LAST_WORDS_S:.0f}" if word == SECONDS_LEFT else word for word in section.command],
        cwd=_ROOT,
        env={**os.environ, **_ENVIRONMENT, **section.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _ended(process: subprocess.Popen[str]) -> str:
    """Return the section's output, at last with the stacks of its threads and of its child processes."""
    started = descendants(process.pid)
    ask_for_stacks(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGABRT)
    try:
        said, _ = process.communicate(timeout=_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in started:
            send(pid, signal.SIGKILL)  # one in a session of its own may hold the pipe
        said, _ = process.communicate()
    return said


def _cut(section: Section, folder: Path, said: str, after_s: float) -> Outcome:
    """Return the outcome of a section that was cut off, with its results so far."""
    why = f"It did not end within {after_s:.0f} s."
    try:
        found = section.read(folder, said)
    except Exception:  # noqa: BLE001 -- half of a result may be anything
        found = Outcome(section.name, Verdict.CUT, ())
    return _with_last_words(replace(found, verdict=Verdict.CUT, lines=(why, "", *found.lines)), folder, said)


def _read(section: Section, folder: Path, said: str, status: int) -> Outcome:
    try:
        outcome = section.read(folder, said)
    except Exception as error:  # noqa: BLE001 -- its result is missing or not what is expected
        lines = (f"It ended with status {status}, and left nothing to read ({type(error).__name__}: {error}).",)
        return _with_last_words(Outcome(section.name, Verdict.FAILED, lines), folder, said)
    if status not in section.statuses:
        line = f"It ended with status {status}, after what follows."
        outcome = replace(outcome, verdict=Verdict.FAILED, lines=(line, "", *outcome.lines))
    return _with_last_words(outcome, folder, said) if outcome.verdict is Verdict.FAILED else outcome


def _with_last_words(outcome: Outcome, folder: Path, said: str) -> Outcome:
    """Add the end of the output of the section and its processes; the JSON gets more of it than the Markdown."""
    logs = {"output": said} | {log.name: log.read_text(errors="replace") for log in sorted(folder.glob("*.log"))}
    logs["nvidia-smi"] = gpu_state()
    tails = {name: _last_lines(text, _KEPT_LINES) for name, text in logs.items() if text.strip()}
    for log in folder.glob("*.log"):
        log.unlink()  # they are this section's
    texts = {name: condensed(tail, str(_ROOT))[-_SHOWN_LINES:] for name, tail in tails.items()}
    shown = [["", f"{name}, its end:", "```", *text, "```"] for name, text in texts.items()]
    figures = dict(outcome.figures) | {"last_lines": tails}
    return replace(outcome, lines=(*outcome.lines, *(line for part in shown for line in part)), figures=figures)


def _last_lines(text: str, most: int) -> list[str]:
    return [line[:_LONGEST_LINE] for line in text.splitlines()[-most:]]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu-check")
    parser.add_argument("--minutes", type=float, default=8.0, help="no section starts after this time (default: 8)")
    parser.add_argument(
        "--only", default="", help="only sections whose name contains one of these words, comma-separated"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="run everything in small on a CPU, to test the check itself"
    )
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder for gpu_check.json and gpu_check.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
