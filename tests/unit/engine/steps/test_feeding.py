"""Steps launched before the tokens of the step before them are read: tokens and KV equal those of steps that wait, bit
by bit.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cluster.clock import MonotonicClock
from cluster.messages import DecodeJob, Sampling, SequenceStart, TokenStops
from cluster.protocol.hashing import nameless_chains
from engine.batch import PackedBatch
from engine.build import Engine, build_engine
from engine.kv.host_blocks import HostBlocks, SwappingLauncher
from engine.scheduling.commands import AdmitLocal, Command, Event, StepTokens
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import UNKNOWN_TOKEN, Chunk, DrawnToken, Feeding, Sample, StepPlan
from engine.steps.runner import LaunchingRunner, ModelRunner, StartedStep
from engine.steps.sampler import Draw
from engine.steps.step_loop import StepLoop
from tests.golden.families import FAMILIES
from tests.unit.engine.cuda.test_pretend_gpu import OnCpu, build, gpu, on_cpu, settings
from tests.unit.engine.rigs.pretend_gpu import OnGpu, PretendGpu
from tests.unit.engine.rigs.scheduler_bench import ROUTER

__all__ = ["build", "gpu", "on_cpu"]

WAYS = (Sampling(), Sampling(0.8, top_p=0.9), Sampling(0.7, top_k=20, min_p=0.02, num_logprobs=3))
PROMPTS = (tuple(range(1, 12)), (9, 8, 7), (5, 6, 5, 6, 5, 6, 5))
NUM_STEPS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("llama")
    FAMILIES["llama"].save(folder)
    engine = build_engine(settings(folder))
    yield engine
    engine.pool.close()


def steps(known: Callable[[int], int] | None) -> Iterator[StepPlan]:
    """Return steps of three sequences, the last of which begins in the third step. `known`: the newest token of a
    sequence; without it, tokens are fed from the step before.
    """
    lengths = {0: 0, 1: 0}
    before: list[int] = []
    for step in range(NUM_STEPS):
        if step == 2:
            lengths[2] = 0
        chunks = []
        for row, length in lengths.items():
            prompt = PROMPTS[row]
            start = len(prompt) + length - 1 if length else 0
            tokens = prompt if not length else (UNKNOWN_TOKEN if known is None else known(row),)
            end = start + len(tokens)
            banned = frozenset({3} if row else ())
            fed_by = before.index(row) if length and known is None else None
            block_ids = tuple(range(4 * row, 4 * row + 1 + (end - 1) // 8))
            sample = Sample(row, end, WAYS[row], banned)
            chunks.append(Chunk(row, tokens, start, block_ids, (sample,), fed_by=fed_by))
            lengths[row] += 1
        before = list(lengths)
        if step % 5 == 4:  # rows change their places
            lengths = dict(reversed(lengths.items()))
        yield StepPlan(tuple(chunks))


def drawn_in_turn(runner: ModelRunner) -> list[tuple[tuple[DrawnToken, ...], ...]]:
    newest: dict[int, int] = {}
    results = []
    for plan in steps(newest.__getitem__):
        results.append(runner.run(plan).tokens)
        newest |= {chunk.sequence_id: one.token_id for chunk, (one,) in zip(plan.chunks, results[-1], strict=True)}
    return results


def drawn_ahead(runner: ModelRunner) -> list[tuple[tuple[DrawnToken, ...], ...]]:
    launched = (runner.start(plan) for plan in steps(None))
    results, running = [], next(launched)
    for following in itertools.chain(launched, (None,)):
        assert running.can_feed
        results.append(running.result().tokens)
        running = following  # type: ignore[assignment]
    return results


def test_steps_that_are_fed_draw_the_tokens_of_steps_that_wait(engine: Engine) -> None:
    engine.pool.raw.zero_()
    expected = drawn_in_turn(engine.runner)
    kv = engine.pool.raw.clone()
    engine.pool.raw.zero_()

    assert drawn_ahead(engine.runner) == expected
    assert torch.equal(engine.pool.raw, kv)


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_on_a_gpu_steps_are_fed_without_a_wait(
    on_cpu: OnCpu, gpu: PretendGpu, build: Callable[..., Engine], graphs: str
) -> None:
    engine = build(cuda_graphs=graphs)
    assert "async scheduling: on" in engine.report
    in_turn = drawn_in_turn(engine.runner)
    pool = engine.pool.tensor
    assert isinstance(pool, OnGpu)
    kv = pool.inner.clone()
    pool.inner.zero_()

    with gpu.no_waits():
        assert drawn_ahead(engine.runner) == in_turn
    assert torch.equal(pool.inner[: engine.pool.num_blocks], kv[: engine.pool.num_blocks])


def test_async_scheduling_is_turned_off_by_its_flag(gpu: PretendGpu, build: Callable[..., Engine]) -> None:
    engine = build(async_scheduling="off", cuda_graphs="off")
    assert "async scheduling: off (--async-scheduling off)" in engine.report
    assert not engine.runner.start(next(steps(None))).can_feed


@pytest.mark.parametrize("most", [1, 1000])
def test_a_step_that_is_drawn_in_parts_feeds_no_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("engine.steps.sampler._LOGITS_AT_ONCE", most)
    assert engine.runner.start(next(steps(None))).can_feed == (most == 1000)


def test_a_failed_launch_waits_for_its_stream(gpu: PretendGpu, build: Callable[..., Engine]) -> None:
    """The step's blocks are freed next, and an import may write to them concurrently with the engine's stream."""
    engine = build(cuda_graphs="off")
    assert isinstance(engine.runner, LaunchingRunner)

    def forward(batch: PackedBatch) -> torch.Tensor:
        raise RuntimeError("no memory")

    engine.runner.forward = forward
    with pytest.raises(RuntimeError, match="no memory"):
        engine.runner.launch(next(steps(None)))
    assert gpu.waits[-1] == "stream"


def test_steps_without_swaps_can_feed_the_next_step_beside_a_swap_space(engine: Engine) -> None:
    runner = _Launching(engine.runner.forward, engine.pool)
    launched = SwappingLauncher(runner, HostBlocks(engine.pool, 1)).launch(next(steps(None)))
    assert isinstance(launched, Feeding) and launched.can_feed


class _Launching(ModelRunner):
    """A Launcher that computes in `launch`."""

    num_behind = 0

    def launch(self, plan: StepPlan) -> StartedStep:
        self.num_behind += any(chunk.fed_by is not None for chunk in plan.chunks)
        return self.start(plan)


def served(engine: Engine, *, feeds: bool, num_sequences: int = 8) -> dict[int, list[int]]:
    """Run that many sequences through scheduler and loop, some of which end by a stop token."""
    runner = _Launching(engine.runner.forward, engine.pool)
    runner.feeds = feeds
    tokens: dict[int, list[int]] = {}
    ended: list[int] = []

    def emit(events: tuple[Event, ...]) -> None:
        for event in events:
            for told in event.tokens if isinstance(event, StepTokens) else ():
                tokens.setdefault(told.handle, []).append(told.token.token_id)
                ended.extend([told.handle] if told.token.finish_reason else [])
        if len(ended) == num_sequences:
            loop.stop()

    limits = SchedulerLimits(
        num_blocks=12, block_size=8, max_model_len=32, max_num_seqs=3, max_prefill_tokens=20, max_queue=9, watermark=0.0
    )
    fatal: list[Exception] = []
    loop: StepLoop[Command, Event] = StepLoop(
        SequenceScheduler(limits, new_chain=nameless_chains()),
        runner,
        MonotonicClock(),
        emit,
        on_error=fatal.append,
        on_fatal=fatal.append,
    )
    for handle in range(num_sequences):
        stops = TokenStops(12, 0, frozenset(range(handle, 64, 7)))
        start = (SequenceStart(handle, handle),)
        loop.post(AdmitLocal(DecodeJob("r", 0, ROUTER, PROMPTS[handle % 3], WAYS[handle % 3], stops, start, None, 1e6)))
    loop._run()  # in this thread, which has the pretended GPU
    assert not fatal
    assert bool(runner.num_behind) == feeds
    return tokens


def test_a_model_served_ahead_gives_the_tokens_of_a_model_served_in_turn(engine: Engine) -> None:
    engine.pool.raw.zero_()
    assert served(engine, feeds=True) == served(engine, feeds=False)


def test_redrawn_tokens_are_the_tokens_of_steps_that_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nucleus is wider than the first window of logits, so the next step was fed with another token."""
    expected = served(engine, feeds=False)
    redrawn = noting_redrawn(monkeypatch)
    assert served(engine, feeds=True) == expected
    assert redrawn


def test_on_a_gpu_tokens_are_redrawn_from_their_own_logits(
    engine: Engine, gpu: PretendGpu, build: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step has overwritten the logits that graphs write to."""
    expected = served(engine, feeds=False, num_sequences=4)
    on_gpu = build()
    assert on_gpu.report[-1].startswith("cuda graphs: 3 sizes")
    redrawn = noting_redrawn(monkeypatch)
    assert served(on_gpu, feeds=True, num_sequences=4) == expected
    assert redrawn


def noting_redrawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr("engine.steps.sampler._FIRST_WIDTH", 2)
    redrawn: list[int] = []
    read = Draw.read

    def noting(draw: Draw) -> list[DrawnToken]:
        tokens = read(draw)
        redrawn.extend(draw.redrawn)
        return tokens

    monkeypatch.setattr(Draw, "read", noting)
    return redrawn
