"""What the engine's benchmark measured: samples in turns, rates, ratios, and the table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.engine_limits import Limits
from benchmarks.engine_shapes import Load

_HEAD = (
    "| model | load | prefill tok/s | of limit | of vLLM | decode tok/s | of limit | of vLLM | ms per step |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds for one token of every sequence, and for all of them."""

    first_s: float
    all_s: float


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    load: Load
    limits: Limits
    samples: Mapping[str, Sequence[Sample]]  # by party

    def prefill_rate(self, party: str) -> float:
        """Prompt tokens per second."""
        return self.load.sequences * self.load.tokens_in / median(s.first_s for s in self.samples[party])

    def step_s(self, party: str) -> float:
        return median((s.all_s - s.first_s) / (self.load.tokens_out - 1) for s in self.samples[party])

    def decode_rate(self, party: str) -> float:
        return self.load.sequences / self.step_s(party)

    def line(self) -> str:
        prefill, decode = self.prefill_rate("tandem"), self.decode_rate("tandem")
        limit = self.load.sequences * self.load.tokens_in / self.limits.prefill_s
        has_vllm = "vllm" in self.samples
        columns = [
            self.model,
            self.load.name,
            f"{prefill:.0f}",
            f"{prefill / limit:.2f}",
            f"{prefill / self.prefill_rate('vllm'):.2f}" if has_vllm else "-",
            f"{decode:.0f}",
            f"{self.limits.step_s / self.step_s('tandem'):.2f}",
            f"{decode / self.decode_rate('vllm'):.2f}" if has_vllm else "-",
            f"{self.step_s('tandem') * 1e3:.1f}",
        ]
        return "| " + " | ".join(columns) + " |"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def as_markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    lines = [
        "# Engine on one core",
        "",
        f"{about['processor']}, {about['kernel']}; torch {about['torch']}; commit {about['commit']}.",
        "bfloat16, random weights, medians of samples taken in turns. The limit of prefill is the best matrix rate,",
        "that of decode the bare packed products and one reading of the KV; both on the same core, in the same run.",
        "",
        _HEAD,
        *(row.line() for row in rows),
    ]
    return "\n".join(lines) + "\n"
