"""Turn the files of a section into an outcome: whether the goal is met, and the report. Accepts incomplete results."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import Outcome, Verdict

HANDOFF_GOAL = 0.80  # of a plain device copy, 64 MB and more
DECODE_GOAL = 0.70  # of the copy's bandwidth
PREFILL_GOAL = 0.60  # of the rate of a large product
_STARTS_LINES = 40  # of each process: which attention, which graphs, how much KV


def read_handoff(title: str, folder: Path, said: str, is_tiny: bool) -> Outcome:
    cells = json.loads((folder / "kv.json").read_text())["cells"]
    if not cells:
        reasons = [line for line in said.splitlines() if "is left out" in line]
        if not reasons:
            raise LookupError("nothing was measured")
        return Outcome(title, Verdict.ABSENT, tuple(reasons))
    large = [cell for cell in cells if cell["num_bytes"] >= 64 << 20]
    worst, data_path = (
        min((cell["figures"][figure] for cell in large), default=0.0)
        for figure in ("hand_off_ratio", "data_path_ratio")
    )
    # The goal is that of device memory. Transports that stage through the host are reported without a goal.
    is_judged = "cuda_ipc" in title and not is_tiny
    verdict = Verdict.MISSED if is_judged and worst < HANDOFF_GOAL else Verdict.PASSED
    lines = (
        *(folder / "kv.md").read_text().splitlines()[6:],
        "",
        _goal("hand-off, 64 MB and more", worst, HANDOFF_GOAL),
        f"Of it the data path alone, nothing verified: {data_path:.0%}.",
    )
    figures = {"cells": cells, "worst_share": worst, "data_path_share": data_path}
    if (folder / "digests.json").exists():
        lines = (*lines, "", *(folder / "digests.md").read_text().splitlines())
        figures["digests"] = json.loads((folder / "digests.json").read_text())
    return Outcome(title, verdict, lines, figures)


def read_engine(folder: Path, said: str) -> Outcome:
    (kept,) = sorted(folder.glob("engine-*.json"))
    result: dict[str, Any] = json.loads(kept.read_text())
    lines = tuple(kept.with_suffix(".md").read_text().splitlines()[2:])
    shares = {
        what: min((row["limit_share"] for row in result["rows"] if row["what"] == what), default=0.0)
        for what in ("prefill", "decode")
    }
    is_met = shares["decode"] >= DECODE_GOAL and shares["prefill"] >= PREFILL_GOAL  # what was not measured is not met
    goals = (_goal("decode", shares["decode"], DECODE_GOAL), _goal("prefill", shares["prefill"], PREFILL_GOAL))
    return Outcome(
        "A Llama's shape",
        Verdict.PASSED if is_met else Verdict.MISSED,
        (*lines, "", *goals),
        result | {"worst": shares},
    )


def read_serving(folder: Path, said: str) -> Outcome:
    figures = json.loads((folder / "serving.json").read_text())
    talks = {mode: found["conversations"] for mode, found in figures["modes"].items() if "conversations" in found}
    lost = sum(kill["lost"] for kill in figures["kills"])
    failed = sum(talk["requests"]["failed"] for talk in talks.values())
    ended = {mode: found["ended_early"] for mode, found in figures["modes"].items() if "ended_early" in found}
    lines = [*(folder / "serving.md").read_text().splitlines()]
    lines += [f"Failed conversations: { {mode: talk['requests']['errors'] for mode, talk in talks.items()} }."] * bool(
        failed
    )
    lines += [f"**{mode} ended early: {why}**" for mode, why in ended.items()]
    starts = {log.name: log.read_text(errors="replace").splitlines()[:_STARTS_LINES] for log in folder.glob("*.log")}
    verdict = Verdict.FAILED if lost or failed or ended or figures["problem"] else Verdict.PASSED
    return Outcome("A whole cluster, and kill -9", verdict, tuple(lines), figures | {"first_lines": starts})


def _goal(what: str, share: float, goal: float) -> str:
    found = f"{share:.0%} of the limit at the worst size" if share else "not measured"
    return f"{what}: {found}; goal {goal:.0%}."
