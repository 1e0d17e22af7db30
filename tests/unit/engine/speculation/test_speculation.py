"""Speculation changes the speed and never the tokens: the real runner, on models whose output is known."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.step import Chunk, DrawnToken, StepPlan, StepResult
from engine.speculation.drafter import Acceptance, PromptLookup, TextDrafter, tokens_per_step
from engine.steps import runner
from engine.timing.steps_at_load import fixed_rows
from tests.golden.families import FAMILIES
from tests.unit.engine.rigs.speculating import (
    BLOCK_SIZE,
    FixedDrafter,
    Oracle,
    Talk,
    speak,
    step,
    table_runner,
    talks_of,
)

VOCAB = 6
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
MOST_TOKENS = 5  # of the sequences whose distribution is looked at: one of prompt, four drawn


class Stubborn:
    """Always proposes the same draft tokens."""

    def propose(self, token_ids: Sequence[int], max_draft_tokens: int) -> tuple[int, ...]:
        return (2, 2, 4)[:max_draft_tokens]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("llama")
    FAMILIES["llama"].save(folder)
    settings = EngineSettings(
        model=str(folder), dtype="float32", device="cpu", block_size=BLOCK_SIZE, num_blocks=40, max_model_len=128
    )
    engine = build_engine(settings)
    yield engine
    engine.pool.close()


def prompts() -> list[list[int]]:
    """Return two prompts with repetitions, and one without."""
    return [[5, 9, 11, 4] * 5, [*range(30, 40)] * 2, list(range(60, 83))]


def conversations(speculating: bool) -> list[Talk]:
    talks = []
    for index, prompt in enumerate(prompts()):
        drafter = TextDrafter(PromptLookup(), Acceptance(4, 16)) if speculating else None
        talks.append(Talk(index, prompt, tuple(range(index * 12, index * 12 + 12)), drafter))
    return talks


def test_greedy_tokens_equal_those_without_draft_tokens(tiny: Engine) -> None:
    plain, speculating = conversations(False), conversations(True)
    steps = speak(tiny.runner, plain, 90)
    fewer_steps = speak(tiny.runner, speculating, 90)

    assert [talk.token_ids for talk in speculating] == [talk.token_ids for talk in plain]
    assert fewer_steps < steps
    assert 0 < sum(talk.num_right for talk in speculating) < sum(talk.num_draft_tokens for talk in speculating)


def test_after_every_step_the_kv_of_rejected_draft_tokens_is_zero(tiny: Engine) -> None:
    tiny.pool.tensor.fill_(9.0)  # what earlier sequences left behind
    talk = conversations(True)[0]
    talk.drafter = TextDrafter(_Wrong(), Acceptance(4, 16))
    num_wrong = 0
    while len(talk.token_ids) < 60:
        step(tiny.runner, [talk], 60)
        last_block, num_valid = divmod(talk.num_computed, BLOCK_SIZE)
        begun = [last_block] if num_valid else []
        written = talk.block_ids[: last_block + bool(num_valid)]
        beyond = [block for block in talk.block_ids[: -(-60 // BLOCK_SIZE)] if block not in written]
        for keys, values in tiny.pool.layers:
            for view in (keys, values):
                for block in begun:
                    assert view[talk.block_ids[block], num_valid:].eq(0).all()
                    assert view[talk.block_ids[block], :num_valid].ne(0).any(dim=(1, 2)).all()
                for block in beyond:
                    assert view[block].eq(9.0).all() or view[block].eq(0).all()
        num_wrong = talk.num_draft_tokens - talk.num_right
    assert num_wrong > 10


class _Wrong:
    """A proposer whose tokens are right sometimes, by chance."""

    def propose(self, token_ids: Sequence[int], max_draft_tokens: int) -> tuple[int, ...]:
        return tuple((token_ids[-1] + 7 * index) % 128 for index in range(max_draft_tokens))


def speculated_outcomes(num_sequences: int) -> torch.Tensor:
    """Count for each of the VOCAB ** 2 pairs how often it was the second and third of four drawn tokens."""
    runner = table_runner(TABLE, num_sequences)
    talks = talks_of(num_sequences, [0], MOST_TOKENS)
    for talk in talks:
        talk.sampling, talk.drafter = Sampling(temperature=1.0), TextDrafter(Stubborn(), Acceptance(3, 16))
    speak(runner, talks, MOST_TOKENS)
    counts = torch.zeros(VOCAB, VOCAB)
    for talk in talks:
        assert len(talk.token_ids) == MOST_TOKENS
        counts[tuple(talk.token_ids[2:4])] += 1
    return counts


def g_statistic(counts: torch.Tensor) -> float:
    """Return the G statistic against the model's own distribution: about chi-square, with one degree of freedom less
    than cells.
    """
    steps = TABLE.double().softmax(dim=-1)
    first = steps[0]
    expected = torch.einsum("a,ab,bc->bc", first, steps, steps) * counts.sum()
    seen = counts > 0
    return float(2 * (counts[seen] * (counts[seen] / expected[seen]).log()).sum())


HIGHEST_G = 76.0  # of chi-square with 35 degrees of freedom, one draw in 10,000 is above


def test_sampled_tokens_have_the_models_distribution() -> None:
    assert g_statistic(speculated_outcomes(2000)) < HIGHEST_G


def test_the_distribution_test_sees_a_biased_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draft token in ten is accepted although another token was drawn."""
    real, dice = runner._accepted, random.Random(1)

    def credulous(chunk: Chunk, drawn: tuple[DrawnToken, ...]) -> tuple[DrawnToken, ...]:
        if chunk.num_draft_tokens and dice.random() < 0.1:
            drawn = (DrawnToken(chunk.token_ids[-chunk.num_draft_tokens]), *drawn[1:])
        return real(chunk, drawn)

    monkeypatch.setattr(runner, "_accepted", credulous)
    assert g_statistic(speculated_outcomes(2000)) > HIGHEST_G


