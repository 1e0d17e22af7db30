"""What a measurement of one pair of workers said, and whether something is wrong with it. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from cli.table import bytes_text, table
from kvtransfer.importer.pairs import DOES_NOT_REACH
from tandem.v1 import worker_pb2

_MUCH_FASTER = 1.5


@dataclass(frozen=True, slots=True)
class PathReport:
    transport: str
    bytes_per_s: float
    latency_s: float
    reason: str  # empty, or why it cannot be used

    @property
    def works(self) -> bool:
        return self.bytes_per_s > 0


@dataclass(frozen=True, slots=True)
class PairReport:
    """`paths` best first: the first that works is what hand-offs use. `error`: nothing could be measured."""

    importer: str
    exporter: str
    num_bytes: int
    paths: tuple[PathReport, ...]
    problems: tuple[str, ...]

    @property
    def chosen(self) -> str:
        return next((path.transport for path in self.paths if path.works), "")

    @property
    def advice(self) -> str:
        """Empty, or what could be set better."""
        first = next((path for path in self.paths if path.works), None)
        fastest = max((path for path in self.paths if path.works), key=lambda path: path.bytes_per_s, default=None)
        if first is None or fastest is None or fastest.bytes_per_s < _MUCH_FASTER * first.bytes_per_s:
            return ""
        others = [path.transport for path in self.paths if path.works and path is not fastest]
        return f"{fastest.transport} was faster here: --kv-transports {','.join([fastest.transport, *others])}"

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"chosen": self.chosen, "advice": self.advice}

    def as_text(self) -> str:
        rows = [_row(path, path.transport == self.chosen) for path in self.paths]
        heading = f"{self.importer} reads {self.exporter}"
        lines = [heading + (f", {bytes_text(self.num_bytes)} at most at once" if rows else "")]
        if rows:
            grid = table(("transport", "chosen", "GB/s", "latency", "why not"), rows)
            lines += ["  " + line for line in grid.splitlines()]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join([*lines, *([f"  {self.advice}"] if self.advice else [])])


def unmeasured(importer: str, exporter: str, problem: str) -> PairReport:
    return PairReport(importer, exporter, 0, (), (problem,))


def report(
    importer: str, exporter: str, answer: worker_pb2.MeasurePairResponse, *, shared: Collection[str]
) -> PairReport:
    """`shared`: transports that both say they have; one of these that reaches and still does not work is a problem."""
    paths = tuple(PathReport(path.transport, path.bytes_per_s, path.latency_s, path.reason) for path in answer.paths)
    return PairReport(importer, exporter, answer.num_bytes, paths, tuple(_problems(paths, shared)))


def _problems(paths: Sequence[PathReport], shared: Collection[str]) -> list[str]:
    broken = [path for path in paths if path.transport in shared and not path.works]
    problems = [f"{path.transport}: {path.reason}" for path in broken if DOES_NOT_REACH not in path.reason]
    if not any(path.works for path in paths):
        problems.append("no transport works between them: prompts are prefilled on the decode worker")
    return problems


def _row(path: PathReport, is_chosen: bool) -> tuple[str, ...]:
    if not path.works:
        return path.transport, "-", "-", "-", path.reason
    rate, latency = f"{path.bytes_per_s / 1e9:.2f}", f"{path.latency_s * 1e6:.0f} us"
    return path.transport, "yes" if is_chosen else "-", rate, latency, "" if is_chosen else "comes after"
