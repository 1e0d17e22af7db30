"""Medians, intervals and tables of the starts. Pure."""

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.start.runs import Run

Runs = Mapping[str, Sequence[Run]]  # by arm; the runs of one round have the same index


def interval(values: Sequence[float]) -> str:
    """Return the median with the least and the most. Of five values, these enclose the true median in 94 of 100
    cases."""
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def totals(models: Mapping[str, Runs]) -> list[str]:
    """Return the table of all arms, with the ratios to the other arms, paired by round."""
    head = ["model", "start", "first token, s", "processor time, s", "of before", "of weights"]
    head += ["of before, processor", "of weights, processor"]
    lines = [_line(head), "|" + "---|" * len(head)]
    for model, runs in models.items():
        for arm, each in runs.items():
            cells = [model, arm, interval([run.wall_s for run in each]), interval([run.cpu_s for run in each])]
            ours = arm.removesuffix(" (before)")
            before, is_start = f"{ours} (before)", arm not in ("weights", f"{ours} (before)")
            has_before = is_start and before in runs
            cells.append(_ratios(each, runs[before], "wall_s") if has_before else "")
            cells.append(_ratios(each, runs["weights"], "wall_s") if is_start and "weights" in runs else "")
            cells.append(_ratios(each, runs[before], "cpu_s") if has_before else "")
            cells.append(_ratios(each, runs["weights"], "cpu_s") if is_start and "weights" in runs else "")
            lines.append(_line(cells))
    return lines


def phases(models: Mapping[str, Runs]) -> list[str]:
    """Return the table of the phases of `tandem up`, by model."""
    names = list(models)
    found = {model: [run.phases for run in runs["tandem up"]] for model, runs in models.items()}
    rows = list(dict.fromkeys(phase for each in found.values() for kept in each for phase in kept))
    lines = [_line(["phase", *names]), "|" + "---|" * (len(names) + 1)]
    for phase in rows:
        cells = [interval([kept[phase] for kept in found[model] if phase in kept] or [0.0]) for model in names]
        lines.append(_line([phase, *cells]))
    return lines


def _ratios(ours: Sequence[Run], theirs: Sequence[Run], figure: str) -> str:
    pairs = zip(ours, theirs, strict=True)
    return interval([getattr(one, figure) / getattr(other, figure) for one, other in pairs])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
