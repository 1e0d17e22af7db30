"""Measures running arms: a quiet cluster, the capacity, and points by turns."""

import asyncio
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from secrets import token_hex
from statistics import median

from benchmarks.placement.arms import RunningArm, alone
from benchmarks.placement.capacity import CapacitySearch, keeps_up, num_requests
from benchmarks.placement.cpu_time import cpu_time
from benchmarks.placement.figures.samples import ArmResult, Slo, percentiles_s, samples_of
from benchmarks.placement.generator import Generated, Job, generated_from_json, job_to_json
from benchmarks.placement.plan import Point, order, turns
from benchmarks.placement.predictions import prediction_errors
from benchmarks.placement.workload import Workload, even_arrivals, poisson_arrivals, sequential_arrivals
from cli.load import Arrival, Record
from cluster.process import die_with_parent

_ROOT = Path(__file__).parents[2]
_NUM_WARM_UP, _NUM_QUIET = 4, 8  # requests


@dataclass(frozen=True, slots=True)
class _Turn:
    """One arm's requests of one turn. Times of records count from the turn's begin."""

    records: tuple[Record, ...]
    planned_s: float
    took_s: float
    others_cpu: float
    generator_cpu_s: float
    late_s: float
    prediction_errors: dict[str, list[float]]


class Measuring:
    """Sends requests to running arms, one arm at a time. Each run of requests has its own prompts, the same for every
    arm."""

    def __init__(self, arms: Sequence[RunningArm], vocab_size: int) -> None:
        self._arms = arms
        self._vocab_size = vocab_size

    async def warm_up(self, workload: Workload) -> None:
        """Let every arm make what it makes at its first requests of such lengths."""
        for arm in self._arms:
            await self._run(arm, sequential_arrivals(workload, _NUM_WARM_UP), f"warm-up {workload.name}", "one_by_one")

    async def quiet(self, workload: Workload, arm: RunningArm) -> Slo:
        """Return the medians of requests sent one by one. Raises RuntimeError if one of them fails."""
        arrivals = sequential_arrivals(workload, _NUM_QUIET)
        generated = await self._run(arm, arrivals, f"quiet {workload.name}", "one_by_one")
        samples, errors = samples_of(generated.records)
        if errors:
            raise RuntimeError(f"{arm.name} failed requests of {workload.name} on a quiet cluster: {errors}")
        return Slo(median(each.ttft_s for each in samples), median(each.tpot_s for each in samples))

    async def capacity_rps(self, workload: Workload, arm: RunningArm, quiet: Slo) -> float:
        """Search for the highest rate of evenly spaced requests that the arm keeps up with."""
        quiet_s = quiet.ttft_s + quiet.tpot_s * (workload.output_tokens - 1)
        search = CapacitySearch(1 / quiet_s)
        while not search.is_ended:
            rate_rps = search.rate_rps
            arrivals = even_arrivals(workload, rate_rps, num_requests(rate_rps, quiet_s))
            generated = await self._run(arm, arrivals, f"capacity {workload.name} {rate_rps}", "planned")
            search.add(kept_up=keeps_up(generated.records, rate_rps, quiet_s))
        return search.capacity_rps

    async def point(self, point: Point, rate_rps: float) -> dict[str, ArmResult]:
        """Measure all arms in turns with the same arrivals."""
        by_name = {arm.name: arm for arm in self._arms}
        found: dict[str, list[_Turn]] = {name: [] for name in by_name}
        for number, count in enumerate(turns(point.num_requests)):
            name = f"{point.name} turn {number}"
            arrivals = poisson_arrivals(point.workload, rate_rps, count, Random(name))
            for arm in order(list(by_name), number):
                found[arm].append(await self._turn(by_name[arm], arrivals, name))
        return {name: _joined(each) for name, each in found.items()}

    async def _turn(self, arm: RunningArm, arrivals: Sequence[Arrival], name: str) -> _Turn:
        """Measure one turn. Raises RuntimeError if a process of the arm ended during it."""
        pids = arm.pids()
        begin = cpu_time(pids.values())
        prefix = f"{token_hex(8)}-"
        generated = await self._run(arm, arrivals, name, "planned", prefix)
        if arm.pids() != pids:
            raise RuntimeError(f"a process of {arm.name} ended during {name}")
        others = cpu_time(pids.values()).others_since(begin, generated.cpu_s)
        errors: dict[str, list[float]] = {}
        if arm.protocol == "tandem" and not arm.is_static:
            names = [f"{prefix}{number}" for number in range(len(arrivals))]
            errors = await prediction_errors(arm.address, arm.admin_key, names)
        planned_s = arrivals[-1].at_s
        return _Turn(generated.records, planned_s, generated.took_s, others, generated.cpu_s, generated.late_s, errors)

    async def _run(
        self, arm: RunningArm, arrivals: Sequence[Arrival], name: str, pace: str, prefix: str = ""
    ) -> Generated:
        seed = zlib.crc32(name.encode())
        job = Job(arm.protocol, arm.address, self._vocab_size, seed, pace, tuple(arrivals), prefix)
        with alone(arm, self._arms):
            return await run_generator(job)


async def run_generator(job: Job) -> Generated:
    """Run the load generator in a process of its own. Raises RuntimeError if it fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.placement.generator"),
        stdin=pipe,
        stdout=pipe,
        cwd=_ROOT,
        preexec_fn=die_with_parent,
    )
    try:
        answer, _ = await process.communicate(job_to_json(job).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the load generator ended with status {process.returncode}")
    return generated_from_json(answer.decode())


def _joined(turns: Sequence[_Turn]) -> ArmResult:
    records = list(chain.from_iterable(turn.records for turn in turns))
    samples, errors = samples_of(records)
    took_s = sum(turn.took_s for turn in turns)
    return ArmResult(
        samples=samples,
        errors=errors,
        itl_s=percentiles_s([gap for record in records if not record.error for gap in record.inter_token_s]),
        arrivals_s=sum(turn.planned_s for turn in turns),
        others_cpu=sum(turn.others_cpu * turn.took_s for turn in turns) / took_s,
        generator_cpu=sum(turn.generator_cpu_s for turn in turns) / took_s,
        late_s=max(turn.late_s for turn in turns),
        prediction_errors={
            name: [error for turn in turns for error in turn.prediction_errors[name]]
            for name in turns[0].prediction_errors
        },
    )
