"""What the ways to guess propose, and how many guesses a sequence makes."""

import random
from collections.abc import Sequence

import pytest

import engine.speculation.prompt_lookup as lookup_module
from cluster.errors import ConfigError
from cluster.settings.engine_settings import EngineSettings
from engine.speculation.acceptance import Acceptance, best_num_guesses
from engine.speculation.drafter import DraftedGuesser, TextGuesser
from engine.speculation.guessers import new_guesser
from engine.speculation.prompt_lookup import PromptLookup


def test_what_followed_the_last_time_is_guessed() -> None:
    assert PromptLookup().propose([1, 2, 3, 4, 5, 9, 1, 2], 3) == (3, 4, 5)


def test_a_text_without_repetition_gives_no_guess() -> None:
    assert PromptLookup().propose(list(range(50)), 4) == ()
    assert PromptLookup().propose([7], 4) == PromptLookup().propose([], 4) == ()


def test_the_longest_agreement_wins_then_the_newest() -> None:
    longest = [8, 1, 2, 30, 9, 1, 2, 40, 8, 1, 2]
    assert PromptLookup().propose(longest, 1) == (30,)
    newest = [1, 2, 30, 9, 1, 2, 40, 7, 1, 2]
    assert PromptLookup().propose(newest, 1) == (40,)


def test_a_loop_is_guessed_beyond_the_end_of_the_text() -> None:
    assert PromptLookup().propose([5, 6, 7, 5, 6, 7, 5, 6], 7) == (7, 5, 6, 7, 5, 6, 7)


@pytest.mark.parametrize("seed", range(5))
def test_a_sequence_seen_growing_is_guessed_as_one_seen_whole(seed: int) -> None:
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


def test_more_guesses_are_made_the_more_come_true() -> None:
    counts = [best_num_guesses(rate, 8, 0.1) for rate in (0.05, 0.3, 0.6, 0.9, 0.99)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 8


def test_fewer_guesses_are_made_the_more_sequences_share_the_step() -> None:
    acceptance = Acceptance(8, fixed_rows=16)
    for turn in range(60):
        acceptance.observe(1, turn % 4 > 0)
    counts = [acceptance.num_guesses(sequences) for sequences in (1, 4, 16, 64, 256)]
    assert counts == sorted(counts, reverse=True) and counts[0] >= 4 and counts[-1] == 0


def test_a_sequence_whose_guesses_fail_rests_and_tries_again() -> None:
    guesser = TextGuesser(_Always(), Acceptance(4, 16))
    made = []
    for _ in range(200):
        guesses = guesser.propose([1, 2], 10, 2)
        made.append(len(guesses))
        if guesses:
            guesser.judge(len(guesses), 0)
    assert made[0] == 4
    assert made[-100:].count(0) > 90 and max(made[-100:]) == 1


def test_a_sequence_that_rests_guesses_fully_again_once_it_comes_true() -> None:
    guesser = TextGuesser(_Always(), Acceptance(4, 16))
    made = []
    for turn in range(600):
        guesses = guesser.propose([1, 2], 10, 2)
        made.append(len(guesses))
        if guesses:
            guesser.judge(len(guesses), 0 if turn < 100 else len(guesses))
    assert made[99] == 0 and made[-1] == 4


class _Always:
    def propose(self, token_ids: Sequence[int], max_guesses: int) -> tuple[int, ...]:
        return (3,) * max_guesses


def test_no_more_is_guessed_than_the_sequence_may_grow() -> None:
    assert TextGuesser(_Always(), Acceptance(4, 16)).propose([1], 2, 1) == (3, 3)
    assert (
        TextGuesser(_Always(), Acceptance(4, 16)).propose([1], 0, 1)
        == TextGuesser(_Always(), Acceptance(4, 16)).propose([1], -1, 1)
        == ()
    )
    drafted = DraftedGuesser(Acceptance(4, 16))
    drafted.take(3, (7, 8, 9))
    assert drafted.propose([1, 2, 3], 2, 1) == (7, 8)


def test_what_was_drafted_for_another_length_is_dropped() -> None:
    drafted = DraftedGuesser(Acceptance(4, 16))
    drafted.take(3, (7, 8, 9))
    assert drafted.propose([1, 2, 3, 4], 4, 1) == ()
    assert drafted.propose([1, 2, 3], 4, 1) == (7, 8, 9)


def test_guesses_behind_a_wrong_one_say_nothing_of_acceptance() -> None:
    """Half of all first guesses right, judged one at a time or in front of three more: the same rate."""
    single, several = Acceptance(4, 16), Acceptance(4, 16)
    for turn in range(400):
        single.observe(1, turn % 2)
        several.observe(4, 0)
        several.observe(1, 1)
    assert single.rate == pytest.approx(several.rate, abs=0.03) == pytest.approx(0.5, abs=0.05)


def test_settings_make_the_guesser() -> None:
    assert new_guesser(EngineSettings(), lambda: 16) is None
    by_text = new_guesser(EngineSettings(speculation="prompt", num_guesses=2), lambda: 16)
    assert by_text is not None and len(by_text().propose([1, 2, 3, 1, 2, 3, 1, 2], 9, 1)) == 2
    drafted = new_guesser(EngineSettings(speculation="draft", draft_model="m"), lambda: 16)
    assert drafted is not None
    request = drafted().request([1, 2], 1)
    assert request is not None and request.max_guesses == 4


@pytest.mark.parametrize("settings", [{"speculation": "draft"}, {"draft_model": "m"}, {"num_guesses": 0}])
def test_speculation_that_cannot_work_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        EngineSettings(**settings)  # type: ignore[arg-type]
