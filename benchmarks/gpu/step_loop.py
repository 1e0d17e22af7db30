"""Decode steps with a worker's scheduler, step loop and runner, without network or prefill.

Sequences join as if they had been handed over with the given context; the content of their blocks is arbitrary. A step
lasts from one step's tokens to the next one's at the loop's end, including planning and accounting.
"""

import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.clock import MonotonicClock
from cluster.messages import DecodeJob, MemberId, Sampling, SequenceStart, TokenStops
from cluster.protocol.hashing import nameless_chains
from cluster.request_size import tail_length
from engine.scheduling.commands import AdmitImported, Command, Event, Reserve, Reserved, StepTokens
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.steps.runner import ModelRunner
from engine.steps.step_loop import StepLoop

_ROUTER = MemberId("router", "1")
_TOKEN = 7
_NUM_WARM = 4
MORE_TOKENS = _NUM_WARM + 2  # a sequence has one already, and none ends while it is timed
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Decodes:
    """`sequences` sequences decode `steps` tokens each, starting with `context` tokens."""

    sequences: int
    context: int
    steps: int
    num_blocks: int  # of the pool
    block_size: int


@dataclass(slots=True)
class _Heard:
    """The events of the loop. The loop's thread writes it."""

    num_steps: int
    times_s: list[float] = field(default_factory=list)
    problem: str = ""
    is_over: threading.Event = field(default_factory=threading.Event)

    def take(self, events: tuple[Event, ...]) -> None:
        if any(isinstance(event, StepTokens) for event in events):
            self.times_s.append(time.perf_counter())
        if len(self.times_s) == self.num_steps:
            self.is_over.set()

    def stumble(self, error: Exception) -> None:
        self.problem = f"{type(error).__name__}: {error}"
        self.is_over.set()


def step_times_s(runner: ModelRunner, decodes: Decodes, *, ahead: bool) -> tuple[float, ...]:
    """Return the seconds of each step. `ahead`: plan and launch the next step while one runs. Raises RuntimeError if a
    step fails or no step ends."""
    heard = _Heard(_NUM_WARM + decodes.steps)
    before, runner.feeds = runner.feeds, ahead
    loop: StepLoop[Command, Event] = StepLoop(
        _filled(decodes), runner, MonotonicClock(), heard.take, on_error=heard.stumble, on_fatal=heard.stumble
    )
    loop.start()
    try:
        if not heard.is_over.wait(_TIMEOUT_S):
            raise RuntimeError(f"{len(heard.times_s)} steps in {_TIMEOUT_S:g} s")
        if heard.problem:
            raise RuntimeError(heard.problem)
    finally:
        loop.stop()
        runner.feeds = before
    times_s = heard.times_s[_NUM_WARM - 1 : heard.num_steps]
    return tuple(later - earlier for earlier, later in pairwise(times_s))


def _filled(decodes: Decodes) -> SequenceScheduler:
    """Return the scheduler with every sequence, before its first step."""
    num_tokens = decodes.steps + MORE_TOKENS
    limits = SchedulerLimits(
        num_blocks=decodes.num_blocks,
        block_size=decodes.block_size,
        max_model_len=decodes.context + num_tokens,
        max_num_seqs=decodes.sequences,
        max_prefill_tokens=512,
        max_queue=decodes.sequences,
        watermark=0.0,
    )
    scheduler = SequenceScheduler(limits, new_chain=nameless_chains())
    for number in range(decodes.sequences):
        start = SequenceStart(number, seed=number)
        prompt = (_TOKEN,) * decodes.context
        job = DecodeJob("bench", 0, _ROUTER, prompt, Sampling(), TokenStops(num_tokens), (start,), None, 1e6)
        needed = limits.num_needed(decodes.context, 1)
        (reserved,) = scheduler.apply(Reserve(number, needed, (), job, is_announced=True), 0.0)
        assert isinstance(reserved, Reserved), reserved
        num_tails = 1 if tail_length(decodes.context, decodes.block_size) else 0
        sealed, tail = reserved.block_ids[: needed - num_tails], reserved.block_ids[needed - num_tails :]
        scheduler.apply(AdmitImported(number, job, sealed, tail, (_TOKEN,)), 0.0)
    return scheduler
