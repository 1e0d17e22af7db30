"""Sequences with grammars on a real model: their answers match the grammar, at whatever token they are continued, and
do not affect other sequences.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.errors import GrammarRejected, NoGrammarWorker
from cluster.messages import FinishReason, Grammar, GrammarKind, Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.cpu.compiled_draw import CompiledDraw
from engine.cpu.library import load_library
from engine.decoders.layer_parts import NotCompiled
from engine.grammar.compiled_grammars import CompiledGrammars, StepMasks
from engine.sampling.logit_state import GrammarState
from engine.scheduling.step import Sample
from engine.steps.sampler import draw
from tests.unit.engine.rigs.grammar_bench import BLOCK_SIZE, EOS, GrammarBench
from tests.unit.engine.rigs.speculating import FixedDrafter, Oracle
from tests.unit.engine.sampling.test_grammar_engine import DEMO, GRAMMARS, IS_WHOLE, schema, tokenization

SAMPLINGS = {"greedy": Sampling(), "hot": Sampling(temperature=1.5), "cut": Sampling(1.0, top_k=40, top_p=0.9)}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings = EngineSettings(
        model=str(DEMO), dtype="float32", device="cpu", block_size=BLOCK_SIZE, num_blocks=400, max_model_len=512
    )
    engine = build_engine(settings)
    engine.runner.masks = StepMasks(CompiledGrammars(DEMO))
    yield engine
    engine.pool.close()


def whole(tokens: list[int]) -> str:
    assert tokens[-1] == EOS
    return tokenization().decode(tokens[:-1])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_of_many_grammars_in_one_step_match_their_grammars(engine: Engine, sampling: str) -> None:
    bench = GrammarBench(engine)
    handles = {
        name: bench.admit(grammar, sampling=SAMPLINGS[sampling], seeds=(1, 2, 3)) for name, grammar in GRAMMARS.items()
    }
    (free,) = bench.admit(None, sampling=SAMPLINGS[sampling], max_tokens=20)
    answers = bench.run()

    for name, ours in handles.items():
        for handle in ours:
            if answers.ends[handle] == FinishReason.STOP:
                assert IS_WHOLE[name](whole(answers.tokens[handle]))
    ended = [answers.ends[handle] for name in ("schema", "regex", "choice") for handle in handles[name]]
    assert ended == [FinishReason.STOP] * 9
    alone = GrammarBench(engine)
    alone.admit(None, sampling=SAMPLINGS[sampling], max_tokens=20)
    assert alone.run().tokens[1] == answers.tokens[free]


def test_an_answer_continued_at_every_index_is_the_undisturbed_one(engine: Engine) -> None:
    """A worker that was killed leaves the prompt and the committed tokens."""
    grammar = schema({"type": "array", "items": {"enum": ["one", "two", 3]}, "minItems": 2, "maxItems": 3})
    first = GrammarBench(engine)
    first.admit(grammar)
    undisturbed = first.run().tokens[1]
    assert 10 < len(undisturbed) < 100
    second = GrammarBench(engine)
    for num_committed in range(1, len(undisturbed)):
        second.admit(grammar, committed=undisturbed[:num_committed])
    assert set(map(tuple, second.run().tokens.values())) == {tuple(undisturbed)}


def test_draft_tokens_change_no_token_of_an_answer(engine: Engine) -> None:
    prompt, outputs = [5, 6, 7], []
    plain = GrammarBench(engine)
    plain.admit(GRAMMARS["schema"], prompt)
    outputs.append(plain.run().tokens[1])
    for rightness in ([True] * 500, [True, False] * 250, [False] * 500):
        oracle = Oracle([*prompt, *outputs[0]], iter(rightness), 1024)
        bench = GrammarBench(engine, lambda oracle=oracle: FixedDrafter(oracle, 3))  # type: ignore[misc]
        bench.admit(GRAMMARS["schema"], prompt)
        outputs.append(bench.run().tokens[1])
        assert any(chunk.num_draft_tokens for plan in bench.plans for chunk in plan.chunks)
    assert outputs[1:] == outputs[:1] * 3


def test_tokens_that_the_grammar_rejects_end_their_request_alone_with_a_named_error(engine: Engine) -> None:
    bench = GrammarBench(engine)
    digits = Grammar(GrammarKind.REGEX, "[0-9]{4}")
    seven, letter = tokenization().encode("7")[0], tokenization().encode("x")[0]
    (right,) = bench.admit(digits, committed=[seven])
    (wrong,) = bench.admit(digits, committed=[seven, letter])
    (after_the_end,) = bench.admit(digits, committed=[seven, seven, seven, seven, EOS])
    (too_long,) = bench.admit(digits, committed=[seven] * 5)
    answers = bench.run()
    assert answers.ends[right] == FinishReason.STOP and len(answers.tokens[right]) == 5
    for handle, index in ((wrong, 1), (after_the_end, 5), (too_long, 4)):
        error = answers.ends[handle]
        assert isinstance(error, GrammarRejected) and f"index {index} " in error.message
    assert answers.tokens[wrong] == [seven, letter]


def test_a_grammar_that_exceeds_the_librarys_limits_ends_its_request_with_that_reason(engine: Engine) -> None:
    words = " | ".join(f'"v{number:04}"' for number in range(2500))  # of a rule; the library allows 2,000
    bench = GrammarBench(engine)
    (wide,) = bench.admit(Grammar(GrammarKind.GRAMMAR, f'start: "<" word\nword: {words}'))
    error = bench.run().ends[wide]
    assert isinstance(error, GrammarRejected) and "became too complex at index" in error.message


def test_no_step_is_planned_ahead_of_a_token_that_a_grammar_needs(engine: Engine) -> None:
    bench = GrammarBench(engine)
    bench.admit(GRAMMARS["regex"])
    _, plan = bench.scheduler.plan(0.0)
    assert plan is not None and not bench.scheduler.may_plan_ahead
    bench.scheduler.complete(plan, engine.runner.run(plan), 0.0)


def test_a_worker_without_the_library_refuses_plainly() -> None:
    grammars = CompiledGrammars(None)
    assert grammars.engine_id == ""
    with pytest.raises(NoGrammarWorker, match="llguidance"):
        grammars.matcher(GRAMMARS["regex"])


def masked_samples(vocab_size: int, num_rows: int, generator: torch.Generator) -> list[Sample]:
    """Return samples with random masks, one word shorter than the vocabulary if possible; every third row has none."""
    num_words = max(1, vocab_size // 32)
    samples = []
    for row in range(num_rows):
        state = GrammarState(GRAMMARS["regex"], [], 0)
        words = torch.randint(-(1 << 31), 1 << 31, (1, num_words), generator=generator).to(torch.int32)
        words[:, ::3] = -1
        words[:, 1::3] = 0
        words[:, 0] |= 1 << (row % 16)
        state.masks = words
        sampling = list(SAMPLINGS.values())[row % 3]
        samples.append(Sample(row, 9, sampling, grammar_state=state if row % 3 != 2 else None))
    return samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab_size", [7, 32, 100, 1024, 5003])
def test_both_ways_of_drawing_draw_the_same_allowed_tokens(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (4 * torch.randn(24, vocab_size, generator=generator)).to(dtype)
    before, samples = logits.clone(), masked_samples(vocab_size, 24, generator)
    by_torch = [token.token_id for token in draw(logits, samples)]
    for sample, token_id in zip(samples, by_torch, strict=True):
        if sample.grammar_state is not None:
            masks = sample.grammar_state.masks
            assert isinstance(masks, torch.Tensor)
            assert token_id < 32 * masks.shape[1] and int(masks[0, token_id // 32]) >> token_id % 32 & 1
    for widest in (512, 256, 128):
        try:
            compiled = CompiledDraw(load_library(), widest=widest)
        except NotCompiled as why:
            pytest.skip(f"{why}")
        assert [token.token_id for token in draw(logits, samples, compiled)] == by_torch
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_excluded_or_banned_token_with_any_logit_is_not_drawn(temperature: float) -> None:
    """Token 40 is not a number, and token 3 is banned, so that the best one left is the last."""
    try:
        compiled = CompiledDraw(load_library())
    except NotCompiled as why:
        pytest.skip(f"{why}")
    logits = torch.full((1, 97), -1000.0)
    logits[0, [3, 40, 96]] = torch.tensor([9.0, torch.nan, 1.0])
    state = GrammarState(GRAMMARS["regex"], [], 0)
    state.masks = torch.tensor([[1 << 3, 0, 3, 1]], dtype=torch.int32)
    samples = [Sample(0, 0, Sampling(temperature), frozenset({3}), grammar_state=state)]
    assert [token.token_id for token in draw(logits, samples, compiled)] == [96]
    assert draw(logits, samples) == draw(logits, samples, compiled)


def test_log_probabilities_are_those_before_the_grammar() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, state = torch.randn(1, 64, generator=generator), GrammarState(GRAMMARS["regex"], [], 0)
    state.masks = torch.tensor([[1 << 5, 0]], dtype=torch.int32)
    (token,) = draw(logits, [Sample(0, 0, Sampling(num_logprobs=2), grammar_state=state)])
    assert token.token_id == 5 and token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(logits[0].log_softmax(0)[5].item())
    assert token.logprobs.top[0][0] == logits[0].argmax().item()


def test_a_folder_is_needed_only_when_there_is_a_grammar(engine: Engine, tmp_path: Path) -> None:
    bench = GrammarBench(engine)
    bench.admit(None, max_tokens=3)
    masks = engine.runner.masks
    assert masks is not None
    engine.runner.masks = StepMasks(CompiledGrammars(None))
    try:
        assert len(bench.run().tokens[1]) == 3
    finally:
        engine.runner.masks = masks
