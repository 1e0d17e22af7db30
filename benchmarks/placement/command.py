"""Runs the measurement: it reads the kept results, measures the points that are left, and writes the page."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.engine.shapes import MODELS
from benchmarks.machine import about
from benchmarks.placement.arms import RunningArm, Served, auto_arm, skipped, static_arm, vllm_arm
from benchmarks.placement.figures.log import (
    Calibration,
    PointResult,
    calibration_of,
    latest,
    measured_code,
    read_log,
    to_line,
)
from benchmarks.placement.figures.page import page
from benchmarks.placement.figures.verdict import AUTO, STATIC, VLLM
from benchmarks.placement.measure import Measuring
from benchmarks.placement.plan import Point, ShareOfCapacity, full_plan, left_to_do, quick_plan, selected
from benchmarks.placement.workload import Workload
from cli.verbs.clusters.up import DEMO_MODEL

_ROOT = Path(__file__).parents[2]
_RESULTS = Path("benchmarks/results")
_FLAGS = ("--max-num-seqs", "64", "--num-threads", "1")
_FULL_FLAGS = ("--load-format", "dummy", "--dtype", "bfloat16", "--kv-cache-memory", "1GiB")
_QUICK_FLAGS = ("--num-blocks", "512")


@dataclass(frozen=True, slots=True)
class _Kept:
    """The files with the results so far. Owns both. `is_quick`: any code may run, committed or not."""

    folder: Path
    code: str
    is_quick: bool

    @property
    def results(self) -> list[PointResult]:
        return latest(self.read()[1], self.code)

    def read(self) -> tuple[list[Calibration], list[PointResult]]:
        return read_log(self._log.read_text().splitlines()) if self._log.exists() else ([], [])

    def append(self, result: Calibration | PointResult) -> None:
        """Append a line to the log. Raises RuntimeError if the code is no longer the one that the results are for."""
        if not self.is_quick and (_changed() or _present_code() != self.code):
            raise RuntimeError("the code changed while it was measured; the point is not kept")
        with self._log.open("a") as file:
            file.write(to_line(result))

    def write_page(self, num_planned: int) -> str:
        text = page(self.results, num_planned)
        (self.folder / "placement.md").write_text(text)
        return text

    @property
    def _log(self) -> Path:
        return self.folder / "placement.jsonl"


@dataclass(frozen=True, slots=True)
class _Run:
    """The work of one command. `folder` is for files that are deleted when it ends."""

    kept: _Kept
    served: Served
    folder: Path
    todo: Sequence[Point]
    num_planned: int
    arms: Sequence[str]
    skipped: dict[str, str]
    vllm_python: str
    note: str

    async def measure(self) -> None:
        async with AsyncExitStack() as stack:
            lasting = []
            for name in STATIC:
                lasting.append(await stack.enter_async_context(static_arm(name, self.served, self.folder)))
            if VLLM in self.arms:
                lasting.append(await stack.enter_async_context(vllm_arm(self.served, self.vllm_python)))
            print(f"==> {', '.join(arm.name for arm in lasting)} are ready", flush=True)
            for workload, points in groupby(self.todo, lambda point: point.workload):
                await self._workload(workload, list(points), lasting)

    async def _workload(self, workload: Workload, points: Sequence[Point], lasting: Sequence[RunningArm]) -> None:
        """Calibrate the static arms unless the log has it, start `auto` with the SLO, and measure the points."""
        measuring = Measuring(lasting, self.served.vocab_size)
        await measuring.warm_up(workload)
        with_capacity = any(isinstance(point.offered, ShareOfCapacity) for point in points)
        calibration = calibration_of(self.kept.read()[0], self.kept.code, workload.name, with_capacity=with_capacity)
        if calibration is None:
            print(f"==> {workload.name}: quiet latencies" + (" and capacity" if with_capacity else ""), flush=True)
            static = [arm for arm in lasting if arm.is_static]
            calibration = await _calibrate(workload, measuring, static, self.kept.code, with_capacity=with_capacity)
            self.kept.append(calibration)
        async with AsyncExitStack() as stack:
            arms = list(lasting)
            if AUTO in self.arms:
                auto = await stack.enter_async_context(auto_arm(self.served, self.folder, calibration.slo))
                await Measuring([auto], self.served.vocab_size).warm_up(workload)
                arms.append(auto)
            for point in points:
                await self._point(point, calibration, arms)

    async def _point(self, point: Point, calibration: Calibration, arms: Sequence[RunningArm]) -> None:
        rate_rps = point.offered.rate_rps(max(calibration.capacity_rps.values(), default=0.0))
        print(f"==> {point.name}: {point.num_requests} requests per arm at {rate_rps:.2f}/s", flush=True)
        result = PointResult(
            code=self.kept.code,
            about=about(),
            point=point.name,
            num_requests=point.num_requests,
            rate_rps=rate_rps,
            slo=calibration.slo,
            arms=await Measuring(arms, self.served.vocab_size).point(point, rate_rps),
            flags={arm.name: arm.flags for arm in arms},
            skipped=self.skipped,
            note=self.note,
        )
        self.kept.append(result)
        self.kept.write_page(self.num_planned)


async def _calibrate(
    workload: Workload, measuring: Measuring, static: Sequence[RunningArm], code: str, *, with_capacity: bool
) -> Calibration:
    quiet = {arm.name: await measuring.quiet(workload, arm) for arm in static}
    searched = static if with_capacity else []
    capacity = {arm.name: await measuring.capacity_rps(workload, arm, quiet[arm.name]) for arm in searched}
    return Calibration(code, workload.name, quiet, capacity)


def main() -> int:
    arguments = _arguments()
    if not arguments.quick and (changed := _changed()):
        sys.stderr.write(f"bench-placement: commit first, or the results would name code that did not run: {changed}\n")
        return 2
    plan = quick_plan() if arguments.quick else full_plan()
    wanted = selected(plan, arguments.only, arguments.requests)
    reasons = skipped(arguments.vllm_python)
    arms = [name for name in (*STATIC, AUTO, VLLM) if name not in reasons]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        output: Path = arguments.output or (folder if arguments.quick else _ROOT / _RESULTS)
        kept = _Kept(output, _present_code(), is_quick=arguments.quick)
        todo = left_to_do(wanted, kept.read()[1], kept.code, arms)
        print(f"{len(wanted) - len(todo)} of {len(wanted)} points are done for code {kept.code}", flush=True)
        if todo:
            run = _Run(
                kept=kept,
                served=_served(folder, plan, is_quick=arguments.quick),
                folder=folder,
                todo=todo,
                num_planned=len(plan),
                arms=arms,
                skipped=reasons,
                vllm_python=arguments.vllm_python,
                note=arguments.note,
            )
            asyncio.run(run.measure())
        if kept.results:
            print(kept.write_page(len(plan)))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-placement")
    parser.add_argument("--only", default="", metavar="TEXT", help="only points whose name contains this")
    parser.add_argument("--requests", type=int, metavar="N", help="requests per arm and point (default: as planned)")
    parser.add_argument("--note", default="", help="a sentence for the results, such as what else ran")
    parser.add_argument("--quick", action="store_true", help="one small point with the demo model, kept in --output")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=f"folder of the results (default: {_RESULTS})")
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON", ""), help="Python of vLLM's environment")
    return parser.parse_args()


def _served(folder: Path, plan: Sequence[Point], *, is_quick: bool) -> Served:
    longest = max(point.workload.longest for point in plan)
    model = DEMO_MODEL if is_quick else MODELS[0].save(folder / MODELS[0].name)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    flags = (*_FLAGS, *(_QUICK_FLAGS if is_quick else _FULL_FLAGS), "--max-model-len", str(longest))
    return Served(model, vocab_size, longest, flags)


def _present_code() -> str:
    return measured_code(_git("ls-tree", "-r", "HEAD"))


def _changed() -> str:
    """Return the tracked files that differ from the commit, except results."""
    lines = _git("status", "--porcelain", "--untracked-files=no").splitlines()
    return ", ".join(line[3:] for line in lines if not line[3:].startswith(str(_RESULTS)))


def _git(*arguments: str) -> str:
    return subprocess.run(("git", "-C", str(_ROOT), *arguments), check=True, capture_output=True, text=True).stdout
