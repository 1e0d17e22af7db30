"""Logit rules: the logits of `transformers`' processors where it has them, else of the published formula, whatever the
batch, the draft tokens and the way in which a sequence came to its tokens."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from cluster.messages import LogitRules, Sampling
from engine.cpu.compiled_draw import CompiledDraw
from engine.cpu.library import load_library
from engine.decoders.layer_parts import NotCompiled
from engine.sampling.adjustment import adjusted_rows
from engine.sampling.logit_state import LogitState
from engine.scheduling.step import Sample
from engine.steps import sampler
from engine.steps.sampler import draw

VOCAB = 40
NO_RULES = LogitRules()


def random_rules(dice: random.Random) -> LogitRules:
    allowed = dice.choice([(), (), tuple(dice.sample(range(VOCAB), 25))])
    return LogitRules(
        logit_bias=tuple(
            (token_id, dice.uniform(-100, 100)) for token_id in dice.sample(range(VOCAB), dice.choice([0, 3]))
        ),
        repetition_penalty=dice.choice([1.0, 1.3, 0.7]),
        frequency_penalty=dice.choice([0.0, 0.4, -1.1]),
        presence_penalty=dice.choice([0.0, 1.7, -0.3]),
        allowed_token_ids=allowed,
        bad_words=tuple(
            tuple(dice.choices(range(6), k=dice.choice([1, 2, 3]))) for _ in range(dice.choice([0, 2, 12]))
        ),
    )


def random_tokens(dice: random.Random, most: int) -> list[int]:
    """Return random tokens of a small set, so that many occur again and bad words are completed."""
    return dice.choices(range(8), k=dice.randrange(1, most))


def sample_of(rules: LogitRules, tokens: Sequence[int], num_prompt: int, draft_tokens: tuple[int, ...] = ()) -> Sample:
    state = LogitState(rules, list(tokens), num_prompt)
    return Sample(7, len(tokens) + len(draft_tokens), Sampling(1.0, rules=rules), frozenset(), state, draft_tokens)


def adjusted(logits: torch.Tensor, *samples: Sample) -> torch.Tensor:
    return adjusted_rows(logits, samples).in_place_of(logits)


def by_transformers(rules: LogitRules, tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Return the logits under the rules that `transformers` has, for the token after `tokens`."""
    processors = LogitsProcessorList()
    if rules.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in rules.logit_bias]))
    if rules.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(rules.repetition_penalty))
    if rules.bad_words:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in dict.fromkeys(rules.bad_words)]))
    found: torch.Tensor = processors(torch.tensor([list(tokens)]), logits[None])[0]  # type: ignore[arg-type]
    return found


def by_formula(rules: LogitRules, tokens: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
    """Apply all rules with plain Python numbers, token by token."""
    counts, seen, bias = Counter(tokens[num_prompt:]), set(tokens), dict(rules.logit_bias)
    values = []
    for token_id, logit in enumerate(logits.tolist()):
        value = logit + bias.get(token_id, 0.0)
        if token_id in seen:
            value = value / rules.repetition_penalty if value > 0 else value * rules.repetition_penalty
        value -= counts[token_id] * rules.frequency_penalty + (counts[token_id] > 0) * rules.presence_penalty
        ends_bad_word = any(tuple([*tokens, token_id][-len(word) :]) == word for word in rules.bad_words)
        is_allowed = token_id in rules.allowed_token_ids or not rules.allowed_token_ids
        values.append(value if is_allowed and not ends_bad_word else -torch.inf)
    return torch.tensor(values)


def test_logits_equal_those_of_the_processors_of_transformers() -> None:
    dice, generator = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(200):
        rules = replace(random_rules(dice), frequency_penalty=0.0, presence_penalty=0.0, allowed_token_ids=())
        tokens, logits = random_tokens(dice, 30), 4 * torch.randn(VOCAB, generator=generator)
        num_prompt = dice.randrange(len(tokens) + 1)

        assert torch.equal(
            adjusted(logits[None], sample_of(rules, tokens, num_prompt))[0], by_transformers(rules, tokens, logits)
        )


def test_logits_follow_the_published_formulas() -> None:
    dice, generator = random.Random(2), torch.Generator().manual_seed(2)
    for _ in range(200):
        rules, tokens = random_rules(dice), random_tokens(dice, 30)
        logits, num_prompt = 4 * torch.randn(VOCAB, generator=generator), dice.randrange(len(tokens) + 1)

        found = adjusted(logits[None], sample_of(rules, tokens, num_prompt))[0]

        torch.testing.assert_close(found, by_formula(rules, tokens, num_prompt, logits), rtol=1e-5, atol=1e-5)


def test_only_output_tokens_count_for_frequency_and_presence_and_prompt_tokens_for_repetition_too() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -1.0]])
    tokens = [0, 3, 1, 1]  # of which the first two are the prompt

    def found(rules: LogitRules) -> list[float]:
        return adjusted(logits, sample_of(rules, tokens, 2))[0].tolist()

    assert found(LogitRules(repetition_penalty=2.0)) == [0.5, 0.5, 1.0, -2.0]
    assert found(LogitRules(frequency_penalty=2.0)) == [1.0, -3.0, 1.0, -1.0]
    assert found(LogitRules(presence_penalty=2.0)) == [1.0, -1.0, 1.0, -1.0]