@pytest.mark.parametrize(("rate", "num_draft_tokens"), [(0.3, 2), (0.6, 4), (0.8, 4), (0.9, 8)])
def test_tokens_per_step_follow_from_acceptance(rate: float, num_draft_tokens: int) -> None:
    length, num_sequences = 240, 12
    runner = table_runner(TABLE, 12 * 30)
    truths = talks_of(num_sequences, [0], length)
    talks = talks_of(num_sequences, [0], length)
    dice = random.Random(5)
    for talk in (*truths, *talks):
        talk.sampling = Sampling(temperature=1.0)
    speak(runner, truths, length)
    for truth, talk in zip(truths, talks, strict=True):
        is_right = (dice.random() < rate for _ in itertools.count())
        talk.drafter = FixedDrafter(Oracle(truth.token_ids, is_right, VOCAB), num_draft_tokens)
    # The prompt's step draws one token without draft tokens, and the last ones are cut by the length.
    num_steps, num_drawn = 0, 0
    speak(runner, talks, 2)
    while all(len(talk.token_ids) + num_draft_tokens < length for talk in talks):
        before = sum(len(talk.token_ids) for talk in talks)
        step(runner, talks, length)
        num_steps += len(talks)
        num_drawn += sum(len(talk.token_ids) for talk in talks) - before
    assert all(
        talk.token_ids == truth.token_ids[: len(talk.token_ids)] for talk, truth in zip(talks, truths, strict=True)
    )
    assert num_drawn / num_steps == pytest.approx(tokens_per_step(rate, num_draft_tokens), rel=0.05)
    assert tokens_per_step(rate, num_draft_tokens) == pytest.approx((1 - rate ** (num_draft_tokens + 1)) / (1 - rate))


def test_a_banned_token_is_drawn_after_no_draft_token() -> None:
    """min_tokens holds at every position of a step: a proposed stop token is rejected."""
    table = torch.zeros(VOCAB, VOCAB)
    table[:, 2] = 9.0  # what everything is followed by, unless it is banned
    runner = table_runner(table, 1)
    talk = talks_of(1, [0], 8)[0]
    talk.drafter = TextDrafter(Stubborn(), Acceptance(3, 16))
    step(runner, [talk], 8)
    chunk = talk.chunk(3)
    assert chunk.num_draft_tokens == 3
    first, second, *free = chunk.samples
    banned = tuple(replace(sample, banned_token_ids=frozenset({4})) for sample in (first, second))
    (drawn,) = runner.run(StepPlan((replace(chunk, samples=(*banned, *free)),))).tokens
    # The third draft token was the stop token: 2 is drawn there.
    assert [token.token_id for token in drawn] == [2, 2, 2]
    banned = tuple(replace(sample, banned_token_ids=frozenset({2})) for sample in (first, second))
    (drawn,) = runner.run(StepPlan((replace(chunk, samples=(*banned, *free)),))).tokens
    assert [token.token_id for token in drawn] == [0]  # the first was


class _Ticks:
    """A clock that each step advances: by 10, and by 2 for each row."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        run = engine.runner.run

        def timed(plan: StepPlan) -> StepResult:
            self.now_s += 10 + 2 * sum(len(chunk.token_ids) for chunk in plan.chunks)
            return run(plan)

        monkeypatch.setattr(engine.runner, "run", timed)

    def __call__(self) -> float:
        return self.now_s


def test_the_fixed_cost_of_a_step_is_measured_in_rows(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.pool.tensor.zero_()
    assert fixed_rows(tiny, _Ticks(tiny, monkeypatch)) == pytest.approx(5)
    assert not tiny.pool.raw.any()
