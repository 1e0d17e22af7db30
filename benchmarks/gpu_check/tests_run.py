"""Run the tests marked `cuda` by pytest in another process, and read their reports.

On a machine with a GPU a skipped test is a failure, unless it lacks a wheel.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.kept_reports import Kept
from benchmarks.gpu_check.report import Outcome, Verdict

# What a skip's reason says when a wheel, a second GPU, a newer library or a newer GPU is what it lacks, or when it is
# about Triton's interpreter, and has no case on a GPU.
_MAY_SKIP = re.compile(
    r"could not import|cannot be imported|needs the extra|No module named|not installed|two GPUs|need NCCL"
    r"|needs capability|GiB free|interpreter alone",
    re.I,
)
_SHOWN_FAILURES = 6  # in whole; the others are told by their last error, and are whole in the JSON
_SHOWN_LINES = 60
_TEST_TIMEOUT_S = 60
_ERROR_LINE = re.compile(r"^E\s+(.*\S)", re.M)


@dataclass(frozen=True, slots=True)
class Account:
    """The results of one run of pytest."""

    passed: tuple[Kept, ...]
    failed: tuple[Kept, ...]
    skipped_for_want: tuple[Kept, ...]
    skipped: tuple[Kept, ...]

    def outcome(self, name: str) -> Outcome:
        bad = bool(self.failed or self.skipped or not self.passed)
        lines = [
            f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped without a right to."
        ]
        lines += [f"- **failed** {_told(each)}" for each in self.failed]
        lines += [f"- **skipped** {_told(each)}" for each in self.skipped]
        lines += [f"- left out: {each}" for each in sorted({_told(each) for each in self.skipped_for_want})]
        for each in self.failed[:_SHOWN_FAILURES]:
            lines += ["", f"{each.name}:", "```", *each.text.splitlines()[-_SHOWN_LINES:], "```"]
        figures = {
            "passed": {each.name: each.seconds for each in self.passed},
            "failed": {each.name: each.text for each in self.failed},
            "skipped": [_told(each) for each in self.skipped],
            "left_out": [_told(each) for each in self.skipped_for_want],
        }
        return Outcome(name, Verdict.FAILED if bad else Verdict.PASSED, tuple(lines), figures)


def read_account(kept_reports: Path) -> Account:
    """Read the reports. Raises FileNotFoundError if pytest did not reach its first test."""
    kinds: dict[str, list[Kept]] = {"passed": [], "failed": [], "skipped": [], "wanting": []}
    for line in kept_reports.read_text().splitlines():
        kept = Kept(**json.loads(line))
        kinds["wanting" if kept.outcome == "skipped" and _MAY_SKIP.search(kept.text) else kept.outcome].append(kept)
    return Account(*(tuple(kinds[kind]) for kind in ("passed", "failed", "wanting", "skipped")))


def command(python: str, tests: Sequence[str], kept: Path, *, marker: str, num_processes: int) -> list[str]:
    several = ["-n", str(num_processes)] if num_processes > 1 else []
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "addopts=", "--tb=short", "--maxfail=40"]
    keeping = ["-p", "benchmarks.gpu_check.kept_reports", f"--keep-reports={kept}", f"--timeout={_TEST_TIMEOUT_S}"]
    return [python, "-m", "pytest", *several, *quiet, *keeping, "-m", marker, *tests]


def _told(kept: Kept) -> str:
    """Return one line: the reason of a skip, or the last line of the error itself."""
    errors = _ERROR_LINE.findall(kept.text)
    lines = [errors[0]] if errors else [line.strip() for line in kept.text.splitlines() if line.strip()]
    return f"{kept.name.removeprefix('tests/')}: {lines[-1] if lines else 'no reason given'}"[:300]
