"""Tests that the draft model's tokens depend only on the known tokens, not on tokens that were rejected, dropped or
evicted before."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError
from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.build import build_engine
from engine.scheduling.step import Chunk, DraftRequest, DrawnToken, Sample, StepPlan
from engine.speculation.draft_model import DraftLimits, DraftModel, build_draft_model, with_draft_model
from engine.speculation.drafter import Acceptance, ModelDrafter
from engine.steps.runner import ModelRunner
from tests.golden.families import FAMILIES
from tests.unit.engine.rigs.fake_paged_runner import FakePagedRunner, next_token, num_tokens
from tests.unit.engine.rigs.speculating import BLOCK_SIZE, speak, table_runner, talks_of

TABLE = torch.randn(40, 40, generator=torch.Generator().manual_seed(5)) * 2


def draft_model(num_blocks: int = 64, max_tokens: int = 512, max_model_len: int = 1000) -> DraftModel:
    limits = DraftLimits(num_blocks, BLOCK_SIZE, max_model_len, max_tokens)
    return DraftModel(FakePagedRunner(num_blocks, BLOCK_SIZE), limits)


def asked(sequence_id: int, known: Sequence[int], max_draft_tokens: int) -> Chunk:
    """Return the chunk of a step that computed the last known token and draws one more."""
    sample = Sample(sequence_id, len(known), Sampling())
    return Chunk(
        sequence_id, (known[-1],), len(known) - 1, (0,), (sample,), draft=DraftRequest(list(known), max_draft_tokens)
    )


def expected(seed: int, known: Sequence[int], num_draft_tokens: int) -> tuple[int, ...]:
    """Return the tokens that a serial run of the draft model draws after these tokens."""
    tokens = list(known)
    for _ in range(num_draft_tokens):
        tokens.append(next_token(tokens, Sample(seed, len(tokens), Sampling())))
    return tuple(tokens[len(known) :])


def drafted(model: DraftModel, asks: Sequence[tuple[int, Sequence[int], int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the draft tokens for each (sequence, known tokens, the token drawn in the step, maximum number of draft
    tokens).
    """
    chunks = tuple(asked(sequence, known, most) for sequence, known, _, most in asks)
    return model.draft(StepPlan(chunks), [(DrawnToken(token),) for _, _, token, _ in asks])


def test_draft_tokens_follow_the_drawn_token_and_each_other() -> None:
    model = draft_model()
    draft_tokens = drafted(model, [(1, [4, 5, 6], 7, 4), (2, [9] * 20, 8, 2)])
    assert draft_tokens == (expected(1, [4, 5, 6, 7], 4), expected(2, [*[9] * 20, 8], 2))


@pytest.mark.parametrize("seed", range(4))
def test_rejected_draft_tokens_are_dropped_and_accepted_ones_kept(seed: int) -> None:
    """A sequence grows by some of its draft tokens and another token, and requests a different number each time."""
    model, dice = draft_model(), random.Random(seed)
    known = [dice.randrange(50) for _ in range(11)]
    for _ in range(40):
        drawn, most = dice.randrange(50), dice.randrange(1, 5)
        (draft_tokens,) = drafted(model, [(1, known, drawn, most)])
        known.append(drawn)
        assert draft_tokens == expected(1, known, most)
        known += draft_tokens[: dice.randrange(len(draft_tokens) + 1)]
        known += [dice.randrange(50) for _ in range(dice.choice((0, 0, 3)))]  # steps without a request


def test_the_draft_model_computes_only_new_tokens() -> None:
    runner = FakePagedRunner(64, BLOCK_SIZE)
    model = DraftModel(runner, DraftLimits(64, BLOCK_SIZE, 1000, 512))
    (draft_tokens,) = drafted(model, [(1, [*range(40)], 3, 4)])
    assert sum(num_tokens(plan) for plan in runner.plans) == 41 + 3
    runner.plans.clear()
    drafted(model, [(1, [*range(40), 3, *draft_tokens], 5, 4)])  # all four were right
    # The fourth draft token itself had not been computed.
    assert sum(num_tokens(plan) for plan in runner.plans) == 2 + 3


def test_the_sequences_of_a_step_are_drafted_together() -> None:
    runner = FakePagedRunner(64, BLOCK_SIZE)
    model = DraftModel(runner, DraftLimits(64, BLOCK_SIZE, 1000, 512))
    drafted(model, [(1, [1, 2], 3, 4), (2, [4, 5], 6, 4), (3, [7, 8], 9, 2)])
    assert [len(plan.chunks) for plan in runner.plans] == [3, 3, 2, 2]


def test_a_long_backlog_is_computed_over_several_steps_before_the_first_draft_tokens() -> None:
    model, known = draft_model(max_tokens=10), list(range(24))
    answers = []
    for token in (30, 31, 32, 33):
        (draft_tokens,) = drafted(model, [(1, known, token, 2)])
        known.append(token)
        answers.append(draft_tokens)
    assert answers[:2] == [(), ()]
    assert answers[2] == expected(1, known[:-1], 2) and answers[3] == expected(1, known, 2)


def test_a_full_draft_pool_evicts_the_sequence_drafted_longest_ago() -> None:
    model = draft_model(num_blocks=4)  # two sequences of two blocks
    for sequence in (1, 2, 3):
        (draft_tokens,) = drafted(model, [(sequence, [sequence] * 10, 7, 2)])
        assert draft_tokens == expected(sequence, [*[sequence] * 10, 7], 2)
    assert model.num_held == 2
    (draft_tokens,) = drafted(model, [(1, [1] * 11, 7, 2)])  # evicted, computed again
    assert draft_tokens == expected(1, [*[1] * 11, 7], 2)


