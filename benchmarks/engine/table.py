"""Samples, rates, ratios, goals and tables of the engine's benchmark. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.engine.limits import Limits
from benchmarks.engine.shapes import Load

_OURS, _THEIRS = "tandem", "vllm"


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
    parts: Mapping[str, float] = field(default_factory=dict)  # median seconds of a decode step, by part

    def prefill_rate(self, party: str) -> float:
        """Prompt tokens per second."""
        return self._prompt_tokens / median(s.first_s for s in self.samples[party])

    def step_s(self, party: str) -> float:
        return median((s.all_s - s.first_s) / (self.load.tokens_out - 1) for s in self.samples[party])

    def decode_rate(self, party: str) -> float:
        return self.load.sequences / self.step_s(party)

    @property
    def prefill_goal(self) -> float:
        """The lower of 1.1 of vLLM and 90 % of the limit, in tokens per second."""
        return min(0.9 * self.prefill_limit, *self._of_theirs(self.prefill_rate, 1.1))

    @property
    def decode_goal(self) -> float:
        """The lower of 1.5 of vLLM (2 where few sequences run) and 80 % of the limit."""
        return min(
            0.8 * self.decode_limit, *self._of_theirs(self.decode_rate, 2.0 if self.load.sequences <= 4 else 1.5)
        )

    @property
    def prefill_limit(self) -> float:
        return self._prompt_tokens / self.limits.prefill_s

    @property
    def decode_limit(self) -> float:
        return self.load.sequences / self.limits.step_s

    @property
    def _prompt_tokens(self) -> int:
        return self.load.sequences * self.load.tokens_in

    def _of_theirs(self, rate: Callable[[str], float], factor: float) -> tuple[float, ...]:
        none = (float("inf"),)
        return (factor * rate(_THEIRS),) if _THEIRS in self.samples else none

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rates_table(rows: Sequence[Row], phase: str) -> list[str]:
    """Return the table of tokens per second of every engine for one phase (prefill or decode), with Tandem's share of
    the limit, of each other engine and of the goal."""
    others = list(dict.fromkeys(party for row in rows for party in row.samples if party != _OURS))
    head = ["model", "load", "Tandem", "limit", "of limit", *(f"{name}" for name in others)]
    head += [f"of {name}" for name in others] + ["of goal"]
    lines = [_line(head), "|" + "---|" * len(head)]
    for row in rows:
        rate = row.prefill_rate if phase == "prefill" else row.decode_rate
        limit = row.prefill_limit if phase == "prefill" else row.decode_limit
        goal = row.prefill_goal if phase == "prefill" else row.decode_goal
        ours = rate(_OURS)
        theirs = [rate(name) if name in row.samples else None for name in others]
        cells = [row.model, row.load.name, f"{ours:.0f}", f"{limit:.0f}", f"{ours / limit:.2f}"]
        cells += ["-" if other is None else f"{other:.0f}" for other in theirs]
        cells += ["-" if other is None else f"{ours / other:.2f}" for other in theirs]
        lines.append(_line([*cells, f"{ours / goal:.2f}"]))
    return lines


def steps_table(rows: Sequence[Row]) -> list[str]:
    """Return the table of the parts of a decode step, in milliseconds."""
    head = [
        "model",
        "load",
        "whole step",
        "forward",
        "pack",
        "draw",
        "rest of the step thread",
        "streams, router",
    ]
    lines = [_line([*head, "limit", "bare products (oneDNN)"]), "|" + "---|" * (len(head) + 2)]
    for row in rows:
        if not row.parts:
            continue
        step_s, thread_s = row.step_s(_OURS), sum(row.parts.values())
        named = [row.parts[part] for part in ("forward", "pack", "draw")]
        figures = [step_s, *named, thread_s - sum(named), step_s - thread_s]
        figures += [row.limits.step_s, row.limits.products_s]
        lines.append(_line([row.model, row.load.name, *(f"{1e3 * figure:.2f}" for figure in figures)]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
