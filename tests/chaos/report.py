"""The report of a run: a table by fault, and the raw rounds. Counts only; rounds are judged elsewhere."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import about
from tests.chaos.accounts import ProcessUse
from tests.chaos.plan import GOALS_S, ROLES, all_faults
from tests.chaos.rounds import RoundResult

_ROOT = Path(__file__).parents[2]
_RESULTS = _ROOT / "benchmarks" / "results" / "chaos.json"
_PAGE = _ROOT / "benchmarks" / "results" / "faults.md"
_BEGIN, _END = "<!-- chaos: begin -->", "<!-- chaos: end -->"
_COLUMNS = (
    "fault", "rounds", "requests", "affected", "lost", "repeated", "missing", "other tokens", "leaked blocks",
    "recovery p50", "p99", "detection and hand-over p50", "p99",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal for detection and hand-over in 99 of 100 cases."""

    name: str
    limit_s: float
    reached_s: float
    num_waits: int

    @property
    def is_met(self) -> bool:
        return self.reached_s <= self.limit_s

    def __str__(self) -> str:
        judged = "met" if self.is_met else "MISSED"
        waits = f"p99 of {self.num_waits} waits {self.reached_s:.2f} s"
        return f"{self.name}: {waits}, goal {self.limit_s:g} s: {judged}"


@dataclass(frozen=True, slots=True)
class Run:
    seed: int
    num_planned: int
    results: tuple[RoundResult, ...]
    missing: dict[str, str]  # kinds that cannot be done here, and why
    broken: str  # what ended the run early
    seconds: float
    exits: dict[str, int]
    longest: dict[str, tuple[ProcessUse, ProcessUse, int]]

    @property
    def covered(self) -> tuple[RoundResult, ...]:
        return tuple(result for result in self.results if result.is_covered)

    @property
    def is_good(self) -> bool:
        return not self.broken and bool(self.covered) and all(result.is_right for result in self.results)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Return the promised times for every process that this run has killed or stopped."""
        goals = []
        for kind, limit_s in GOALS_S.items():
            for role in ROLES:
                found = [one for one in self.covered if one.fault.startswith(f"{kind}:{role}")]
                handovers = [time_s for one in found for time_s in one.handover_s]
                reached_s = _percentile(handovers, 0.99)
                if reached_s is not None:
                    goals.append(Goal(f"{kind} {role}", limit_s, reached_s, len(handovers)))
        return tuple(goals)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Return the faults of which no round met its victim in the phase."""
        met = {result.fault for result in self.covered}
        return tuple(fault.name for fault in all_faults() if fault.name not in met)

    def as_table(self) -> str:
        lines = [_row(_COLUMNS), _row(["---"] + ["---:"] * (len(_COLUMNS) - 1))]
        groups: dict[str, list[RoundResult]] = {}
        for fault in all_faults():
            found = [result for result in self.covered if result.fault == fault.name]
            if found:
                groups.setdefault(f"{fault.kind} {fault.role}".strip().replace("_", " "), []).extend(found)
        for name, results in groups.items():
            lines.append(_row([name, *_figures(results)]))
        lines.append(_row(["**all**", *_figures(self.covered)]))
        return "\n".join(lines) + "\n"

    def as_markdown(self) -> str:
        machine = about()
        own = sum(len(result.own_streams) for result in self.covered)
        uncovered = self.not_covered
        missing = "; ".join(f"{kind}: {why}" for kind, why in self.missing.items())
        num_phases = len({result.fault for result in self.covered})
        lines = [
            f"`python -m tests.chaos --rounds {self.num_planned} --seed {self.seed}`, commit {machine['commit']},"
            f" {machine['processor']}, {self.seconds / 60:.0f} minutes: {len(self.covered)} rounds in which the victim"
            f" held a request as the plan says, {len(self.results) - len(self.covered)} in which it could not be met,"
            f" {num_phases} of {len(all_faults())} faults.",
            "",
            self.as_table(),
            "Recovery is the longest wait for a token, from the fault to the end of each affected request, in seconds."
            " Detection and hand-over is that wait without the part of it in which a worker queued or computed the"
            " request, by the ledgers of the answers; HTTP does not tell them. Streams of clients that knew one router"
            f" only and ended with it, counted apart: {own}.",
            "",
            "Goals of detection and hand-over:",
            "",
            *(f"- {goal}" for goal in self.goals),
            "",
            "Not covered: "
            + (", ".join(uncovered) if uncovered else "nothing")
            + "."
            + (f" Not possible there: {missing}." if missing else "")
            + (f" The run ended early: {self.broken}." if self.broken else ""),
            "",
            "| the process that lived longest | looks | MB, first and last | files | threads |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, (first, last, num_looks) in self.longest.items():
            lines.append(
                f"| {name} | {num_looks} | {first.rss_mb:.0f}, {last.rss_mb:.0f} | {first.files}, {last.files} |"
                f" {first.threads}, {last.threads} |"
            )
        return "\n".join(lines) + "\n"


def write(run: Run) -> None:
    """Write benchmarks/results/chaos.json, and the table between the markers of benchmarks/results/faults.md."""
    rounds = [dataclasses.asdict(result) for result in run.results]
    record = {
        "machine": about(),
        "seed": run.seed,
        "rounds": rounds,
        "seconds": round(run.seconds, 1),
        "missing": run.missing,
        "broken": run.broken,
        "goals": [str(goal) for goal in run.goals],
        "not_covered": run.not_covered,
        "exits": run.exits,
    }
    _RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    page = _PAGE.read_text()
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _PAGE.write_text(f"{before}{_BEGIN}\n{run.as_markdown()}{_END}{after}")


def _figures(results: Sequence[RoundResult]) -> list[str]:
    sums = [
        sum(getattr(result, name) for result in results)
        for name in ("requests", "affected", "lost", "repeated", "missing", "mismatches", "leaked_blocks")
    ]
    waits = [wait_s for result in results for wait_s in result.recovery_s]
    handovers = [wait_s for result in results for wait_s in result.handover_s]
    times = [_percentile(times_s, share) for times_s in (waits, handovers) for share in (0.5, 0.99)]
    return [str(len(results)), *map(str, sums), *(f"{time_s:.2f}" if time_s is not None else "" for time_s in times)]


def _percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile, or None without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
