"""Measure what the limit on prompts beside running sequences does: the time between tokens of eight sequences, and the
time to first token and rate of prompts that arrive meanwhile, with and without the limit.

One process with one thread: a real engine in float32 with the shape of a small model and random weights, and the real
scheduler. Prompts arrive for export, as on a worker that decodes and also computes prompts for others. Each round runs
both ways on one engine with the same arrivals, in alternating order. The clock is the CPU time of the thread, so other
processes hardly count.

    python -m benchmarks.itl_protection [--write]
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.shapes import MODELS
from benchmarks.machine import about
from cluster.messages import DecodeJob, MemberId, PrefillJob, Sampling, SequenceStart, TokenStops
from cluster.protocol.hashing import nameless_chains
from cluster.service_times import ServiceTimes, TimedStep
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.commands import AdmitExport, AdmitLocal, Event, ExportFinished, Release
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.timing.service_time_fit import ServiceTimeFit, step_work
from engine.timing.steps_at_load import time_steps

_RESULTS = Path(__file__).parent / "results"
_NUM_RUNNING, _MAX_CHUNK, _MAX_MODEL_LEN, _BLOCK_SIZE = 8, 512, 4096, 16
_SAMPLING, _TIMEOUT_S = Sampling(), 1e6


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of one round."""

    num_tokens: int  # of each prompt
    number: int  # of prompts
    load: float  # the share of the worker's time that the prompts would need alone


_WORKLOADS = (Workload(512, 12, 0.3), Workload(512, 12, 0.5), Workload(2048, 5, 0.3), Workload(2048, 5, 0.5))


@dataclass(slots=True)
class Measured:
    """One round of one way. Times in seconds."""

    itl_s: list[float] = field(default_factory=list)  # of all steps, from the start to the end of the last prompt
    ttft_s: list[float] = field(default_factory=list)
    prompts_per_s: float = 0.0  # while there were prompts


@dataclass(slots=True)
class Samples:
    """All rounds of one workload; the rounds of both ways with the same number had the same arrivals."""

    workload: Workload
    alone_s: float  # predicted, for one prompt on a worker without sequences
    unlimited: list[Measured] = field(default_factory=list)
    limited: list[Measured] = field(default_factory=list)


class _Round:
    """Eight sequences decode while prompts arrive, until all prompts are computed."""

    def __init__(self, engine: Engine, fit: ServiceTimeFit, *, is_limited: bool) -> None:
        self._engine, self._fit = engine, fit
        limits = SchedulerLimits(
            num_blocks=engine.pool.num_blocks,
            block_size=_BLOCK_SIZE,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=64,
            max_prefill_tokens=_MAX_CHUNK,
            max_queue=256,
        )
        times: Callable[[], ServiceTimes | None] = (lambda: fit.times) if is_limited else (lambda: None)
        self._scheduler = SequenceScheduler(limits, new_chain=nameless_chains(), times=times)
        self._dice = random.Random(1)

    def run(self, arrivals_s: Sequence[float], num_prompt: int) -> Measured:
        measured = Measured()
        for handle in range(_NUM_RUNNING):
            self._scheduler.apply(AdmitLocal(self._running(handle)), time.thread_time())
        for _ in range(_NUM_RUNNING + 4):  # the first steps compute the prompts of these sequences
            self._step()
        began_s, due = time.thread_time(), list(enumerate(arrivals_s))[::-1]
        waiting: dict[bytes, float] = {}
        busy_s = 0.0
        while due or waiting:
            now_s = time.thread_time()
            while due and began_s + due[-1][1] <= now_s:
                number, arrived_s = due.pop()
                waiting[b"%d" % number] = began_s + arrived_s
                self._scheduler.apply(AdmitExport(b"%d" % number, self._export(number, num_prompt)), now_s)
            is_busy = bool(waiting)
            events, ended_s = self._step()
            measured.itl_s.append(ended_s - now_s)
            busy_s += is_busy * (ended_s - now_s)
            for event in events:
                if isinstance(event, ExportFinished):
                    measured.ttft_s.append(ended_s - waiting.pop(event.ticket_id))
                    self._scheduler.apply(Release(event.ticket_id), ended_s)
        measured.prompts_per_s = len(arrivals_s) / busy_s
        return measured

    def _step(self) -> tuple[tuple[Event, ...], float]:
        began_s = time.thread_time()
        _, plan = self._scheduler.plan(began_s)
        assert plan is not None, "the running sequences never end"
        result = self._engine.runner.run(plan)
        ended_s = time.thread_time()
        work = step_work(plan)
        assert work is not None, "nothing is swapped"
        self._fit.add(TimedStep(work, ended_s - began_s))
        return self._scheduler.complete(plan, result, ended_s), ended_s

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._dice.randrange(10, 10_000) for _ in range(num_tokens))

    def _running(self, handle: int) -> DecodeJob:
        stops = TokenStops(_MAX_MODEL_LEN - 64)
        start = SequenceStart(handle, seed=handle)
        return DecodeJob(
            f"r{handle}", 0, MemberId("router", "1"), self._prompt(64), _SAMPLING, stops, (start,), None, _TIMEOUT_S
        )

    def _export(self, number: int, num_prompt: int) -> PrefillJob:
        prompt, stops = self._prompt(num_prompt), TokenStops(64)
        return PrefillJob(f"e{number}", 0, prompt, _SAMPLING, stops, (number,), 0, None, _TIMEOUT_S)


