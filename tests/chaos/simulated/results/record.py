"""The results of runs of many seeds: raw figures, coverage tables and a summary, all in benchmarks/results.

Runs at the same commit and of the same distribution of schedules are added up, so that twenty thousand seeds may come
in chunks and an interrupted run continues. Counts only.
"""

import dataclasses
import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import about
from tests.chaos.simulated.results.coverage import known
from tests.chaos.simulated.results.failover_rows import ELSEWHERE, reached
from tests.chaos.simulated.schedules.mishaps import KINDS, Phase
from tests.chaos.simulated.schedules.schedule import DISTRIBUTION

_ROOT = Path(__file__).parents[4]
RESULTS = _ROOT / "benchmarks" / "results" / "chaos_simulated.json"
_TABLES = _ROOT / "benchmarks" / "results" / "chaos_simulated.md"
_PAGE = _ROOT / "benchmarks" / "results" / "faults.md"
_BEGIN, _END = "<!-- simulated: begin -->", "<!-- simulated: end -->"
_SETTLED = ("prefill", Phase.DECODING)  # a prefill worker holds nothing of a request by then
_PER = 1000


@dataclass(frozen=True, slots=True)
class Run:
    first: int
    num_seeds: int
    num_processes: int
    seconds: float
    cpu_s: float
    num_events: int
    wrong: tuple[int, ...]  # seeds
    outcomes: dict[str, int]  # of requests
    hit: dict[str, int]  # "role, kind, phase": how often it came while its victim held a request in that phase
    reached: dict[str, int]  # coverage, as coverage.py names it

    def summary(self) -> str:
        return (
            f"{self.num_seeds} schedules in {self.seconds:.1f} s: {self.num_seeds / self.seconds * 60:.0f} a minute by"
            f" the clock, {self.num_seeds / self.cpu_s * 60:.0f} a minute of one core,"
            f" {self.num_events / self.cpu_s:.0f} events per second of one core; {len(self.wrong)} went wrong"
        )


def total(runs: Sequence[Run]) -> Run:
    """Add up runs."""
    return Run(
        first=min(run.first for run in runs),
        num_seeds=sum(run.num_seeds for run in runs),
        num_processes=max(run.num_processes for run in runs),
        seconds=sum(run.seconds for run in runs),
        cpu_s=sum(run.cpu_s for run in runs),
        num_events=sum(run.num_events for run in runs),
        wrong=tuple(sorted(seed for run in runs for seed in run.wrong)),
        outcomes=_sum(run.outcomes for run in runs),
        hit=_sum(run.hit for run in runs),
        reached=_sum(run.reached for run in runs),
    )


def coverage(run: Run) -> Iterator[str]:
    """Return lines that say how often each name was reached per thousand schedules."""
    counts = dict.fromkeys(known(), 0) | run.reached | run.hit
    counts |= {f"row of failover.md: {row}": number for row, number in reached(counts).items()}
    counts |= {f"request: {outcome}": number for outcome, number in run.outcomes.items()}
    for name, number in sorted(counts.items()):
        yield f"{number * _PER / run.num_seeds:10.1f} {name}"


def kept() -> list[Run]:
    """Return the runs of the present commit and distribution."""
    if not RESULTS.exists():
        return []
    before = json.loads(RESULTS.read_text())
    if (before["machine"]["commit"], before.get("distribution")) != (_commit(), DISTRIBUTION):
        return []
    return [Run(**run | {"wrong": tuple(run["wrong"])}) for run in before["runs"]]


def keep(run: Run) -> None:
    """Add a run to those of the same commit and distribution; runs of others are dropped."""
    machine = about() | {"commit": _commit()}
    runs = sorted((*(other for other in kept() if other.first != run.first), run), key=lambda each: each.first)
    fields = {"machine": machine, "distribution": DISTRIBUTION, "runs": [dataclasses.asdict(each) for each in runs]}
    RESULTS.write_text(json.dumps(fields, indent=1) + "\n")
    whole = total(runs)
    _TABLES.write_text(_tables(machine, whole))
    page = _PAGE.read_text()
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _PAGE.write_text(f"{before}{_BEGIN}\n{_summary(machine, whole)}{_END}{after}")


