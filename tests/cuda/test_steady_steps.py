"""A steady decode step on a GPU: it waits for nothing but its tokens, takes no memory, and graphs change no result."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.messages import Sampling
from engine.build import Engine
from engine.scheduling.step import UNKNOWN_TOKEN, Chunk, Sample, StepPlan
from engine.steps.runner import LaunchingRunner
from tests.cuda.engines import build, on_gpu
from tests.golden.families import BLOCK_SIZE, FAMILIES

pytestmark = [pytest.mark.cuda, on_gpu]

SAMPLINGS = (
    Sampling(),
    Sampling(0.8, top_p=0.9),
    Sampling(1.0, top_k=20, min_p=0.02),
    Sampling(0.7, num_logprobs=3),
)
FIRST = 17
WARM = 3


@pytest.fixture(scope="module", params=["auto", "off"], ids=["graphs", "eager"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = build(tmp_path_factory.mktemp("llama"), FAMILIES["llama"], cuda_graphs=request.param)
    said = next(line for line in engine.report if line.startswith("cuda graphs: "))
    assert said.startswith("cuda graphs: 6 sizes" if request.param == "auto" else "cuda graphs: off"), said
    yield engine
    engine.pool.close()


def decodes(position: int, count: int = 12) -> StepPlan:
    """Decodes with every sampling method. One token is banned, as `min_tokens` does."""
    width = position // BLOCK_SIZE + 1
    chunks = []
    for row in range(count):
        sample = Sample(row, position + 1, SAMPLINGS[row % len(SAMPLINGS)], frozenset({3} if row == 5 else ()))
        chunks.append(Chunk(row, (row + 1,), position, tuple(range(8 * row, 8 * row + width)), (sample,)))
    return StepPlan(tuple(chunks))


def following(position: int, newest: list[int] | None) -> StepPlan:
    """The decodes that follow those. Without `newest`, the tokens of the earlier step feed them."""
    return StepPlan(
        tuple(
            replace(chunk, token_ids=(UNKNOWN_TOKEN,), fed_by=row)
            if newest is None
            else replace(chunk, token_ids=(newest[row],))
            for row, chunk in enumerate(decodes(position).chunks)
        )
    )


def warm(runner: LaunchingRunner) -> None:
    for position in range(FIRST, FIRST + WARM):
        runner.run(decodes(position))


def launching(engine: Engine) -> LaunchingRunner:
    assert isinstance(engine.runner, LaunchingRunner)
    return engine.runner


def test_a_launch_waits_for_nothing(engine: Engine) -> None:
    runner = launching(engine)
    warm(runner)
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = runner.launch(decodes(FIRST + WARM))
        result = launched.result()  # an event's end is waited for, which is no synchronisation of the device
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(result.tokens) == 12


def test_a_launch_returns_while_the_device_computes(engine: Engine) -> None:
    runner = launching(engine)
    warm(runner)
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # clock cycles: about half a second
    launched = runner.launch(decodes(FIRST + WARM))
    reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
    reached.record()
    assert not reached.query()  # type: ignore[no-untyped-call]
    launched.result()


def test_steps_are_fed_while_the_device_computes_and_wait_for_nothing(engine: Engine) -> None:
    runner = launching(engine)
    warm(runner)
    positions = range(FIRST + WARM, FIRST + WARM + 6)
    in_turn = [[one.token_id for (one,) in runner.run(decodes(positions[0])).tokens]]
    for position in positions[1:]:
        in_turn.append([one.token_id for (one,) in runner.run(following(position, in_turn[-1])).tokens])

    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    ahead = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        running = runner.launch(decodes(positions[0]))
        for position in positions[1:]:
            assert running.can_feed
            behind = runner.launch(following(position, None))
            ahead.append([one.token_id for (one,) in running.result().tokens])
            running = behind
        ahead.append([one.token_id for (one,) in running.result().tokens])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ahead == in_turn


def test_steady_steps_that_are_fed_take_no_memory_from_the_device(engine: Engine) -> None:
    runner = launching(engine)
    position = FIRST + WARM

    def launch_behind(count: int) -> None:
        nonlocal position
        running = runner.launch(decodes(position))
        for _ in range(count):
            position += 1
            behind = runner.launch(following(position, None))
            running.result()
            running = behind
        running.result()

    warm(runner)
    launch_behind(4)
    before = torch.cuda.memory_stats()
    launch_behind(8)
    after = torch.cuda.memory_stats()
    for name in ("num_device_alloc", "num_alloc_retries", "reserved_bytes.all.current", "allocated_bytes.all.current"):
        assert after.get(name, 0) == before.get(name, 0), name


def test_a_steady_step_takes_no_memory_from_the_device(engine: Engine) -> None:
    runner = launching(engine)
    warm(runner)
    before = torch.cuda.memory_stats()
    for position in range(FIRST + WARM, FIRST + WARM + 8):
        runner.run(decodes(position))
    after = torch.cuda.memory_stats()
    for name in ("num_device_alloc", "num_alloc_retries", "reserved_bytes.all.current", "allocated_bytes.all.current"):
        assert after.get(name, 0) == before.get(name, 0), name


def test_graphs_draw_the_tokens_of_a_forward_without(engine: Engine, tmp_path: Path) -> None:
    other = build(tmp_path, FAMILIES["llama"], cuda_graphs="off")
    for pool in (engine.pool, other.pool):
        pool.raw.zero_()
    dice = random.Random(4)
    for position in range(BLOCK_SIZE * 3):
        plan = decodes(position, dice.randint(1, 20))
        ours, plain = engine.runner.run(plan), other.runner.run(plan)
        assert [[token.token_id for token in tokens] for tokens in ours.tokens] == [
            [token.token_id for token in tokens] for tokens in plain.tokens
        ]
    assert torch.allclose(engine.pool.tensor, other.pool.tensor, atol=1e-4)
    other.pool.close()
