"""A choice continues at another router from the tokens and characters that the client has, without a visible gap."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cluster.errors import InvalidRequest
from cluster.messages import FinishReason, SampledToken, Sampling, TokenStops
from cluster.protocol.hashing import pack_ids
from router.request.choice import Choice
from router.request.validation import ResolvedRequest
from router.requests import ChoiceDelta, ResumedChoice
from router.text.detokenizer import Detokenizer, Vocabulary
from router.text.text_stream import TextStream
from tests.examples import num_examples

DEMO_TOKENIZER = Path(__file__).parents[4] / "examples" / "demo_model" / "tokenizer.json"
EOS, NAMED = 0, 9
MOST_TOKENS = 24


@cache
def demo() -> tuple[Tokenizer, Vocabulary]:
    tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER))
    return tokenizer, Vocabulary(tokenizer)


def new_choice(
    stop: tuple[str, ...] = (),
    max_tokens: int = MOST_TOKENS,
    min_tokens: int = 0,
    *,
    includes_stop: bool = False,
    skips_special_tokens: bool = True,
) -> Choice:
    request = ResolvedRequest(
        prompt_token_ids=(1,),
        packed_prompt=pack_ids((1,)),
        sampling=Sampling(),
        stops=TokenStops(max_tokens, min_tokens, frozenset({EOS, NAMED})),
        stop_strings=stop,
        includes_stop=includes_stop,
        skips_special_tokens=skips_special_tokens,
        named_stop_token_ids=frozenset({NAMED}),
        seed=7,
        seeds=(7,),
        cache_salt="",
        priority=0,
        is_batch=False,
        vocab_size=demo()[0].get_vocab_size(),
    )
    detokenizer = Detokenizer(demo()[1], skips_special_tokens=skips_special_tokens)
    return Choice(0, request, TextStream(detokenizer, stop, min_tokens, includes_stop=includes_stop))


def drawn(choice: Choice, token_ids: list[int], max_tokens: int = MOST_TOKENS) -> list[ChoiceDelta]:
    """Return the client's deltas for these tokens until the choice ends; a worker marks the end at its last token."""
    deltas = []
    for token_id in token_ids:
        if choice.ended:
            break
        index = choice.num_committed
        reason = FinishReason.LENGTH if index + 1 == max_tokens else None
        reason = FinishReason.STOP if token_id in (EOS, NAMED) else reason
        deltas.append(choice.append(index, SampledToken(token_id, None, reason)))
    return deltas


def client_has(deltas: list[ChoiceDelta]) -> ResumedChoice:
    return ResumedChoice(
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        num_characters=sum(len(delta.text) for delta in deltas),
        finish_reason=deltas[-1].finish_reason if deltas else None,
    )


def told(deltas: list[ChoiceDelta]) -> tuple[list[int], str, object, object]:
    tokens = [token_id for delta in deltas for token_id in delta.token_ids]
    last = deltas[-1]
    return tokens, "".join(delta.text for delta in deltas), last.finish_reason, last.stop_cause


def ids(text: str) -> list[int]:
    token_ids: list[int] = demo()[0].encode(text).ids
    return token_ids


HALVES = ids("a 世界 🙂é")  # most of its tokens end in half a character


@settings(max_examples=num_examples(suite=65, search=200))
@given(
    st.lists(st.integers(0, 1023), min_size=1, max_size=MOST_TOKENS + 4),
    st.integers(0, MOST_TOKENS),
    st.sampled_from([(), ("in", "return"), ("世", "🙂é", "e"), ("\ufffd",)]),
    st.integers(0, 3),
    st.fixed_dictionaries({"includes_stop": st.booleans(), "skips_special_tokens": st.booleans()}),
)
@example(HALVES, len(HALVES) - 2, ("🙂é",), 0, {})
@example(HALVES, 4, (), 0, {})
@example([*ids("self.return"), EOS], 2, ("return",), 0, {})
@example([*ids("self.return"), EOS], 2, ("return",), 0, {"includes_stop": True})
def test_a_client_gets_the_same_text_wherever_its_router_dies(
    token_ids: list[int], cut: int, stop: tuple[str, ...], min_tokens: int, options: dict[str, bool]
) -> None:
    undisturbed = drawn(new_choice(stop, min_tokens=min_tokens, **options), token_ids)
    before = undisturbed[:cut]
    resumed = new_choice(stop, min_tokens=min_tokens, **options)
    missed = resumed.resume(client_has(before))
    assert missed is None
    after = drawn(resumed, token_ids[len(before) :])
    assert resumed.ended == (undisturbed[-1].finish_reason is not None)
    assert told(before + after) == told(undisturbed)


def test_the_text_of_a_stop_token_or_stop_string_is_included_on_request() -> None:
    text = demo()[0].decode([5, 6])
    for end, shown in ((NAMED, demo()[0].decode([NAMED])), (EOS, "<|endoftext|>")):
        choice = new_choice(includes_stop=True, skips_special_tokens=False)
        assert "".join(delta.text for delta in drawn(choice, [5, 6, end])) == text + shown
    hidden = drawn(new_choice(includes_stop=True), [5, 6, EOS])
    assert "".join(delta.text for delta in hidden) == text, "an end token is a special token, and these are skipped"
    cut = drawn(new_choice(("\n",), includes_stop=True), ids("x = 1\n\ny"))
    assert "".join(delta.text for delta in cut) == "x = 1\n"


@pytest.mark.parametrize(
    ("token_ids", "stop", "reason", "cause"),
    [
        ([5, 6, EOS], (), FinishReason.STOP, None),
        ([5, 6, NAMED], (), FinishReason.STOP, NAMED),
        ([5] * MOST_TOKENS, (), FinishReason.LENGTH, None),
        (ids("x = 1\n\ny"), ("\n",), FinishReason.STOP, "\n"),
    ],
)
def test_a_missed_end_is_delivered_without_a_token(
    token_ids: list[int], stop: tuple[str, ...], reason: FinishReason, cause: str | None
) -> None:
    deltas = drawn(new_choice(stop), token_ids)
    tokens, text, *_ = told(deltas)
    resumed = new_choice(stop)
    missed = resumed.resume(ResumedChoice(tuple(tokens), len(text) - 1 if text else 0))
    assert resumed.ended and missed is not None
    assert (missed.finish_reason, missed.stop_cause, missed.token_ids) == (reason, cause, ())
    assert (missed.first_index, missed.text) == (len(tokens), text[-1:])


def test_a_choice_that_the_client_received_to_its_end_is_not_continued() -> None:
    resumed = new_choice()
    assert resumed.resume(ResumedChoice((5, 6), 0, FinishReason.LENGTH)) is None
    assert resumed.ended and resumed.num_committed == 2


@pytest.mark.parametrize(
    ("has", "named"),
    [
        (ResumedChoice((5, EOS, 6)), "ended with its token 1"),
        (ResumedChoice((5,) * (MOST_TOKENS + 1)), f"ended with its token {MOST_TOKENS - 1}"),
        (ResumedChoice(tuple(ids("ab")), 30), "30 characters, and its tokens make 2"),
        (ResumedChoice((), 1), "1 characters, and its tokens make 0"),
    ],
)
def test_a_resumption_that_no_router_can_have_produced_is_refused(has: ResumedChoice, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        new_choice().resume(has)
