"""The pool and the tokens after a step, on a small real model."""

from collections.abc import Iterator

import pytest
import torch

from cluster.messages import Sampling
from engine.build import Engine
from engine.scheduling.step import BlockCopy, Chunk, DrawnToken, Sample, StepPlan
from tests.unit.engine.rigs.tiny_engine import BLOCK_SIZE, tiny_engine

TOKEN_IDS = tuple(range(1, 21))  # two blocks and a half


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("llama")) as engine:
        yield engine


@pytest.fixture
def engine(built: Engine) -> Engine:
    built.pool.tensor.fill_(9.0)  # what earlier sequences left behind
    return built


def sample(position: int, seed: int = 0, temperature: float = 0.0) -> Sample:
    return Sample(seed=seed, position=position, sampling=Sampling(temperature=temperature))


def whole_prompt(block_ids: tuple[int, ...], *samples: Sample) -> Chunk:
    return Chunk(1, TOKEN_IDS, 0, block_ids, samples)


def zero_positions(engine: Engine, block_id: int) -> list[bool]:
    """Return for each position of the block whether it is zero in every layer."""
    states = torch.stack([view[block_id].flatten(1) for layer in engine.pool.layers for view in layer])
    return [bool(flag) for flag in (states == 0).all(dim=2).all(dim=0)]


def test_positions_after_the_last_token_are_zero(engine: Engine) -> None:
    engine.runner.run(StepPlan((whole_prompt((5, 2, 11)),)))

    assert zero_positions(engine, 11) == [False] * 4 + [True] * 4
    assert zero_positions(engine, 5) == zero_positions(engine, 2) == [False] * BLOCK_SIZE


def test_a_growing_tail_keeps_its_tokens_and_stays_zero_after_them(engine: Engine) -> None:
    engine.runner.run(StepPlan((Chunk(1, TOKEN_IDS[:18], 0, (5, 2, 11)),)))
    before = engine.pool.tensor[11].clone()
    engine.runner.run(StepPlan((Chunk(1, TOKEN_IDS[18:19], 18, (5, 2, 11), (sample(19),)),)))

    assert zero_positions(engine, 11) == [False] * 3 + [True] * 5
    keys, _ = engine.pool.layers[0]
    assert torch.equal(keys[11, :2], before[: BLOCK_SIZE * 32].view(BLOCK_SIZE, 2, 16)[:2])


def test_a_step_writes_to_no_other_block(engine: Engine) -> None:
    engine.runner.run(StepPlan((whole_prompt((5, 2, 11), sample(20)),)))

    others = [block_id for block_id in range(engine.pool.num_blocks) if block_id not in (5, 2, 11)]
    assert engine.pool.tensor[others].eq(9.0).all()


def test_chunks_write_the_kv_of_a_single_pass(engine: Engine) -> None:
    engine.runner.run(StepPlan((whole_prompt((0, 1, 2)),)))
    for begin, end in ((0, 3), (3, 16), (16, 17), (17, 20)):
        engine.runner.run(StepPlan((Chunk(1, TOKEN_IDS[begin:end], begin, (9, 7, 8)),)))

    assert torch.allclose(engine.pool.tensor[[9, 7, 8]], engine.pool.tensor[[0, 1, 2]], atol=1e-5)


def test_tokens_come_back_in_the_order_of_chunks_and_samples(engine: Engine) -> None:
    alone = engine.runner.run(StepPlan((whole_prompt((0, 1, 2), sample(20)),))).tokens[0][0].token_id
    short = Chunk(2, TOKEN_IDS[:4], 0, (3,), (sample(4),))
    short_alone = engine.runner.run(StepPlan((short,))).tokens[0][0].token_id
    assert alone != short_alone

    unsampled = Chunk(3, TOKEN_IDS[:6], 0, (7,))
    result = engine.runner.run(StepPlan((short, unsampled, whole_prompt((4, 5, 6), sample(20), sample(20)))))

    assert [[token.token_id for token in tokens] for tokens in result.tokens] == [[short_alone], [], [alone, alone]]


def test_choices_of_one_prompt_draw_by_their_own_seeds(engine: Engine) -> None:
    samples = tuple(sample(20, seed=seed, temperature=3.0) for seed in range(12))
    together = engine.runner.run(StepPlan((whole_prompt((0, 1, 2), *samples),))).tokens[0]
    one = engine.runner.run(StepPlan((whole_prompt((0, 1, 2), samples[5]),))).tokens[0]

    assert len({token.token_id for token in together}) > 1
    assert together[5].token_id == one[0].token_id


def test_a_copied_tail_continues_as_the_original_does(engine: Engine) -> None:
    engine.runner.run(StepPlan((whole_prompt((0, 1, 2)),)))

    def next_token(tail: int, copies: tuple[BlockCopy, ...] = ()) -> DrawnToken:
        chunk = Chunk(1, (55,), 20, (0, 1, tail), (sample(21),))
        return engine.runner.run(StepPlan((chunk,), copies)).tokens[0][0]

    assert next_token(6, copies=(BlockCopy(2, 6),)) == next_token(2)
    assert torch.equal(engine.pool.tensor[6], engine.pool.tensor[2])


def test_a_plan_of_copies_alone_computes_no_token(engine: Engine) -> None:
    engine.pool.tensor[3] = 4.0
    assert engine.runner.run(StepPlan((), (BlockCopy(3, 8),))).tokens == ()
    assert engine.pool.tensor[8].eq(4.0).all()


def test_values_in_blocks_of_others_never_reach_a_sequence(engine: Engine) -> None:
    engine.pool.tensor.fill_(float("nan"))
    long = whole_prompt((5, 2, 11), sample(20))
    engine.runner.run(StepPlan((long,)))
    engine.runner.run(StepPlan((Chunk(2, (1, 2), 0, (3,)),)))
    decodes = (Chunk(1, (7,), 20, (5, 2, 11), (sample(21),)), Chunk(2, (3,), 2, (3,), (sample(3),)))

    assert torch.isfinite(engine.runner.logits(StepPlan(decodes))).all()