def _commit() -> str:
    """Return the commit, followed by a plus if code has changed since. Results and pages do not count, because a run in
    pieces writes them."""
    commands = (("git", "rev-parse", "--short=10", "HEAD"), ("git", "status", "--porcelain", "--", "*.py", "*.proto"))
    head, changes = (
        subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for command in commands
    )
    return head + "+" * bool(changes)


def _summary(machine: dict[str, str], run: Run) -> str:
    counts = dict.fromkeys(known(), 0) | run.reached
    unreached = [name for name, number in counts.items() if not number]
    ends = ", ".join(f"{number} {outcome}" for outcome, number in sorted(run.outcomes.items()))
    lines = [
        f"{run.num_seeds} seeds from {run.first} on, distribution {DISTRIBUTION}, commit {machine['commit']},"
        f" {machine['processor']}: {run.num_seeds / run.cpu_s * 60:.0f} schedules a minute of one core."
        f" Requests: {ends}. Seeds that went wrong: {', '.join(map(str, run.wrong)) or 'none'}.",
        "",
        "How often schedules reached each row of [failover.md](../../docs/failover.md), per 1,000 seeds"
        " ([all figures](chaos_simulated.md)):",
        "",
        *_row_table(run),
        "",
        f"Of {len(known())} transitions and reasons {len(unreached)} were not reached:"
        f" {', '.join(unreached) or 'none'}.",
    ]
    return "\n".join(lines) + "\n"


def _row_table(run: Run) -> Iterator[str]:
    yield "| what fails | per 1,000 seeds |"
    yield "| --- | ---: |"
    for row, number in reached(run.reached | run.hit).items():
        count = f"`{ELSEWHERE[row]}`" if row in ELSEWHERE else f"{number * _PER / run.num_seeds:.1f}"
        yield f"| {row} | {count} |"


def _tables(machine: dict[str, str], run: Run) -> str:
    lines = [
        "# Coverage of the simulated clusters",
        "",
        f"Written by `python -m tests.chaos.simulated --write`: {run.num_seeds} seeds from {run.first} on, distribution"
        f" {DISTRIBUTION}, commit {machine['commit']}.",
        "",
        "## Faults, by the phase of a request that their victim held",
        "",
        "| fault | " + " | ".join(Phase) + " | at a time |",
        "| --- |" + " ---: |" * (len(Phase) + 1),
    ]
    for role, kinds in KINDS.items():
        for kind in dict.fromkeys(kinds):
            cells = [_cell(run.hit, role, kind, phase) for phase in (*Phase, "")]
            lines.append(f"| {role} {kind} | " + " | ".join(cells) + " |")
    lines += ["", f"## Transitions and reasons, per {_PER} seeds", "", "| what | times |", "| --- | ---: |"]
    counts = dict.fromkeys(known(), 0) | run.reached
    lines += [f"| {name} | {number * _PER / run.num_seeds:.1f} |" for name, number in sorted(counts.items())]
    return "\n".join(lines) + "\n"


def _cell(hit: Mapping[str, int], role: str, kind: str, phase: str) -> str:
    """Return a table cell. A dash: the victim cannot hold a request in that phase. Faults of Redis are at times,
    because Redis holds no request."""
    is_possible = (role, phase) != _SETTLED and (role != "redis" or not phase)
    return str(hit.get(hit_name(role, kind, phase), 0)) if is_possible else "–"


def hit_name(role: str, kind: str, phase: str) -> str:
    return f"{role} {kind}: {phase}" if phase else f"{role} {kind}"


def _sum(counts: Iterator[dict[str, int]]) -> dict[str, int]:
    added = Counter[str]()
    for each in counts:
        added.update(each)
    return dict(added)
