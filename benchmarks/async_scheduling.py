"""Measure how long a device waits for the host between decode steps, with and without steps planned ahead.

Scheduler, step loop and packing are the production code, with their real costs on this machine. The device is
simulated: a step takes a fixed time from its launch, or from the end of the step before it. Measured time is the CPU
time of the step thread plus its waits for the device, which are skipped, so other processes do not matter. Copies,
launches and drawing cost the host nothing here, and no other thread needs the interpreter, so a real device waits
longer in both modes.
"""

import argparse
import json
import random
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.machine import about
from cluster.messages import DecodeJob, MemberId, Sampling, SequenceStart, TokenStops
from cluster.process import lasting
from cluster.protocol.hashing import NATIVE, keyed_chains
from engine.batch import pack
from engine.scheduling.commands import AdmitImported, Command, Event, Failed, Reserve, Reserved, StepTokens
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import DrawnToken, StepPlan, StepResult
from engine.steps.step_loop import StepLoop

_RESULTS = Path(__file__).parent / "results"
_BLOCK_SIZE, _CONTEXT, _MAX_TOKENS = 16, 2048, 4096
_STOP, _OTHER = DrawnToken(1), DrawnToken(5)
_ROUTER = MemberId("router", "1")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Shape:
    """`step_s`: duration of a step of an 8B Llama at 4.2 TB/s. `mean_output`: mean length of an output; None for
    endless outputs."""

    batch: int
    step_s: float
    mean_output: int | None


SHAPES = tuple(
    Shape(batch, step_s, mean_output)
    for mean_output in (None, 200)
    for batch, step_s in ((1, 0.004), (64, 0.008), (256, 0.020))
)


@dataclass(frozen=True, slots=True)
class Run:
    batch: int
    step_s: float
    mean_output: int | None
    is_ahead: bool
    idle_share: float  # of the device's time
    wait_s: float  # of the device before a step, mean
    ahead_share: float  # of the steps that were planned while one ran
    commands_per_step: float