def test_a_draft_token_counts_for_the_positions_after_it_and_for_no_later_step() -> None:
    dice, generator = random.Random(3), torch.Generator().manual_seed(3)
    for _ in range(100):
        rules, tokens, num_prompt = random_rules(dice), random_tokens(dice, 20), 1
        state = LogitState(rules, tokens, num_prompt)
        logits = torch.randn(4, VOCAB, generator=generator)
        draft_tokens = tuple(random_tokens(dice, 4))
        places = range(len(draft_tokens) + 1)

        drafted = adjusted(
            logits[: len(places)],
            *(Sample(1, 1, Sampling(rules=rules), frozenset(), state, draft_tokens[:place]) for place in places),
        )
        tokens.append(dice.randrange(8))  # and no draft token was accepted
        after = adjusted(logits[:1], Sample(1, 1, Sampling(rules=rules), frozenset(), state))

        known = tokens[:-1]
        singly = [
            adjusted(logits[place][None], sample_of(rules, [*known, *draft_tokens[:place]], num_prompt))
            for place in places
        ]
        assert torch.equal(drafted, torch.cat(singly))
        assert torch.equal(after, adjusted(logits[:1], sample_of(rules, tokens, num_prompt)))


def test_a_state_that_followed_its_tokens_equals_one_made_at_their_end() -> None:
    """A sequence that is resumed, moved or recomputed therefore has the same logits."""
    dice, generator = random.Random(4), torch.Generator().manual_seed(4)
    for _ in range(50):
        rules, tokens = random_rules(dice), random_tokens(dice, 5)
        num_prompt, logits = len(tokens), torch.randn(1, VOCAB, generator=generator)
        state = LogitState(rules, tokens, num_prompt)
        for _ in range(15):
            followed = adjusted(logits, Sample(1, len(tokens), Sampling(rules=rules), frozenset(), state))
            assert torch.equal(followed, adjusted(logits, sample_of(rules, tokens, num_prompt)))
            tokens.append(dice.randrange(8))


@pytest.fixture(scope="module")
def compiled() -> CompiledDraw:
    try:
        return CompiledDraw(load_library())
    except NotCompiled as why:
        pytest.skip(f"{why}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_ways_of_drawing_draw_from_the_changed_logits(compiled: CompiledDraw, dtype: torch.dtype) -> None:
    """The steps have rows with rules and rows without."""
    dice, generator = random.Random(5), torch.Generator().manual_seed(5)
    for _ in range(30):
        logits = (3 * torch.randn(6, VOCAB, generator=generator)).to(dtype)
        rules = [random_rules(dice) if dice.random() < 0.6 else None for _ in range(6)]
        tokens = [random_tokens(dice, 12) for _ in range(6)]
        samples = [
            replace(
                sample_of(rule or NO_RULES, known, 2) if rule else Sample(0, 3, Sampling()),
                sampling=Sampling(dice.choice([0.0, 1.0]), top_p=0.9),
                banned_token_ids=frozenset({9}),
            )
            for rule, known in zip(rules, tokens, strict=True)
        ]
        plain = [
            by_formula(rule or NO_RULES, known, 2, row.float())
            for rule, known, row in zip(rules, tokens, logits, strict=True)
        ]
        expected = draw(torch.stack(plain), [replace(sample, logit_state=None) for sample in samples])
        before = logits.clone()

        assert draw(logits, samples) == draw(logits, samples, compiled) == expected
        assert torch.equal(logits, before)


def test_log_probabilities_are_those_of_the_logits_without_rules(compiled: CompiledDraw) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6))
    sample = sample_of(replace(NO_RULES, allowed_token_ids=(3,)), [1, 2], 1)
    sample = replace(sample, sampling=Sampling(1.0, num_logprobs=2))

    (drawn,) = draw(logits, [sample], compiled)

    assert drawn == draw(logits, [sample])[0]
    assert drawn.logprobs is not None and drawn.token_id == 3
    assert drawn.logprobs.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 3]))


def test_a_step_without_rules_computes_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sampler, "adjusted_rows")
    monkeypatch.delattr(sampler, "masked_rows")

    assert len(draw(torch.zeros(2, VOCAB), [Sample(1, 2, Sampling(1.0))] * 2)) == 2


@pytest.mark.cuda
def test_a_gpu_changes_logits_as_a_cpu_does() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    dice, generator = random.Random(8), torch.Generator().manual_seed(8)
    samples = [sample_of(random_rules(dice), random_tokens(dice, 20), 2) for _ in range(64)]
    logits = 3 * torch.randn(64, VOCAB, generator=generator)

    torch.testing.assert_close(
        adjusted(logits.cuda(), *samples).cpu(), adjusted(logits, *samples), rtol=1e-6, atol=1e-6
    )
    assert draw(logits.cuda(), samples) == draw(logits, samples)
