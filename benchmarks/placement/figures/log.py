"""The kept results: one JSON object per line, appended when it is complete. Pure.

An interrupted point leaves no line and is measured again. Seconds are rounded to tenths of a millisecond.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from benchmarks.placement.figures.samples import ArmResult, Sample, Slo

_PRODUCT = ("tandem/", "cluster/", "engine/", "kvtransfer/", "prefill_worker/", "decode_worker/", "worker/", "router/")
_MEASURING = ("cli/", "benchmarks/placement/", "benchmarks/engine/", "constraints.txt")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The latencies of one workload on a quiet cluster, and the rate of it that each static arm sustains."""

    code: str
    workload: str
    quiet: dict[str, Slo]  # medians by static arm, of requests sent one by one
    capacity_rps: dict[str, float]  # by static arm; empty if no point needs it

    @property
    def slo(self) -> Slo:
        """Return three times the quiet TTFT and twice the quiet TPOT of the static arm that is better in each."""
        quiet = self.quiet.values()
        return Slo(3 * min(each.ttft_s for each in quiet), 2 * min(each.tpot_s for each in quiet))


@dataclass(frozen=True, slots=True)
class PointResult:
    """All arms at one point."""

    code: str
    about: dict[str, str]  # the machine, versions and commit: benchmarks/machine.py
    point: str
    num_requests: int  # per arm
    rate_rps: float
    slo: Slo
    arms: dict[str, ArmResult]
    flags: dict[str, str]  # how each arm was started
    skipped: dict[str, str]  # arms that did not run, with the reason
    note: str = ""


def to_line(result: Calibration | PointResult) -> str:
    fields = _rounded(asdict(result))
    if isinstance(result, PointResult):
        for name, arm in result.arms.items():
            fields["arms"][name]["samples"] = [_rounded(list(asdict(sample).values())) for sample in arm.samples]
    return json.dumps({"kind": type(result).__name__, **fields}) + "\n"


def read_log(lines: Iterable[str]) -> tuple[list[Calibration], list[PointResult]]:
    """Read a log. Raises ValueError, KeyError or TypeError for a line that is no result."""
    calibrations, points = [], []
    for fields in (json.loads(line) for line in lines if line.strip()):
        kind = fields.pop("kind")
        if kind == Calibration.__name__:
            quiet = {arm: Slo(**each) for arm, each in fields.pop("quiet").items()}
            calibrations.append(Calibration(**fields, quiet=quiet))
        elif kind == PointResult.__name__:
            arms = {name: _arm(each) for name, each in fields.pop("arms").items()}
            points.append(PointResult(**fields | {"slo": Slo(**fields["slo"])}, arms=arms))
        else:
            raise ValueError(f"a line of the log is a {kind}")
    return calibrations, points


def measured_code(tree: str) -> str:
    """Return the digest of the lines of `git ls-tree -r HEAD` whose files the figures depend on: the product and this
    benchmark, but no tests, results or pages."""
    paths = ((line, line.partition("\t")[2]) for line in tree.splitlines())
    lines = [line for line, path in paths if path.startswith(_PRODUCT + _MEASURING) and not path.endswith(".md")]
    return sha256("\n".join(lines).encode()).hexdigest()[:12]


def calibration_of(log: Iterable[Calibration], code: str, workload: str, *, with_capacity: bool) -> Calibration | None:
    """Return the latest calibration of a workload for this code, None if there is none or it lacks the capacity."""
    found = [each for each in log if (each.code, each.workload) == (code, workload)]
    return next((each for each in reversed(found) if each.capacity_rps or not with_capacity), None)


def latest(log: Iterable[PointResult], code: str) -> list[PointResult]:
    """Return the last result of each point for this code."""
    return list({result.point: result for result in log if result.code == code}.values())


def _arm(fields: Mapping[str, Any]) -> ArmResult:
    samples = tuple(Sample(*values) for values in fields["samples"])
    return ArmResult(**{**fields, "samples": samples})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
