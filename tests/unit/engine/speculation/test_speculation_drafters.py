"""The tokens that the drafters propose, and the number of draft tokens that a sequence gets."""

import random
from collections.abc import Sequence

import pytest

import engine.speculation.drafter as lookup_module
from cluster.errors import ConfigError
from cluster.settings.worker_settings import EngineSettings
from engine.speculation.drafter import (
    Acceptance,
    ModelDrafter,
    PromptLookup,
    TextDrafter,
    best_num_draft_tokens,
    drafter_factory,
)


def test_prompt_lookup_proposes_the_tokens_after_the_last_occurrence() -> None:
    assert PromptLookup().propose([1, 2, 3, 4, 5, 9, 1, 2], 3) == (3, 4, 5)


def test_a_text_without_repetition_gives_no_draft_token() -> None:
    assert PromptLookup().propose(list(range(50)), 4) == ()
    assert PromptLookup().propose([7], 4) == PromptLookup().propose([], 4) == ()


def test_prompt_lookup_prefers_the_longest_match_then_the_newest() -> None:
    longest = [8, 1, 2, 30, 9, 1, 2, 40, 8, 1, 2]
    assert PromptLookup().propose(longest, 1) == (30,)
    newest = [1, 2, 30, 9, 1, 2, 40, 7, 1, 2]
    assert PromptLookup().propose(newest, 1) == (40,)


def test_a_loop_is_continued_beyond_the_end_of_the_text() -> None:
    assert PromptLookup().propose([5, 6, 7, 5, 6, 7, 5, 6], 7) == (7, 5, 6, 7, 5, 6, 7)


@pytest.mark.parametrize("seed", range(5))
def test_a_growing_sequence_gets_the_same_draft_tokens_as_one_indexed_at_once(seed: int) -> None:
    dice = random.Random(seed)
    tokens = [dice.randrange(4) for _ in range(120)]
    growing = PromptLookup()
    for length in sorted(dice.sample(range(121), 40)):
        assert growing.propose(tokens[:length], 4) == PromptLookup().propose(tokens[:length], 4)


def test_a_call_looks_at_new_tokens_only() -> None:
    lookup, tokens = PromptLookup(), _Counted(range(4000))
    lookup.propose(tokens, 4)
    tokens.append(1)
    tokens.num_read = 0
    lookup.propose(tokens, 4)
    assert tokens.num_read < 50


class _Counted(list[int]):
    num_read = 0

    def __getitem__(self, place: object) -> object:  # type: ignore[override]
        found = super().__getitem__(place)  # type: ignore[call-overload]
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


def test_the_index_of_an_endless_sequence_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "_MAX_INDEXED", 64)
    lookup, tokens = PromptLookup(), list(range(1000))
    for _ in range(500):
        lookup.propose(tokens, 4)
        tokens.append(len(tokens))
        assert len(lookup._newest) + len(lookup._older) <= 2 * 64
    assert lookup.propose([*tokens, *tokens[-20:-10]], 2) == tuple(tokens[-10:-8])


def test_a_higher_acceptance_rate_gives_more_draft_tokens() -> None:
    counts = [best_num_draft_tokens(rate, 8, 0.1) for rate in (0.05, 0.3, 0.6, 0.9, 0.99)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 8


def test_more_sequences_in_the_step_give_fewer_draft_tokens() -> None:
    acceptance = Acceptance(8, fixed_rows=16)
    for turn in range(60):
        acceptance.observe(1, turn % 4 > 0)
    counts = [acceptance.num_draft_tokens(sequences) for sequences in (1, 4, 16, 64, 256)]
    assert counts == sorted(counts, reverse=True) and counts[0] >= 4 and counts[-1] == 0


def test_a_sequence_whose_draft_tokens_are_rejected_rests_and_tries_again() -> None:
    drafter = TextDrafter(_Always(), Acceptance(4, 16))
    made = []
    for _ in range(200):
        draft_tokens = drafter.propose([1, 2], 10, 2)
        made.append(len(draft_tokens))
        if draft_tokens:
            drafter.judge(len(draft_tokens), 0)
    assert made[0] == 4
    assert made[-100:].count(0) > 90 and max(made[-100:]) == 1


def test_a_resting_sequence_gets_its_full_number_of_draft_tokens_once_some_are_accepted() -> None:
    drafter = TextDrafter(_Always(), Acceptance(4, 16))
    made = []
    for turn in range(600):
        draft_tokens = drafter.propose([1, 2], 10, 2)
        made.append(len(draft_tokens))
        if draft_tokens:
            drafter.judge(len(draft_tokens), 0 if turn < 100 else len(draft_tokens))
    assert made[99] == 0 and made[-1] == 4


class _Always:
    def propose(self, token_ids: Sequence[int], max_draft_tokens: int) -> tuple[int, ...]:
        return (3,) * max_draft_tokens


def test_draft_tokens_never_exceed_the_limit() -> None:
    assert TextDrafter(_Always(), Acceptance(4, 16)).propose([1], 2, 1) == (3, 3)
    assert (
        TextDrafter(_Always(), Acceptance(4, 16)).propose([1], 0, 1)
        == TextDrafter(_Always(), Acceptance(4, 16)).propose([1], -1, 1)
        == ()
    )
    drafted = ModelDrafter(Acceptance(4, 16))
    drafted.store(3, (7, 8, 9))
    assert drafted.propose([1, 2, 3], 2, 1) == (7, 8)


def test_tokens_drafted_for_another_length_are_dropped() -> None:
    drafted = ModelDrafter(Acceptance(4, 16))
    drafted.store(3, (7, 8, 9))
    assert drafted.propose([1, 2, 3, 4], 4, 1) == ()
    assert drafted.propose([1, 2, 3], 4, 1) == (7, 8, 9)


def test_draft_tokens_after_a_rejected_one_do_not_count() -> None:
    """Half of all first draft tokens are accepted: the rate is the same with one draft token per step and with four."""
    single, several = Acceptance(4, 16), Acceptance(4, 16)
    for turn in range(400):
        single.observe(1, turn % 2)
        several.observe(4, 0)
        several.observe(1, 1)
    assert single.rate == pytest.approx(several.rate, abs=0.03) == pytest.approx(0.5, abs=0.05)


def test_settings_make_the_drafter() -> None:
    assert drafter_factory(EngineSettings(), lambda: 16) is None
    by_text = drafter_factory(EngineSettings(speculation="prompt", num_draft_tokens=2), lambda: 16)
    assert by_text is not None and len(by_text().propose([1, 2, 3, 1, 2, 3, 1, 2], 9, 1)) == 2
    drafted = drafter_factory(EngineSettings(speculation="draft", draft_model="m"), lambda: 16)
    assert drafted is not None
    request = drafted().request([1, 2], 1)
    assert request is not None and request.max_draft_tokens == 4


@pytest.mark.parametrize("settings", [{"speculation": "draft"}, {"draft_model": "m"}, {"num_draft_tokens": 0}])
def test_speculation_that_cannot_work_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        EngineSettings(**settings)  # type: ignore[arg-type]