def measure(folder: Path, num_rounds: int) -> list[Samples]:
    settings = EngineSettings(
        model=str(folder),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        kv_cache_memory="2GiB",
        max_model_len=_MAX_MODEL_LEN,
        num_threads=1,
    )
    engine = build_engine(settings)
    engine.pool.raw.fill_(0)  # pages that were never touched would be counted into the first round
    fit = ServiceTimeFit()
    try:
        fit.start(time_steps(engine, engine.runner, 64))
        assert fit.times is not None
        times = fit.times
        found = [Samples(work, times.prompt_s(work.num_tokens, 0, _MAX_CHUNK)) for work in _WORKLOADS]
        for number in range(num_rounds):
            for samples in found:
                _measure_both(engine, fit, samples, number)
        return found
    finally:
        engine.pool.close()


def _measure_both(engine: Engine, fit: ServiceTimeFit, samples: Samples, number: int) -> None:
    """Run one round of both ways with the same arrivals; odd rounds begin with the limit."""
    workload, dice = samples.workload, random.Random(number)
    gaps_s = (dice.expovariate(workload.load / samples.alone_s) for _ in range(workload.number))
    arrivals_s = tuple(accumulate(gaps_s))
    for is_limited in (False, True) if number % 2 == 0 else (True, False):
        measured = _Round(engine, fit, is_limited=is_limited).run(arrivals_s, workload.num_tokens)
        (samples.limited if is_limited else samples.unlimited).append(measured)


def _page(found: Sequence[Samples], machine: dict[str, str]) -> str:
    lines = [
        "# Prompts beside running sequences, with and without the limit",
        "",
        f"`python -m benchmarks.itl_protection --write`, {machine['date']}, commit {machine['commit']},",
        f"{machine['processor']}, torch {machine['torch']}, one thread, float32, {MODELS[0].name}'s shape with random",
        f"weights; load average {machine['load']}. {_NUM_RUNNING} sequences decode while prompts arrive at random for",
        "export. *Load*: the share of the worker's time that the prompts would need alone. Both ways in turns on one",
        f"engine with the same arrivals, {len(found[0].limited)} rounds, by the CPU time of the thread that computes.",
        "Each figure is the median over the rounds; a ratio is the median of limited over unlimited.",
        "*Rate*: prompts per second while there are prompts.",
        "",
        "| prompts | load | prompts beside running sequences | between tokens, p50 / p99 / max, ms | TTFT, p50 / max, s"
        " | rate |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        ways = (("chunks of 512", one.unlimited), ("1.5 x a quiet step, more with age", one.limited))
        for name, rounds in ways:
            shown = f"{one.workload.num_tokens} tokens, {one.alone_s:.2f} s alone | {one.workload.load} | {name}"
            itl = " / ".join(f"{1000 * median(_itl(rounds, q)):.0f}" for q in (0.5, 0.99, 1.0))
            ttft = " / ".join(f"{median(_ttft(rounds, q)):.2f}" for q in (0.5, 1.0))
            lines.append(f"| {shown} | {itl} | {ttft} | {median(_rates(rounds)):.2f} |")
        itl = " / ".join(f"{_ratio(_itl(one.limited, q), _itl(one.unlimited, q)):.2f}" for q in (0.5, 0.99, 1.0))
        ttft = " / ".join(f"{_ratio(_ttft(one.limited, q), _ttft(one.unlimited, q)):.2f}" for q in (0.5, 1.0))
        rate = _ratio(_rates(one.limited), _rates(one.unlimited))
        lines.append(f"| | | ratio | {itl} | {ttft} | {rate:.2f} |")
    return "\n".join(lines) + "\n"


def _itl(rounds: Sequence[Measured], q: float) -> list[float]:
    return [_quantile(one.itl_s, q) for one in rounds]


def _ttft(rounds: Sequence[Measured], q: float) -> list[float]:
    return [_quantile(one.ttft_s, q) for one in rounds]


def _rates(rounds: Sequence[Measured]) -> list[float]:
    return [one.prompts_per_s for one in rounds]


def _ratio(values: Sequence[float], bases: Sequence[float]) -> float:
    return median(value / base for value, base in zip(values, bases, strict=True))


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[round(q * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each workload and way (default: 5)")
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    arguments = parser.parse_args()
    machine = about()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(MODELS[0].save(Path(directory) / MODELS[0].name), arguments.rounds)
    machine["load"] = f"{os.getloadavg()[2]:.1f}"
    page = _page(found, machine)
    if arguments.write:
        stored = {"about": machine, "samples": [_rounded(asdict(one)) for one in found]}
        (_RESULTS / "itl_protection.json").write_text(json.dumps(stored) + "\n")
        (_RESULTS / "itl_protection.md").write_text(page)
    print(page)


def _rounded(value: Any) -> Any:
    """Round every time to 10 us."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
