"""Samples, figures computed from them, and the table that is printed and stored."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Cell:
    """One transport and shape. Samples in seconds, taken in turns."""

    transport: str
    shape: str
    num_bytes: int
    limits_s: Mapping[str, Sequence[float]]  # by what it was that ran
    data_path_s: Sequence[float]
    verified_s: Sequence[float]
    hand_off_s: Sequence[float]

    @property
    def best_limit(self) -> str:
        return min(self.limits_s, key=lambda name: median(self.limits_s[name]))

    @property
    def limit_s(self) -> float:
        return median(self.limits_s[self.best_limit])

    def ratio(self, samples_s: Sequence[float]) -> float:
        """Return the ratio to the limit; 1 is equally fast."""
        return self.limit_s / median(samples_s)

    def gb_per_s(self, seconds: float) -> float:
        return self.num_bytes / seconds / 1e9

    def figures(self) -> dict[str, Any]:
        return {
            "limit": self.best_limit,
            "limit_gb_per_s": self.gb_per_s(self.limit_s),
            "read_us": median(self.data_path_s) * 1e6,
            "hand_off_us": median(self.hand_off_s) * 1e6,
        } | {
            f"{name}_{figure}": value
            for name, samples_s in (
                ("data_path", self.data_path_s),
                ("verified", self.verified_s),
                ("hand_off", self.hand_off_s),
            )
            for figure, value in (("gb_per_s", self.gb_per_s(median(samples_s))), ("ratio", self.ratio(samples_s)))
        }


def as_json(cells: Sequence[Cell], about: Mapping[str, str]) -> str:
    lines = [asdict(cell) | {"figures": cell.figures()} for cell in cells]
    return json.dumps({"about": about, "cells": lines}, indent=1) + "\n"


def as_markdown(cells: Sequence[Cell], about: Mapping[str, str]) -> str:
    """Return the table, headed by the machine and commit."""
    lines = [
        "# KV transports",
        "",
        f"{about['processor']}, {about['kernel']}; commit {about['commit']}, {about['date']}.",
        "Exporter and importer are two processes on this machine. GB/s (1e9 bytes) are medians of samples taken",
        "in turns; in brackets the ratio to the limit. The last two columns are the durations of a read without",
        "verification and of a whole hand-off.",
        "",
        "| transport | size | limit | | data path | verified | hand-off | a read takes | a hand-off takes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(cell) for cell in cells]
    return "\n".join(lines) + "\n"


def _line(cell: Cell) -> str:
    def figure(samples_s: Sequence[float]) -> str:
        return f"{cell.gb_per_s(median(samples_s)):.2f} ({cell.ratio(samples_s):.2f})"

    columns = [
        f"`{cell.transport}`",
        cell.shape,
        f"{cell.gb_per_s(cell.limit_s):.2f}",
        cell.best_limit,
        figure(cell.data_path_s),
        figure(cell.verified_s),
        figure(cell.hand_off_s),
        _duration(median(cell.data_path_s)),
        _duration(median(cell.hand_off_s)),
    ]
    return "| " + " | ".join(columns) + " |"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
