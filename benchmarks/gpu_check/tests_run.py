"""The tests marked `cuda`, run by pytest in a process of their own, and what their account says.

On a machine with a GPU a test that skips has not been run: that is a failure, unless what it lacks is a wheel.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.report import Outcome, Verdict

# What a skip's reason says when a wheel, a second GPU or a newer library is what it lacks.
_MAY_SKIP = re.compile(
    r"could not import|cannot be imported|needs the extra|No module named|not installed|two GPUs|need NCCL", re.I
)


@dataclass(frozen=True, slots=True)
class Account:
    """Of one run of pytest. Names as pytest gives them, with the reason or the first line of the error."""

    num_passed: int
    failed: tuple[str, ...]
    skipped_for_want: tuple[str, ...]
    skipped: tuple[str, ...]

    def outcome(self, name: str) -> Outcome:
        bad = bool(self.failed or self.skipped or not self.num_passed)
        lines = [
            f"{self.num_passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped without a right to."
        ]
        lines += [f"- **failed** {each}" for each in self.failed]
        lines += [f"- **skipped** {each}" for each in self.skipped]
        lines += [f"- left out: {each}" for each in sorted(set(self.skipped_for_want))]
        figures = {
            "passed": self.num_passed,
            "failed": self.failed,
            "skipped": self.skipped,
            "left_out": self.skipped_for_want,
        }
        return Outcome(name, Verdict.FAILED if bad else Verdict.PASSED, tuple(lines), figures)


def read_account(junit: Path) -> Account:
    """From pytest's JUnit file. Raises FileNotFoundError where pytest did not get so far."""
    num_passed = 0
    failed: list[str] = []
    wanting: list[str] = []
    skipped: list[str] = []
    for case in ET.parse(junit).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        bad = [child for child in case if child.tag in ("failure", "error")]
        skip = case.find("skipped")
        if bad:
            failed.append(f"{name}: {_first_line(bad[0].get('message', ''))}")
        elif skip is not None:
            reason = _first_line(skip.get("message", ""))
            (wanting if _MAY_SKIP.search(reason) else skipped).append(f"{name}: {reason}")
        else:
            num_passed += 1
    return Account(num_passed, tuple(failed), tuple(wanting), tuple(skipped))


def command(python: str, tests: Sequence[str], junit: Path, *, marker: str, num_processes: int) -> list[str]:
    several = ["-n", str(num_processes)] if num_processes > 1 else []
    quiet = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--maxfail=20", f"--junitxml={junit}"]
    return [python, "-m", "pytest", *several, *quiet, "-m", marker, *tests]


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:300]
