"""The results of a GPU check, section by section. Each section is printed and stored as it ends."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    MISSED = "missed its goal"  # it works, slower than was asked for
    ABSENT = "not here"  # a wheel or a device that it needs is missing
    CUT = "cut off"  # the time was up


@dataclass(frozen=True, slots=True)
class Outcome:
    """One section. `lines`: Markdown for people. `figures`: the same and more, for programs."""

    name: str
    verdict: Verdict
    lines: tuple[str, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Report:
    """Owns the two files. Each `add` rewrites them as a whole."""

    def __init__(self, folder: Path, about: Mapping[str, str]) -> None:
        self._folder = folder
        self._about = about
        self._outcomes: list[Outcome] = []
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        print("\n".join(_section(outcome)), flush=True)
        (self._folder / "gpu_check.json").write_text(
            json.dumps({"about": self._about, "sections": [asdict(each) for each in self._outcomes]}, indent=1) + "\n"
        )
        (self._folder / "gpu_check.md").write_text(as_markdown(self._about, self._outcomes))

    @property
    def has_failed(self) -> bool:
        return any(outcome.verdict in (Verdict.FAILED, Verdict.CUT) for outcome in self._outcomes)


def as_markdown(about: Mapping[str, str], outcomes: list[Outcome]) -> str:
    lines = [
        "# gpu-check",
        "",
        "; ".join(f"{name} {value}" for name, value in about.items()),
        "",
        "| section | | seconds |",
        "|---|---|---|",
        *(f"| {outcome.name} | {outcome.verdict} | {outcome.seconds:.0f} |" for outcome in outcomes),
    ]
    for outcome in outcomes:
        lines += _section(outcome)
    return "\n".join(lines) + "\n"


def _section(outcome: Outcome) -> list[str]:
    return ["", f"## {outcome.name}: {outcome.verdict}", "", *outcome.lines]