class _Clock:
    """The step thread's clock: its CPU time plus the skipped waits."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def now_s(self) -> float:
        return time.thread_time() + self._skipped_s

    def skip_to(self, when_s: float) -> None:
        self._skipped_s += max(0.0, when_s - self.now_s())


class _Device:
    """A simulated device that implements Launcher."""

    def __init__(self, shape: Shape, *, can_feed: bool) -> None:
        self.can_feed = can_feed
        self.clock = _Clock()
        self.free_s = 0.0
        self.waits_s: list[float] = []
        self.are_ahead: list[bool] = []
        self._shape = shape
        self._dice = random.Random(1)

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> "_Launched":
        pack(plan.chunks, _BLOCK_SIZE, _CPU)
        now_s = self.clock.now_s()
        self.waits_s.append(max(0.0, now_s - self.free_s))
        self.are_ahead.append(any(chunk.fed_by is not None for chunk in plan.chunks))
        self.free_s = max(now_s, self.free_s) + self._shape.step_s
        return _Launched(self, plan, self.free_s)

    def drawn(self) -> DrawnToken:
        mean = self._shape.mean_output
        return _STOP if mean is not None and self._dice.random() * mean < 1 else _OTHER


@dataclass(frozen=True, slots=True)
class _Launched:
    device: _Device
    plan: StepPlan
    ends_s: float

    @property
    def can_feed(self) -> bool:
        return self.device.can_feed

    def result(self) -> StepResult:
        self.device.clock.skip_to(self.ends_s)
        return StepResult(tuple(tuple(self.device.drawn() for _ in chunk.samples) for chunk in self.plan.chunks))


class _Serving:
    """Keeps a constant number of sequences: each one that ends is replaced by a new hand-off."""

    def __init__(self, shape: Shape, num_steps: int, *, is_ahead: bool) -> None:
        self._shape, self._num_steps = shape, num_steps
        self.device = _Device(shape, can_feed=is_ahead)
        self.first_step = self.num_commands = 0
        self._num_running = 0
        # Made before, for routers and importers do that elsewhere: with twice as many ends as there will be.
        num_ends = 0 if shape.mean_output is None else 2 * shape.batch * (num_steps + 20) // shape.mean_output + 20
        self._new_chain = keyed_chains(b"key", _BLOCK_SIZE)
        self._jobs = iter([self._named(_job(number)) for number in range(shape.batch + num_ends)])
        self._pending: dict[int, DecodeJob] = {}
        self.has_ended = threading.Event()
        self.errors: list[Exception] = []
        num_blocks = (shape.batch * (_CONTEXT + 2 * num_steps) + 2 * _MAX_TOKENS) // _BLOCK_SIZE
        limits = SchedulerLimits(
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            max_model_len=1 << 15,
            max_num_seqs=shape.batch,
            max_prefill_tokens=512,
            max_queue=1024,
            watermark=0.01,
        )
        self.loop: StepLoop[Command, Event] = StepLoop(
            SequenceScheduler(limits, new_chain=self._new_chain, lengths=LengthPredictor()),
            self.device,
            self.device.clock,
            self._emit,
            on_error=self.errors.append,
            on_fatal=self._fatal,
        )
        for _ in range(shape.batch):
            self._reserve()

    def run(self) -> Run:
        self.loop.start()
        self.has_ended.wait()
        self.loop.stop()
        if self.errors:
            raise self.errors[0]
        measured = slice(self.first_step, self.first_step + self._num_steps)
        waits_s = self.device.waits_s[measured]
        total_s = sum(waits_s) + len(waits_s) * self._shape.step_s
        return Run(
            **asdict(self._shape),
            is_ahead=self.device.can_feed,
            idle_share=sum(waits_s) / total_s,
            wait_s=statistics.mean(waits_s),
            ahead_share=statistics.mean(self.device.are_ahead[measured]),
            commands_per_step=self.num_commands / len(waits_s),
        )

    def _named(self, job: DecodeJob) -> tuple[DecodeJob, tuple[bytes, ...]]:
        """Return the job with the hashes of its prompt's blocks."""
        chain = self._new_chain("", NATIVE)
        chain.extend(job.prompt_token_ids)
        return job, tuple(chain.hashes)

    def _post(self, command: Command) -> None:
        self.num_commands += 1
        self.loop.post(command)

    def _reserve(self) -> None:
        job, block_hashes = next(self._jobs)
        handle = job.sequences[0].handle
        self._pending[handle] = job
        self._post(Reserve(handle, _CONTEXT // _BLOCK_SIZE, block_hashes, job, is_announced=True))

    def _emit(self, events: tuple[Event, ...]) -> None:
        for event in events:
            match event:
                case Reserved(handoff_id, block_ids):
                    self._post(AdmitImported(handoff_id, self._pending.pop(handoff_id), block_ids, (), (5,)))
                    self._num_running += 1
                case Failed():
                    self._fatal(event.error)
                case StepTokens(_, tokens):
                    for told in tokens:
                        if told.token.finish_reason is not None:
                            self._reserve()
        num_launched = len(self.device.waits_s)
        if not self.first_step and self._num_running >= self._shape.batch and num_launched:
            self.first_step, self.num_commands = num_launched + 4, 0
        if self.first_step and num_launched > self.first_step + self._num_steps:
            self.has_ended.set()

    def _fatal(self, error: Exception) -> None:
        self.errors.append(error)
        self.has_ended.set()


def _job(number: int) -> DecodeJob:
    """Return a job whose prompt shares no prefix with another."""
    prompt = (number + 10, *range(10, 9 + _CONTEXT))
    stops = TokenStops(_MAX_TOKENS, 0, frozenset({_STOP.token_id}))
    return DecodeJob("r", 0, _ROUTER, prompt, Sampling(), stops, (SequenceStart(number, number),), None, 1e6)


def measured(num_steps: int, num_rounds: int, shapes: tuple[Shape, ...] = SHAPES) -> list[Run]:
    """Run each shape with and without steps planned ahead, in turns."""
    return [
        _Serving(shape, num_steps, is_ahead=is_ahead).run()
        for shape in shapes
        for _ in range(num_rounds)
        for is_ahead in (False, True)
    ]


def table(runs: list[Run]) -> str:
    lines = [
        "| batch | step | outputs | device waits, without | with | before a step, without | with | planned ahead"
        " | commands a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in dict.fromkeys(Shape(run.batch, run.step_s, run.mean_output) for run in runs):
        mine = [run for run in runs if (run.batch, run.step_s, run.mean_output) == (*asdict(shape).values(),)]
        without, ahead = ([run for run in mine if run.is_ahead == is_ahead] for is_ahead in (False, True))
        outputs = "endless" if shape.mean_output is None else f"{shape.mean_output} tokens"
        cells = [
            *(f"{100 * statistics.median(run.idle_share for run in some):.1f} %" for some in (without, ahead)),
            *(f"{1e3 * statistics.median(run.wait_s for run in some):.2f} ms" for some in (without, ahead)),
            f"{100 * statistics.median(run.ahead_share for run in ahead):.0f} %",
            f"{statistics.median(run.commands_per_step for run in ahead):.1f}",
        ]
        lines.append(f"| {shape.batch} | {1e3 * shape.step_s:.0f} ms | {outputs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="measured steps of a run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind, in turns")
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with lasting():  # as in a worker, whose collector looks at none of what came with its imports
        import_module("engine.build")
    runs = measured(arguments.steps, arguments.rounds)
    print(table(runs))
    if arguments.write:
        where = about()
        _RESULTS.joinpath("async_scheduling.json").write_text(
            json.dumps({"machine": where, "runs": [asdict(run) for run in runs]}, indent=1) + "\n"
        )
        _RESULTS.joinpath("async_scheduling.md").write_text(_page(where, runs, arguments.steps, arguments.rounds))


def _page(where: dict[str, str], runs: list[Run], num_steps: int, num_rounds: int) -> str:
    return f"""# Steps planned ahead

`python -m benchmarks.async_scheduling --write`, {where["date"]}, commit {where["commit"]}, {where["processor"]},
Python {where["python"]}. Medians of {num_rounds} runs of {num_steps} steps, with and without in turns;
every run is in the JSON file.

**The device is simulated**: a step takes what an 8B Llama's weights and its KV of 2,048 tokens a sequence take at
4.2 TB/s. Scheduler, step loop and packing are the real ones, by what the step thread computes on this machine. What
copies, launches, drawing and other threads cost it is not in it.

{table(runs)}
"""


if __name__ == "__main__":
    main()
