"""Renders the kept results as Markdown. Pure."""

from collections.abc import Mapping, Sequence

from benchmarks.placement.figures import verdict
from benchmarks.placement.figures.intervals import Share
from benchmarks.placement.figures.log import PointResult
from benchmarks.placement.figures.samples import ArmResult, Slo
from benchmarks.placement.plan import ENOUGH_FOR_P99
from cli.load import percentile

_HEAD = (
    "arm",
    "TTFT p50 / p90 / p99",
    "ITL p50 / p99",
    "TPOT p50 / p90",
    "second token p50 / p90",
    "within SLO (95 %)",
    "goodput /s",
    "failed",
    "others' CPU",
)
_LATE_S = 0.005


def page(results: Sequence[PointResult], num_planned: int) -> str:
    """`results`: the latest of each point; at least one."""
    about = results[-1].about
    flags = {arm: text for result in results for arm, text in result.flags.items()}
    lines = ["# Placement: separate pools, colocated workers and `auto`", "", *_about(about, flags), ""]
    skipped = {arm: reason for arm, reason in results[-1].skipped.items() if arm not in flags}
    lines += [f"- **{arm} was skipped**: {reason}." for arm, reason in skipped.items()]
    lines += ["", f"{len(results)} of {num_planned} points are measured.", "", *_verdict(results)]
    for result in results:
        lines += ["", *_point(result)]
    return "\n".join(lines) + "\n"


def _about(about: Mapping[str, str], flags: Mapping[str, str]) -> list[str]:
    return [
        f"{about['processor']}, {about['kernel']}; torch {about['torch']}.",
        "",
        "Two workers of one thread each serve the shape of SmolLM2-135M in bfloat16 with random weights. Requests",
        "arrive at random times (Poisson) that do not depend on earlier requests, and every latency counts from the",
        "planned arrival. All arms get the same requests in turns of one run, and begin each turn empty. The load",
        "generator is a process of its own with a higher priority than the workers, because time that it waits for a",
        "core would count as the cluster's.",
        "",
        "SLO: three times the TTFT and twice the time per output token (TPOT) of a quiet cluster, of the better static",
        "arm. Capacity: the highest rate of evenly spaced requests that the better static arm keeps up with. Goodput:",
        "requests within the SLO per second of planned arrivals. Others' CPU: cores used by everything else, idle arms",
        f"included. Latencies are in milliseconds. A p99 of TTFT is shown from {ENOUGH_FOR_P99} requests on, else the",
        "maximum. Requests that queue together are not independent: true intervals are somewhat wider.",
        "",
        *(f"- {arm}: `{text}`" for arm, text in flags.items()),
    ]


def _verdict(results: Sequence[PointResult]) -> list[str]:
    lines = ["## Verdict", ""]
    words = {True: "met", False: "**missed**", None: "not measured"}
    lines += [f"- {goal.text}: {words[goal.is_met]}{_found(goal.found)}." for goal in verdict.goals(results)]
    return [*lines, "", *_behind(results), "", *_static(results)]


def _found(text: str) -> str:
    return f" ({text})" if text else ""


def _behind(results: Sequence[PointResult]) -> list[str]:
    found = verdict.auto_against_better(results)
    if not found:
        return ["`auto` was measured at no point."]
    behind = [each for each in found if each.is_behind]
    lines = [f"`auto` is behind the better static arm at {len(behind)} of {len(found)} points."]
    return lines + [f"- {'**lost**' if each.is_lost else 'within the interval'}: {_gap(each)}" for each in behind]


def _static(results: Sequence[PointResult]) -> list[str]:
    lines = ["Static arms, the worse one at each point:", ""]
    for each in verdict.static_arms(results):
        lines.append(f"- {'loses' if each.is_lost else 'no clear difference'}: {_gap(each)}")
    return lines


def _gap(comparison: verdict.Comparison) -> str:
    low, high = comparison.interval
    return (
        f"{comparison.point}: {comparison.arm} {comparison.mine.value:.0%} within the SLO against"
        f" {comparison.its.value:.0%} of {comparison.other} (difference {100 * low:+.0f} to {100 * high:+.0f} points)"
    )


def _point(result: PointResult) -> list[str]:
    slo = result.slo
    lines = [
        f"## {result.point}",
        "",
        f"{result.num_requests} requests per arm at {result.rate_rps:.2f}/s; SLO: TTFT {_ms(slo.ttft_s)}, TPOT"
        f" {_ms(slo.tpot_s)}. Commit {result.about['commit']}, {result.about['date']}.",
    ]
    lines += [result.note] if result.note else []
    lines += [_late(name, arm) for name, arm in result.arms.items() if arm.late_s > _LATE_S]
    lines += ["", _row(_HEAD), "|" + "---|" * len(_HEAD)]
    lines += [_row(_cells(name, arm, slo)) for name, arm in result.arms.items()]
    return lines + [line for name, arm in result.arms.items() for line in _predicted(name, arm)]


def _predicted(name: str, arm: ArmResult) -> list[str]:
    shown = [
        f"{what.upper()} {percentile(values, 0.5):.0%} / {percentile(values, 0.9):.0%}"
        for what, values in arm.prediction_errors.items()
        if values
    ]
    return ["", f"Predictions of {name}, median / p90 of the relative error: {', '.join(shown)}."] if shown else []


def _late(name: str, arm: ArmResult) -> str:
    return f"**The load generator was late** by {_ms(arm.late_s)} ms (p99) for {name}: its latencies are too high."


def _cells(name: str, arm: ArmResult, slo: Slo) -> list[str]:
    ttft, tpot, second = (arm.percentiles_s(field) for field in ("ttft_s", "tpot_s", "second_s"))
    is_enough = arm.num_requests >= ENOUGH_FOR_P99
    tail = _shown(ttft, "p99") if is_enough else f"(max {_shown(ttft, 'max')})"
    failed = ", ".join(f"{count} {reason}" for reason, count in arm.errors.items()) or "0"
    return [
        name,
        f"{_shown(ttft, 'p50')} / {_shown(ttft, 'p90')} / {tail}",
        f"{_shown(arm.itl_s, 'p50')} / {_shown(arm.itl_s, 'p99')}",
        f"{_shown(tpot, 'p50')} / {_shown(tpot, 'p90')}",
        f"{_shown(second, 'p50')} / {_shown(second, 'p90')}",
        _share(arm.attainment(slo)),
        f"{arm.goodput_rps(slo):.2f}",
        failed,
        f"{arm.others_cpu:.2f}",
    ]


def _share(share: Share) -> str:
    low, high = share.interval
    return f"{share.value:.0%} ({100 * low:.0f} to {100 * high:.0f})"


def _shown(values: Mapping[str, float], name: str) -> str:
    return _ms(values[name]) if name in values else "-"


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