def test_a_sequence_without_room_beside_the_others_of_its_step_gets_no_draft_tokens() -> None:
    model = draft_model(num_blocks=4)
    asks = [(sequence, [sequence] * 10, 7, 2) for sequence in (1, 2, 3)]
    assert [len(draft_tokens) for draft_tokens in drafted(model, asks)] == [2, 2, 0]
    assert [len(draft_tokens) for draft_tokens in drafted(model, [(9, [1] * 400, 7, 2)])] == [0]


def test_no_draft_token_exceeds_the_draft_models_maximum_length() -> None:
    model = draft_model(max_model_len=14)
    assert [len(draft_tokens) for draft_tokens in drafted(model, [(1, [1] * 11, 7, 4)])] == [2]
    assert [len(draft_tokens) for draft_tokens in drafted(model, [(1, [1] * 13, 7, 4)])] == [0]


def test_a_step_without_requests_returns_no_draft_tokens() -> None:
    chunk = replace(asked(1, [1, 2], 3), draft=None)
    assert draft_model().draft(StepPlan((chunk,)), [(DrawnToken(5),)]) == ((),)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_equal_to_the_target_is_always_right(temperature: float) -> None:
    """This holds with sampling too: both models draw a position with the same noise."""
    runner = drafting_runner(TABLE, TABLE)
    talks = talks_of(4, [0, 1], 60)
    for talk in talks:
        talk.sampling, talk.drafter = Sampling(temperature=temperature), ModelDrafter(Acceptance(4, 16))
    speak(runner, talks, 60)
    assert sum(talk.num_right for talk in talks) == sum(talk.num_draft_tokens for talk in talks) > 100


def test_sampled_tokens_equal_those_without_a_draft_model() -> None:
    """The draft tokens are accepted much more often than with independent noise, and not always."""
    plain, speculating = talks_of(8, [0, 1], 60), talks_of(8, [0, 1], 60)
    noise = torch.randn(TABLE.shape, generator=torch.Generator().manual_seed(9))
    runner = drafting_runner(TABLE, TABLE + noise)
    for talk in (*plain, *speculating):
        talk.sampling = Sampling(temperature=1.0)
    for talk in speculating:
        talk.drafter = ModelDrafter(Acceptance(4, 16))
    speak(table_runner(TABLE, 8 * 8), plain, 60)
    speak(runner, speculating, 60)
    assert [talk.token_ids for talk in speculating] == [talk.token_ids for talk in plain]
    num_right, num_draft_tokens = (
        sum(getattr(talk, name) for talk in speculating) for name in ("num_right", "num_draft_tokens")
    )
    collision = float((TABLE.softmax(-1) * (TABLE + noise).softmax(-1)).sum(-1).mean())  # two noises agree so often
    assert 1.5 * collision < num_right / num_draft_tokens < 1


def drafting_runner(table: torch.Tensor, draft_table: torch.Tensor) -> ModelRunner:
    runner = table_runner(table, 8 * 8)
    runner.drafts = DraftModel(table_runner(draft_table, 64), DraftLimits(64, BLOCK_SIZE, 1000, 512))
    return runner


def settings(folder: Path, **others: object) -> EngineSettings:
    given: dict[str, object] = {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "block_size": BLOCK_SIZE,
        "kv_cache_memory": "1MiB",
        "max_model_len": 100,
    }
    return EngineSettings(**given | others)  # type: ignore[arg-type]


def test_a_real_draft_model_changes_no_greedy_token(tmp_path: Path) -> None:
    """The target model is its own draft model, so a wrong token in its KV after a rejection would change the output."""
    FAMILIES["llama"].save(tmp_path)
    engine = build_engine(settings(tmp_path))
    plain, speculating = talks_of(3, [5, 9, 11, 4], 60), talks_of(3, [5, 9, 11, 4], 60)
    for talk in (*plain, *speculating):
        talk.token_ids += [talk.number + 20, talk.number + 90]
    speak(engine.runner, plain, 60)
    with_draft = with_draft_model(settings(tmp_path, speculation="draft", draft_model=str(tmp_path)), engine)
    assert any(line.startswith(f"draft model: {tmp_path.name}, KV of ") for line in with_draft.report)
    for talk in speculating:
        talk.drafter = ModelDrafter(Acceptance(4, 16))
    steps = speak(engine.runner, speculating, 60)
    assert [talk.token_ids for talk in speculating] == [talk.token_ids for talk in plain]
    assert steps < 3 * 54 / 3
    engine.pool.close()


def test_a_missing_draft_model_is_refused_under_its_own_flag(tmp_path: Path) -> None:
    FAMILIES["llama"].save(tmp_path)
    target = build_engine(settings(tmp_path))
    with pytest.raises(ConfigError, match=r"^--draft-model /nowhere/draft: there is no such folder"):
        build_draft_model(settings(tmp_path, speculation="draft", draft_model="/nowhere/draft"), target)
    target.pool.close()


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    FAMILIES["llama"].save(tmp_path)
    target = build_engine(settings(tmp_path))
    other = replace(target, model_info=replace(target.model_info, vocab_size=512))
    with pytest.raises(ConfigError, match=r"has 128 tokens and the model 512"):
        build_draft_model(settings(tmp_path, speculation="draft", draft_model=str(tmp_path)), other)
    target.pool.close()
