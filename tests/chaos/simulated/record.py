"""What runs of many seeds found, kept: raw figures in benchmarks/results, and the table of docs/faults.md.

Runs at the same commit are added up, so that ten thousand seeds may come in pieces. Counts; judges nothing.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import about
from tests.chaos.simulated.schedule import KINDS, Phase

_ROOT = Path(__file__).parents[3]
_RESULTS = _ROOT / "benchmarks" / "results" / "chaos_simulated.json"
_PAGE = _ROOT / "docs" / "faults.md"
_BEGIN, _END = "<!-- simulated: begin -->", "<!-- simulated: end -->"
_SETTLED = ("prefill", Phase.DECODING)  # a prefill worker holds nothing of a request by then


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

    def told(self) -> Iterator[str]:
        for name, number in sorted((self.outcomes | self.hit).items()):
            yield f"{number:10} {name}"
        yield (
            f"{self.num_seeds} schedules in {self.seconds:.1f} s: {self.num_seeds / self.seconds * 60:.0f} a minute by"
            f" the clock, {self.num_seeds / self.cpu_s * 60:.0f} a minute of one core,"
            f" {self.num_events / self.cpu_s:.0f} events per second of one core; {len(self.wrong)} went wrong"
        )


def write(run: Run) -> None:
    machine, runs = about(), list[dict[str, Any]]()
    if _RESULTS.exists():
        before = json.loads(_RESULTS.read_text())
        runs = before["runs"] if before["machine"]["commit"] == machine["commit"] else []
    runs = [*(other for other in runs if other["first"] != run.first), dataclasses.asdict(run)]
    _RESULTS.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    page = _PAGE.read_text()
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _PAGE.write_text(f"{before}{_BEGIN}\n{_as_markdown(machine, runs)}{_END}{after}")


def _as_markdown(machine: dict[str, str], runs: Sequence[dict[str, Any]]) -> str:
    num_seeds, cpu_s = (sum(run[name] for run in runs) for name in ("num_seeds", "cpu_s"))
    outcomes, hit = Counter[str](), Counter[str]()
    for run in runs:
        outcomes.update(run["outcomes"])
        hit.update(run["hit"])
    wrong = [seed for run in runs for seed in run["wrong"]]
    ends = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    lines = [
        f"{num_seeds} seeds, commit {machine['commit']}, {machine['processor']}: {num_seeds / cpu_s * 60:.0f} schedules"
        f" a minute of one core; the quickest run made {max(map(_pace, runs)):.0f} a minute by the clock, the slowest"
        f" {min(map(_pace, runs)):.0f}, beside whatever else ran. Requests: {ends}."
        f" Seeds that went wrong: {', '.join(map(str, wrong)) or 'none'}.",
        "",
        "How often a mishap came while its victim held a request in the phase:",
        "",
        "| mishap | " + " | ".join(Phase) + " | at a time |",
        "| --- |" + " ---: |" * (len(Phase) + 1),
    ]
    for role, kinds in KINDS.items():
        for kind in dict.fromkeys(kinds):
            cells = [_cell(hit, role, kind, phase) for phase in (*Phase, "")]
            lines.append(f"| {role} {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _pace(run: dict[str, Any]) -> float:
    return float(run["num_seeds"] / run["seconds"] * 60)


def _cell(hit: Counter[str], role: str, kind: str, phase: str) -> str:
    """Redis holds no request: it is harmed at times. Nothing to hit: a dash; never hit: 0."""
    is_possible = (role, phase) != _SETTLED and (role != "redis" or not phase)
    return str(hit[hit_name(role, kind, phase)]) if is_possible else "–"


def hit_name(role: str, kind: str, phase: str) -> str:
    return f"{role} {kind}: {phase}" if phase else f"{role} {kind}"
