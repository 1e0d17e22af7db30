"""The result of a soak, whether it is good, and its report."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_MAX_GROWTH = 1.05


@dataclass
class Soak:
    fault_rate: float
    seed: int
    machine: str
    num_busy_loops: int = 0  # other processes, each of which uses all it gets of a core
    seconds: float = 0.0
    num_answers: int = 0
    num_wrong: int = 0
    num_failed: int = 0
    errors: list[str] = field(default_factory=list)  # the first few
    faults: dict[str, int] = field(default_factory=dict)  # injected, by kind
    reasons: dict[str, int] = field(default_factory=dict)  # in the ledgers of the answers
    rss_mb: dict[str, list[float]] = field(default_factory=dict)  # by member, sampled evenly
    descriptors: dict[str, list[int]] = field(default_factory=dict)
    members_lost: list[str] = field(default_factory=list)  # ended by themselves: no member is killed in this run
    false_suspicions: float = 0.0  # workers that a router suspected although none was stopped
    hedges: float = 0.0  # requests that were begun elsewhere too for that
    blocks_left: dict[str, dict[str, int]] = field(default_factory=dict)  # neither free nor cached at the end

    @property
    def growth(self) -> dict[str, float]:
        """Return by member the median memory of the last quarter divided by that of the second."""
        return {name: _growth(samples) for name, samples in self.rss_mb.items()}

    @property
    def is_good(self) -> bool:
        is_flat = all(ratio < _MAX_GROWTH for ratio in self.growth.values())
        is_whole = not (self.num_wrong or self.num_failed or self.members_lost or any(self.blocks_left.values()))
        is_calm = not (self.false_suspicions or self.hedges)
        return is_flat and is_whole and is_calm and bool(self.faults) and self.num_answers > 0

    def as_markdown(self) -> str:
        rate = self.num_answers / self.seconds if self.seconds else 0.0
        lines = [
            "# Soak: full rate, with reads that go wrong",
            "",
            f"`make soak`, {self.seconds:.0f} s, seed {self.seed}, {self.machine}.",
            f"Faults in {self.fault_rate:.0%} of all reads; {self.num_busy_loops} busy loops beside the cluster.",
            f"**{'good' if self.is_good else 'NOT GOOD'}**",
            "",
            f"- answers: {self.num_answers} ({rate:.1f} a second), wrong {self.num_wrong}, failed {self.num_failed}",
            f"- members that ended by themselves: {', '.join(self.members_lost) or 'none'}",
            f"- false suspicions: {self.false_suspicions:g}; hedges: {self.hedges:g}",
            f"- blocks left: {sum(sum(left.values()) for left in self.blocks_left.values())}",
            f"- faults injected: {_told(self.faults)}",
            f"- reasons in the answers' ledgers: {_told(self.reasons)}",
            "",
            "| member | MB, second quarter | MB, last quarter | ratio | descriptors, first and last |",
            "|---|---|---|---|---|",
        ]
        for name, samples in self.rss_mb.items():
            before, after = _quarters(samples)
            files = self.descriptors[name]
            ratio = self.growth[name]
            lines.append(f"| {name} | {before:.0f} | {after:.0f} | {ratio:.3f} | {files[0]}, {files[-1]} |")
        return "\n".join([*lines, *(f"- {error}" for error in self.errors)]) + "\n"


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _quarters(samples: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the second and of the last quarter."""
    length = max(1, len(samples) // 4)
    second = samples[length : 2 * length] or samples
    return statistics.median(second), statistics.median(samples[-length:])


def _growth(samples: Sequence[float]) -> float:
    before, after = _quarters(samples)
    return after / before
