"""The log of repeated test runs: its lines, and the runs that remain. Pure.

One JSON object per line, appended when a run has ended. An interrupted run leaves no line and is repeated.
"""

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256

RESULTS = "benchmarks/results/"  # the folder of the log, which is not part of the code


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    runs: int  # how many of them are wanted
    paths: tuple[str, ...]  # no path: the whole suite
    is_loaded: bool  # a busy loop for each core runs beside it


KINDS = (
    Kind("quiet", 5, (), is_loaded=False),
    Kind("loaded", 5, (), is_loaded=True),
    Kind("loaded-system", 20, ("tests/system", "tests/chaos"), is_loaded=True),
)


@dataclass(frozen=True, slots=True)
class Failure:
    test: str
    line: str  # the first one of its message


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result in pytest's JUnit file."""

    counts: dict[str, int]  # by outcome: passed, failed, error, skipped
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Run:
    commit: str
    code: str  # of all files but results: a commit that adds to the log is the same code
    kind: str
    started: str  # UTC, ISO 8601
    duration_s: float
    seed: int  # of pytest-randomly
    exit_status: int  # of pytest; 0: green
    counts: dict[str, int]
    failures: tuple[Failure, ...]

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read_log(lines: Iterable[str]) -> list[Run]:
    """Read a log. Raises ValueError or TypeError for a line that is not a run."""
    return [_run(json.loads(line)) for line in lines if line.strip()]


def _run(fields: dict[str, object]) -> Run:
    failures = fields.pop("failures")
    assert isinstance(failures, list)
    return Run(**fields, failures=tuple(Failure(**failure) for failure in failures))  # type: ignore[arg-type]


def left_to_do(log: Iterable[Run], code: str, kinds: Iterable[Kind]) -> list[Kind]:
    """Return one entry per missing run, in the order of `kinds`. A failed run counts as done; a new commit starts
    again."""
    done = Counter(run.kind for run in log if run.code == code)
    return [kind for kind in kinds for _ in range(kind.runs - done[kind.name])]


def code_digest(tree: str) -> str:
    """Return the digest of the lines of `git ls-tree -r HEAD`: mode, type, object, tab, path."""
    lines = [line for line in tree.splitlines() if not line.partition("\t")[2].startswith(RESULTS)]
    return sha256("\n".join(lines).encode()).hexdigest()[:12]


def read_junit(text: str) -> Outcome:
    """Read a JUnit file. Raises xml.etree.ElementTree.ParseError if it is incomplete."""
    counts, failures = Counter[str](), []
    for case in ElementTree.fromstring(text).iter("testcase"):
        verdict = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if verdict is None else {"failure": "failed"}.get(verdict.tag, verdict.tag)
        counts[outcome] += 1
        if verdict is not None and verdict.tag != "skipped":
            failures.append(Failure(_name(case.attrib), verdict.get("message", "").partition("\n")[0]))
    return Outcome(dict(counts), tuple(failures))


def _name(attributes: Mapping[str, str]) -> str:
    return f"{attributes.get('classname', '')}::{attributes.get('name', '')}"
