"""Streamed text equals decoded text: nothing is repeated or lost, no character is split, and nothing follows a stop
string.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from cluster.errors import ConfigError
from router.text.detokenizer import Detokenizer, Vocabulary
from router.text.text_stream import TextStream
from tests.examples import num_examples
from tests.unit.router.text.small_tokenizers import FAMILIES, byte_level

DEMO_TOKENIZER = Path(__file__).parents[4] / "examples" / "demo_model" / "tokenizer.json"


@cache
def family(name: str) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER)) if name == "demo_model" else FAMILIES[name]()
    return tokenizer, Vocabulary(tokenizer)


def token_id(name: str, token: str) -> int:
    found = family(name)[0].token_to_id(token)
    assert found is not None
    return found


def new_stream(name: str, stop: tuple[str, ...] = (), min_tokens: int = 0) -> TextStream:
    return TextStream(Detokenizer(family(name)[1]), stop, min_tokens)


def portions(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    return [token_ids[a:b] for a, b in pairwise(edges)]


# Past every vocabulary of the families too: an id without a token has no text.
TOKEN_IDS = st.lists(st.integers(0, 300), max_size=40)
CUTS = st.lists(st.integers(0, 40), max_size=6)


@pytest.mark.parametrize("name", [*FAMILIES, "demo_model"])
@settings(max_examples=num_examples(suite=40, search=120))
@given(data=st.data(), cuts=CUTS)
def test_streamed_text_equals_decoding_everything_at_once(name: str, data: st.DataObject, cuts: list[int]) -> None:
    tokenizer, _ = family(name)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=40))
    stream = new_stream(name)

    pieces = [stream.push(portion).text for portion in portions(token_ids, cuts)]

    assert "".join(pieces) + stream.flush() == tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", [*FAMILIES, "demo_model"])
@settings(max_examples=num_examples(suite=20, search=60))
@given(data=st.data())
def test_special_tokens_are_in_the_text_by_their_names_where_they_are_not_skipped(
    name: str, data: st.DataObject
) -> None:
    tokenizer, vocabulary = family(name)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=20))
    stream = TextStream(Detokenizer(vocabulary, skips_special_tokens=False), (), 0)

    assert stream.push(token_ids).text + stream.flush() == tokenizer.decode(token_ids, skip_special_tokens=False)


def test_a_text_ends_after_its_stop_string_where_that_is_included() -> None:
    tokenizer, vocabulary = family("demo_model")
    token_ids = tokenizer.encode("self.name = name", add_special_tokens=False).ids
    stream = TextStream(Detokenizer(vocabulary), ("nam", "x"), 0, includes_stop=True)

    pushed = stream.push(token_ids)

    assert (pushed.text, pushed.stopped_by) == ("self.nam", "nam")


@settings(max_examples=num_examples(suite=40, search=120))
@given(TOKEN_IDS)
@example([0xE2, 0x82, 0xAC])  # one character over three tokens
@example([0xF0, 0x9F, 0xF0, 0x9F, 0x98, 0x80])  # an unfinished character, then a whole one
@example([0xFF] * 20)
def test_streamed_text_is_always_a_prefix_of_the_whole_text(token_ids: list[int]) -> None:
    tokenizer, _ = family("byte_level")
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    stream, sent = new_stream("byte_level"), ""

    for token in token_ids:
        sent += stream.push([token]).text
        assert whole.startswith(sent)


def test_half_a_character_is_held_until_the_rest_arrives() -> None:
    stream = new_stream("byte_level")
    assert [stream.push([byte]).text for byte in "é€😀".encode()] == ["", "é", "", "", "€", "", "", "", "😀"]


def test_invalid_bytes_do_not_hold_the_text_back() -> None:
    stream = new_stream("byte_level")
    assert stream.push([0xFF] * 1000).text == "\ufffd" * 1000


def test_an_unfinished_character_appears_at_the_end() -> None:
    stream = new_stream("byte_level")
    assert stream.push([0x41, 0xE2, 0x82]).text == "A"
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "word_piece", "demo_model"])
@settings(max_examples=num_examples(suite=40, search=120))
@given(data=st.data(), cuts=CUTS)
def test_text_ends_where_the_first_stop_string_begins(name: str, data: st.DataObject, cuts: list[int]) -> None:
    tokenizer, _ = family(name)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    stops = tuple(data.draw(st.lists(_stop_strings(whole), min_size=1, max_size=4)))

    text, cause, num_used = _drain(new_stream(name, stops), portions(token_ids, cuts))
    again = _drain(new_stream(name, stops), [[token] for token in token_ids])

    ends = [(whole.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    if not ends:
        assert (text, cause, num_used) == (whole, None, len(token_ids))
    else:
        end, _, first = min(ends)
        assert text == whole[: end - len(first)]
        assert cause in (first, None)  # None: only the very end of the text completed it
    assert again == (text, cause, num_used), "how the tokens were portioned must not matter"


def _stop_strings(whole: str) -> st.SearchStrategy[str]:
    """Return stop strings, half of them from the text itself."""
    if not whole:
        return st.text("ab. ", min_size=1, max_size=3)
    cuts = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 4))
    parts = cuts.map(lambda cut: whole[cut[0] : cut[0] + cut[1]])
    return parts | st.text("ab. \ufffd", min_size=1, max_size=3)


def _drain(stream: TextStream, pushed: list[list[int]]) -> tuple[str, str | None, int]:
    text, num_used = "", 0
    for portion in pushed:
        delta = stream.push(portion)
        text, num_used = text + delta.text, num_used + delta.num_tokens_used
        if delta.stopped_by is not None:
            return text, delta.stopped_by, num_used
    return text + stream.flush(), None, num_used


def test_only_text_that_may_begin_a_stop_string_is_held() -> None:
    stream = new_stream("byte_level", stop=("</s>", "\n\n"))
    assert [stream.push([ord(c)]).text for c in "a</sb<<"] == ["a", "", "", "", "</sb", "", "<"]
    assert stream.flush() == "<"


def test_a_stop_string_inside_a_token_discards_later_tokens() -> None:
    tokens = [ord("x"), token_id("byte_level", "hello"), ord("y"), ord("z")]
    delta = new_stream("byte_level", stop=("ll",)).push(tokens)
    assert (delta.text, delta.stopped_by, delta.num_tokens_used) == ("xhe", "ll", 2)


def test_a_repeated_beginning_does_not_hide_a_stop_string() -> None:
    delta = new_stream("byte_level", stop=("aab",)).push([ord(c) for c in "aaaab!"])
    assert (delta.text, delta.stopped_by) == ("aa", "aab")


def test_stop_strings_wait_for_min_tokens() -> None:
    stream = new_stream("byte_level", stop=("ab",), min_tokens=5)
    delta = stream.push([ord(c) for c in "ab.ab.ab"])
    assert (delta.text, delta.stopped_by, delta.num_tokens_used) == ("ab.", "ab", 5)


def test_a_stop_string_completed_by_the_last_held_bytes_cuts_the_text() -> None:
    dot = [token_id("sentencepiece", f"<0x{byte:02X}>") for byte in "。".encode()]
    stream = new_stream("sentencepiece", stop=("。",))
    assert stream.push([token_id("sentencepiece", "a"), *dot]).text == "a"
    assert stream.flush() == ""


def test_a_model_without_a_tokenizer_has_empty_text() -> None:
    stream = TextStream(None, (), 0)
    delta = stream.push([1, 2, 3])
    assert (delta.text, delta.stopped_by, delta.num_tokens_used, stream.flush()) == ("", None, 3, "")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_invalid_bytes_cost_constant_time_per_token(name: str) -> None:
    """With a hundred thousand invalid bytes, decoding from the last valid character would take hours."""
    byte = 0xFF if name == "byte_level" else token_id(name, "<0xFF>")
    stream = new_stream(name, stop=("\ufffd" * 50 + "!",))
    assert stream.push([byte] * 100_000).text + stream.flush() == "\ufffd" * 100_000


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="CTC"):
        Vocabulary(tokenizer)


def test_token_bytes_are_the_bytes_that_a_token_adds_to_the_text() -> None:
    _, byte_tokens = family("byte_level")
    assert byte_tokens.token_bytes(0xE2) == b"\xe2"
    assert byte_tokens.token_bytes(token_id("byte_level", "<|end|>")) == b"<|end|>"
    _, pieces = family("sentencepiece")
    assert pieces.token_bytes(token_id("sentencepiece", "▁ab")) == b" ab"
    assert pieces.token_bytes(token_id("sentencepiece", "<0xE2>")) == b"\xe2"
    assert pieces.token_bytes(100_000) == b""
    assert family("word_ends")[1].token_bytes(token_id("word_ends", "low</w>")) == b"low"
    assert family("word_piece")[1].token_bytes(token_id("word_piece", "play")) == b" play"
