"""What is checked, in order: each section is a program of its own, so that a crash of one leaves the others."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import tests_run
from benchmarks.gpu_check.report import Outcome, Verdict

HANDOFF_GOAL = 0.80  # of a plain device copy, 64 MB and more
DECODE_GOAL = 0.70  # of the copy's bandwidth
PREFILL_GOAL = 0.60  # of the rate of a large product


@dataclass(frozen=True, slots=True)
class Section:
    """`read` makes the outcome from the folder that `command` wrote into, and from what it printed: also of one that
    was cut at `budget_s`. Another status than these is a failure whatever it wrote.
    Those before it leave it `least_s`."""

    name: str
    command: tuple[str, ...]
    budget_s: float
    read: Callable[[Path, str], Outcome]
    statuses: frozenset[int] = frozenset({0})
    least_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Means:
    """`is_tiny`: everything in small on a CPU, to see that the check itself works."""

    python: str
    folder: Path
    is_tiny: bool

    @property
    def device(self) -> str:
        return "cpu" if self.is_tiny else "cuda"


def sections(means: Means) -> list[Section]:
    tiny = ("--tiny",) if means.is_tiny else ()
    bench = (means.python, "-m")
    transports = ("shm", "tcp") if means.is_tiny else ("cuda_ipc", "nccl", "nixl", "tcp")
    return [
        _tests(means, "Golden tokens, every attention back end", "golden", 90.0),
        _tests(means, "CUDA graphs and steady steps", "steady", 50.0),
        _tests(means, "Kernels, digests, NCCL, cuda_ipc", "kernels", 80.0),
        *(_handoff(means, transport) for transport in transports),
        Section(
            "An 8B Llama's shape",
            (*bench, "benchmarks.gpu_engine", *_folder(means), *tiny),
            100.0,
            _read_engine,
            least_s=60.0,
        ),
        Section(
            "A whole cluster, and kill -9",
            (*bench, "benchmarks.gpu_serving", *_folder(means), *tiny),
            300.0,  # whatever is left
            _read_serving,
            least_s=120.0,
        ),
    ]


_TESTS = {
    "golden": ("tests/cuda/test_golden.py", "tests/unit/test_attention.py"),
    "steady": ("tests/cuda/test_steady_steps.py", "tests/unit/test_fused_forward.py", "tests/unit/test_sampler.py"),
    "kernels": (
        "tests/unit/test_triton_paged.py",
        "tests/unit/test_digest_triton.py",
        "tests/unit/test_digest.py",
        "tests/unit/test_cuda_copy.py",
        "tests/unit/test_cuda_memory.py",
        "tests/unit/test_capacity.py",
        "tests/unit/test_wire_dtypes.py",
        "tests/contract/test_cuda_ipc.py",
        "tests/contract/test_nccl_wheels.py",
        "tests/contract/test_nixl.py",
    ),
}


def _tests(means: Means, title: str, group: str, budget_s: float) -> Section:
    """In small: what of the same files needs no GPU."""
    kept = f"{group}.jsonl"
    files = ("tests/unit/test_digest.py",) if means.is_tiny else _TESTS[group]
    command = tests_run.command(
        means.python,
        files,
        means.folder / kept,
        marker="not cuda and not slow" if means.is_tiny else "cuda and not slow",
        num_processes=1 if means.is_tiny else 8,
    )
    return Section(
        title,
        tuple(command),
        budget_s,
        lambda folder, _: tests_run.read_account(folder / kept).outcome(title),
        statuses=frozenset({0, 1}),  # pytest's: 1 says that a test failed, which its report says, too
    )


def _handoff(means: Means, transport: str) -> Section:
    title = f"Hand-off between two processes by {transport}"
    kept = means.folder / transport
    small = ("--quick",) if means.is_tiny else ()
    command = (
        *(means.python, "-m", "benchmarks.kv", "--device", means.device, "--transports", transport),
        *("--output", str(kept), "--keep", *small),
    )
    return Section(
        title, command, 40.0, lambda folder, said: _read_handoff(title, folder / transport, said, means.is_tiny)
    )


def _read_handoff(title: str, folder: Path, said: str, is_tiny: bool) -> Outcome:
    cells = json.loads((folder / "kv.json").read_text())["cells"]
    if not cells:
        reason = next((line for line in said.splitlines() if "is left out" in line), "left out")
        return Outcome(title, Verdict.ABSENT, (reason,))
    large = [cell for cell in cells if cell["num_bytes"] >= 64 << 20]
    worst, data_path = (
        min((cell["figures"][figure] for cell in large), default=0.0)
        for figure in ("hand_off_ratio", "data_path_ratio")
    )
    # The goal is that of memory on the device; what stages through the host is told, and judged by nobody.
    is_judged = "cuda_ipc" in title and not is_tiny
    verdict = Verdict.MISSED if is_judged and worst < HANDOFF_GOAL else Verdict.PASSED
    lines = (
        *(folder / "kv.md").read_text().splitlines()[6:],
        "",
        _goal("hand-off, 64 MB and more", worst, HANDOFF_GOAL),
        f"Of it the data path alone, nothing verified: {data_path:.0%}.",
    )
    return Outcome(title, verdict, lines, {"cells": cells, "worst_share": worst, "data_path_share": data_path})


def _read_engine(folder: Path, said: str) -> Outcome:
    (kept,) = sorted(folder.glob("engine-*.json"))
    result: dict[str, Any] = json.loads(kept.read_text())
    lines = tuple(kept.with_suffix(".md").read_text().splitlines()[2:])
    shares = {
        what: min((row["limit_share"] for row in result["rows"] if row["what"] == what), default=0.0)
        for what in ("prefill", "decode")
    }
    is_met = shares["decode"] >= DECODE_GOAL and shares["prefill"] >= PREFILL_GOAL
    goals = (_goal("decode", shares["decode"], DECODE_GOAL), _goal("prefill", shares["prefill"], PREFILL_GOAL))
    return Outcome(
        "An 8B Llama's shape",
        Verdict.PASSED if is_met else Verdict.MISSED,
        (*lines, "", *goals),
        result | {"worst": shares},
    )


def _read_serving(folder: Path, said: str) -> Outcome:
    figures = json.loads((folder / "serving.json").read_text())
    lost = sum(kill["lost"] for kill in figures["kills"])
    failed = sum(mode["conversations"]["requests"]["failed"] for mode in figures["modes"].values())
    errors = {name: mode["conversations"]["requests"]["errors"] for name, mode in figures["modes"].items()}
    lines = (
        *(folder / "serving.md").read_text().splitlines(),
        *([f"Failed conversations: {errors}."] if failed else []),
    )
    verdict = Verdict.FAILED if lost or failed else Verdict.PASSED
    return Outcome("A whole cluster, and kill -9", verdict, lines, figures)


def _folder(means: Means) -> tuple[str, ...]:
    return ("--output", str(means.folder))


def _goal(what: str, share: float, goal: float) -> str:
    return f"{what}: {share:.0%} of the limit at the worst size; goal {goal:.0%}."
